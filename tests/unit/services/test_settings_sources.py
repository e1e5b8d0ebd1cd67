"""Settings: file < environment < flags, each with its origin; mistakes are reported by name, with the nearest key."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from asyncfabric_services.settings.command import config
from asyncfabric_services.settings.keys import SettingsError, all_keys
from asyncfabric_services.settings.schema import MOST_KEYS, Settings
from asyncfabric_services.settings.sources import load_settings


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "node.toml"
    path.write_text('[http]\nport = 9000\ndrain = "5s"\n[cache]\nmemory = "64MiB"\n[model]\npath = "/models/a"\n')
    return path


def test_the_later_source_wins_and_is_named(file: Path) -> None:
    loaded = load_settings(
        file=file,
        environment={"ASYNCFABRIC_HTTP__PORT": "9001", "ASYNCFABRIC_HTTP__DRAIN": "250ms", "HOME": "/"},
        flags={"http.port": "9002", "http.host": None},
    )
    assert loaded.settings.http.port == 9002
    assert loaded.settings.http.drain == 0.25
    assert loaded.settings.cache.memory == 64 << 20
    assert loaded.settings.model.path == Path("/models/a")
    assert loaded.settings.http.host == "127.0.0.1"
    assert loaded.origins["http.port"] == "flag --http-port"
    assert loaded.origins["http.drain"] == "environment ASYNCFABRIC_HTTP__DRAIN"
    assert loaded.origins["cache.memory"] == f"file {file}"
    assert loaded.origins["http.host"] == "default"


def test_without_sources_there_are_the_defaults() -> None:
    loaded = load_settings()
    assert loaded.settings == Settings()
    assert set(loaded.origins) == set(all_keys())
    assert set(loaded.origins.values()) == {"default"}


def test_the_environment_can_name_the_file(file: Path, tmp_path: Path) -> None:
    assert load_settings(environment={"ASYNCFABRIC_CONFIG": str(file)}).settings.http.port == 9000
    other = tmp_path / "other.toml"
    other.write_text("[http]\nport = 1\n")
    named = load_settings(file=other, environment={"ASYNCFABRIC_CONFIG": str(file)})
    assert named.settings.http.port == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[http]\nprot = 1\n", r"http\.prot \(file .*\): there is no such key; did you mean http\.port\?"),
        ("[htp]\nport = 1\n", r"htp\.port .* did you mean http\.port\?"),
        ("port = 1\n", r"port \(file .*\): keys stand in sections"),
        ("[http\n", "not TOML"),
        ("[http]\nport = '80a'\n", r"http\.port \(file .*\): expected an integer, got '80a'"),
        ("[http]\nport = true\n", "expected an integer, got True"),
        ("[http]\nport = 70000\n", "expected at most 65535, got 70000"),
        ("[http]\ndrain = '5 parsecs'\n", "not a duration"),
        ("[cache]\nmemory = '64MoB'\n", "not a size"),
        ("[cache]\nmemory = [1]\n", "expected a number with a unit"),
        ("[log]\nform = 'yaml'\n", "expected one of text, json, got 'yaml'"),
        ("[http]\nhost = 5\n", "expected a string, got 5"),
    ],
)
def test_mistakes_in_a_file_are_reported(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(SettingsError, match=message):
        load_settings(file=path)


def test_a_file_that_is_not_there_is_reported(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="cannot be read: No such file"):
        load_settings(environment={"ASYNCFABRIC_CONFIG": str(tmp_path / "none.toml")})


def test_mistakes_in_the_environment_and_in_flags_are_reported() -> None:
    with pytest.raises(SettingsError, match=r"ASYNCFABRIC_HTTP__PROT .* did you mean ASYNCFABRIC_HTTP__PORT\?"):
        load_settings(environment={"ASYNCFABRIC_HTTP__PROT": "1"})
    with pytest.raises(SettingsError, match=r"ASYNCFABRIC_HTTP_PORT .* did you mean ASYNCFABRIC_HTTP__PORT\?"):
        load_settings(environment={"ASYNCFABRIC_HTTP_PORT": "1"})
    with pytest.raises(SettingsError, match=r"http\.port \(environment ASYNCFABRIC_HTTP__PORT\): expected an integer"):
        load_settings(environment={"ASYNCFABRIC_HTTP__PORT": "x"})
    with pytest.raises(SettingsError, match=r"http\.drain \(flag --http-drain\): expected at least 0\.1"):
        load_settings(flags={"http.drain": "1ms"})


def test_variables_of_the_engine_and_the_tests_are_no_settings() -> None:
    other = {"ASYNCFABRIC_STREAMING_COPY": "1", "ASYNCFABRIC_TEST_WATCHDOG_S": "9", "ASYNCFABRIC_WITH_VERBS": "0"}
    built = re.findall(r"export (ASYNCFABRIC_[A-Z_]+)", (Path(__file__).parents[3] / "Makefile").read_text())
    assert "ASYNCFABRIC_JOBS" in built
    assert load_settings(environment=other | dict.fromkeys(built, "1")).settings == Settings()


def test_there_are_few_keys_and_each_is_explained_once() -> None:
    keys = all_keys()
    assert 20 <= len(keys) <= MOST_KEYS == 51
    assert all(len(key.text) > 5 for key in keys.values())
    assert len({key.flag for key in keys.values()}) == len({key.variable for key in keys.values()}) == len(keys)
    for key in keys.values():  # a default that its own range refuses could not be written down
        if key.default not in (None, "", ()):
            assert key.read(str(key.default)) == key.default


def test_config_show_reports_values_and_origins(file: Path) -> None:
    run = CliRunner().invoke(config, ["show", "--origin", "--config", str(file), "--http-host", "::1"])
    assert run.exit_code == 0, run.output
    lines = {line.split()[0]: line.split(None, 2) for line in run.output.splitlines()}
    assert lines["http.port"][1:] == ["9000", f"file {file}"]
    assert lines["http.host"][1:] == ['"::1"', "flag --http-host"]
    assert lines["log.level"][1:] == ['"info"', "default"]
    run = CliRunner().invoke(config, ["show", "--json"], env={"ASYNCFABRIC_LOG__LEVEL": "debug"})
    rows = {row["key"]: row for row in map(json.loads, run.output.splitlines())}
    assert rows["log.level"] == {"key": "log.level", "value": "debug", "origin": "environment ASYNCFABRIC_LOG__LEVEL"}
    assert list(rows) == list(all_keys())


def test_a_wrong_setting_is_a_usage_error() -> None:
    run = CliRunner().invoke(config, ["show"], env={"ASYNCFABRIC_HTTP__PORT": "-1"})
    assert run.exit_code == 2
    assert "http.port (environment ASYNCFABRIC_HTTP__PORT): expected at least 0" in run.output
