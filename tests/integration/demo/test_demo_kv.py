"""`asyncfabric demo` end to end with real processes: every provider, a checkpoint, refusals, deaths and signals."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from asyncfabric_services.demo import demo_command

pytest.importorskip("torch", reason="the demo needs torch")
pytest.importorskip("transformers", reason="the demo needs transformers")

RUN = "from asyncfabric_services.demo import demo_command; demo_command()"
SMALL = ["--layers", "3", "--hidden", "64", "--tokens", "6"]
MANY = [*SMALL, "--json", "--tokens", "100", "--prompt-tokens", ",".join(["9"] * 50)]  # busy for many seconds
UNFIT = 3


def start(*options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", RUN, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def run(*options: str) -> tuple[int, list[dict[str, Any]], str]:
    """Run to the end; return (status, objects printed, stderr). Skips loudly where the provider cannot run."""
    process = start(*options, "--json")
    out, err = process.communicate(timeout=120)
    if process.returncode == UNFIT:
        pytest.skip(f"this machine cannot run it: {err.strip()}")
    return process.returncode, [json.loads(line) for line in out.splitlines()], err


def children_of(pid: int) -> dict[str, int]:
    """Return role -> process id of the children that run."""
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            words = Path(f"/proc/{child}/cmdline").read_bytes().decode().split("\0")
            found.update(
                {word.rpartition(".")[2]: int(child) for word in words if word.startswith("asyncfabric_services.")}
            )
    return found


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def check_summary(summary: dict[str, Any], provider: str) -> None:
    assert summary["provider"] == provider
    assert [summary[key] for key in ("wrong_answers", "lost", "retries", "leaked_pages")] == [0, 0, 0, 0]


@pytest.mark.slow
def test_streamed_equals_one_process() -> None:
    status, objects, err = run(*SMALL, "--prompt-tokens", "1,16,50", "--chunk", "24")
    *rows, summary = objects
    assert (status, [row["differences"] for row in rows]) == (0, [[], [], []]), err
    assert [row["prompt_tokens"] for row in rows] == [1, 16, 50]
    assert [row["pages"] for row in rows] == [3, 3, 12]
    assert all(row["identical"] and row["bytes"] > 0 and 0 <= row["hidden_share"] <= 1 for row in rows)
    assert summary["requests"] == 3
    check_summary(summary, "local")


@pytest.mark.slow
def test_a_checkpoint_directory_over_tcp(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "model")
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Pages are written once.\n---\nThe count states when they are there, and nothing else does.\n")
    model = ["--model", str(tmp_path / "model"), "--tokens", "5"]
    status, objects, err = run(*model, "--prompt-file", str(prompts), "--provider", "tcp")
    assert status == 0, err
    assert [row["identical"] for row in objects[:-1]] == [True, True]
    check_summary(objects[-1], "tcp")
    assert "2 layers, 4 query heads over 2 kv heads" in objects[-1]["model"]
    assert "bfloat16" in objects[-1]["model"]


def save_checkpoint(path: Path) -> None:
    """Save a small bfloat16 Llama and a trained tokenizer, as a real checkpoint has them."""
    import torch
    from tokenizers import ByteLevelBPETokenizer
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from transformers.utils import logging

    logging.disable_progress_bar()  # it would leave a thread
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator([Path(__file__).read_text()], vocab_size=400)
    PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer).save_pretrained(path)
    config = LlamaConfig(
        vocab_size=400,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(path)


@pytest.mark.slow
def test_a_prompt_too_long_for_the_model_is_stated(tmp_path: Path) -> None:
    status, objects, err = run(*SMALL, "--prompt-tokens", "40000")
    assert status == 1
    assert "40000 + 6 tokens exceed the model's 32768" in err
    assert objects[-1]["lost"] == 1


@pytest.mark.slow
def test_a_dead_child_is_named_and_nothing_is_left() -> None:
    """The one that the other waits for; the parent does the same for both."""
    with start(*MANY) as process:
        children = wait_for_children(process)
        os.kill(children["prefill"], signal.SIGKILL)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "prefill died: killed by SIGKILL" in err
    assert json.loads(out.splitlines()[-1])["lost"] > 0
    assert all(gone(pid) for pid in children.values())


@pytest.mark.slow
def test_a_signal_ends_everything_cleanly() -> None:
    with start(*MANY) as process:
        children = wait_for_children(process)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert "interrupted by SIGTERM" in err
    assert "Traceback" not in err
    assert all(gone(pid) for pid in children.values())


@pytest.mark.slow
def test_children_leave_when_the_parent_is_killed() -> None:
    with start(*MANY) as process:
        children = wait_for_children(process)
        watched = [os.pidfd_open(pid) for pid in children.values()]
        process.kill()
        process.communicate(timeout=60)
        for pidfd in watched:
            assert select.select([pidfd], [], [], 60)[0], f"still there: {children}"
            os.close(pidfd)


def wait_for_children(process: subprocess.Popen[str]) -> dict[str, int]:
    """Return both children once the first prompt was answered; 49 more keep them busy."""
    assert process.stdout is not None
    first = process.stdout.readline()
    assert first and json.loads(first).get("identical"), process.communicate()[1]
    children = children_of(process.pid)
    assert set(children) == {"prefill", "decode"}
    return children


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--provider", "pigeon"], "pigeon"),
        (["--prompt-tokens", "3,x"], "3,x"),
        (["--prompt-tokens", "0"], "at least 1"),
        (["--deadline", "soon"], "soon"),
        (["--tokens", "0"], "--tokens"),
        (["chess"], "chess"),
    ],
)
def test_bad_usage_is_refused_with_the_value(options: list[str], text: str) -> None:
    refused = CliRunner().invoke(demo_command, options)
    assert refused.exit_code == 2
    assert text in refused.output
