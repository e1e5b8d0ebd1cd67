"""Help of the `serve` commands: each shows its own flags, with units, ranges and defaults as they are written."""

from __future__ import annotations

import re

import pytest
from click.testing import CliRunner

from asyncfabric_services.router.command import serve

COMMANDS = ("local", "directory", "prefill", "decode", "router", "expert", "coordinator", "trainer", "rollout")


def asked(*arguments: str) -> str:
    run = CliRunner().invoke(serve, arguments, terminal_width=400)
    return run.output


def flags(command: str) -> set[str]:
    return set(re.findall(r"^  (--[a-z-]+)", asked(command, "--help"), re.MULTILINE))


@pytest.mark.parametrize(
    ("command", "own", "others"),
    [
        ("local", {"--cache-memory", "--router-deadline"}, {"--cluster-bind", "--train-every", "--model-experts"}),
        ("directory", {"--cluster-bind", "--http-port"}, {"--cluster-directory", "--model-path", "--cache-memory"}),
        ("prefill", {"--cluster-rails", "--batch-chunk-tokens"}, {"--weights-log", "--router-deadline"}),
        ("decode", {"--cluster-rails", "--cache-memory"}, {"--weights-log", "--cluster-patience"}),
        ("router", {"--router-deadline", "--cluster-patience"}, {"--cache-memory", "--cluster-rails"}),
        ("expert", {"--model-experts", "--cluster-rails"}, {"--cache-memory", "--model-name"}),
        ("coordinator", {"--weights-log"}, {"--weights-memory", "--cluster-rails", "--model-path"}),
        ("trainer", {"--train-every", "--weights-form", "--cluster-rails"}, {"--weights-memory", "--weights-log"}),
        ("rollout", {"--weights-memory", "--cluster-rails"}, {"--train-every", "--model-path", "--cache-memory"}),
    ],
)
def test_a_command_shows_its_own_flags_only(command: str, own: set[str], others: set[str]) -> None:
    shown = flags(command)
    assert own | {"--config", "--node-name", "--http-host", "--log-level"} <= shown
    assert not others & shown


def test_every_setting_is_a_flag_of_some_command() -> None:
    from asyncfabric_services.settings.keys import all_keys

    assert {key.flag for key in all_keys().values()} <= set[str]().union(*map(flags, COMMANDS))


def test_help_has_the_kind_range_and_default_of_values() -> None:
    local, trainer = asked("local", "--help"), asked("trainer", "--help")
    assert re.search(r"--http-drain DURATION .*\[0\.1s to 3600s; default: 30s\]", local)
    assert re.search(r"--http-port INTEGER .*\[0 to 65535; default: 8000\]", local)
    assert re.search(r"--cache-memory SIZE .*default: 256MiB\]", local)
    assert re.search(r"--model-path PATH .*safetensors$", local, re.MULTILINE)
    assert re.search(r"--weights-form \[bfloat16\|float8\]\s.*default: bfloat16\]", trainer)
    assert "DURATION is a number with ms, s, m or h" in local


def test_a_flag_of_another_command_is_refused_with_its_command() -> None:
    text = asked("router", "--weights-log", "decisions")
    assert "--weights-log is no option of" in text and "`serve coordinator`" in text
    assert "Did you mean" in asked("router", "--http-prt", "1")
