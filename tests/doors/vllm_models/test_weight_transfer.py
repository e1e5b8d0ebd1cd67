"""Weights from FSDP2 into vLLM's model classes by vLLM's own factories, client, routes and worker: right to the bit."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import requests

HERE = Path(__file__).parent


class Program:
    """A program of this folder that answers lines of JSON; ends with the block."""

    def __init__(self, name: str, *arguments: object) -> None:
        self._child = subprocess.Popen(
            [sys.executable, str(HERE / name), *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *ended: object) -> None:
        assert self._child.stdin is not None and self._child.stdout is not None
        self._child.stdin.close()
        try:
            self._child.wait(20)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        self._child.stdout.close()

    def ask(self, **command: Any) -> None:
        assert self._child.stdin is not None
        print(json.dumps(command), file=self._child.stdin, flush=True)

    def answer(self) -> dict[str, Any]:
        assert self._child.stdout is not None
        for line in self._child.stdout:
            if line.startswith("{"):  # vLLM writes there too
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise AssertionError(f"the program ended with {self._child.wait(60)}")


class Pair:
    """A training and an engine."""

    def __init__(self, trainers: list[Program], url: str, folder: Path) -> None:
        self.url = url
        self.folder = folder
        self._trainers = trainers

    def train(self, **command: Any) -> list[str]:
        """Give a command to all ranks of the training; return what they raised."""
        for one in self._trainers:
            one.ask(**command)
        return [raised for one in self._trainers if (raised := one.answer().get("raised"))]

    def engine(self, route: str, **body: Any) -> Any:
        answer = requests.post(f"{self.url}/{route}", json=body, timeout=120)
        answer.raise_for_status()
        return answer.json()


@pytest.fixture(scope="module", params=[(2, 1), (2, 2)], ids=["one rank", "two ranks"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Return a training of two ranks and an engine of one or two."""
    trainers, workers = request.param
    folder = tmp_path_factory.mktemp("pair")
    with ExitStack() as stack:
        server = stack.enter_context(Program("engine_server.py", folder, workers))
        ranks = [stack.enter_context(Program("training_rank.py", folder, rank, trainers)) for rank in range(trainers)]
        port = server.answer()["port"]
        for one in ranks:
            one.answer()
        yield Pair(ranks, f"http://127.0.0.1:{port}", folder)


CASES = [
    ("Qwen3MoeForCausalLM", "module"),
    ("LlamaForCausalLM", "module"),
    ("Gemma2ForCausalLM", "module"),
    ("DeepseekV3ForCausalLM", "own"),
]


@pytest.mark.parametrize(("family", "source"), CASES)
def test_layers_are_as_after_load_weights(pair: Pair, family: str, source: str) -> None:
    assert pair.train(do="save", family=family, version=1) == []
    pair.engine("make", family=family, version=1)
    assert pair.train(do="open", url=pair.url, source=source) == []
    for version in (2, 3):
        assert pair.train(do="send", version=version) == []
        assert not any(pair.engine("differences", version=version)), family
    assert all(pair.engine("differences", version=2)), "versions differ"
    pair.engine("reload", version=1)
    assert not any(pair.engine("differences", version=1)), "vLLM's own reload goes on as before"
    assert pair.train(do="shutdown") == []


def test_everybody_goes_on_where_one_rank_cannot_be_opened(pair: Pair) -> None:
    family = "LlamaForCausalLM"
    assert pair.train(do="save", family=family, version=21) == []
    pair.engine("make", family=family, version=21)
    raised = pair.train(do="open", url=pair.url, source="module", wrong=1)
    assert len(raised) == 2 and "nonsense" in raised[1], raised
    assert pair.train(do="open", url=pair.url, source="module") == []
    assert pair.train(do="send", version=22) == []
    assert not any(pair.engine("differences", version=22))
    assert pair.train(do="shutdown") == []


def test_layers_stay_as_they_were_where_no_version_comes(pair: Pair) -> None:
    family = "LlamaForCausalLM"
    assert pair.train(do="save", family="Qwen2ForCausalLM", version=11) == []
    pair.engine("make", family="Qwen2ForCausalLM", version=11)
    assert pair.train(do="save", family=family, version=11) == []
    raised = pair.train(do="open", url=pair.url, source="module")
    assert len(raised) == 2 and all("self_attn.qkv_proj.bias" in text for text in raised), raised
    pair.engine("make", family=family, version=11)
    for version in (12, 13):  # two trainings, one after the other
        assert pair.train(do="open", url=pair.url, source="module") == []
        assert pair.train(do="send", version=version) == []
        assert pair.train(do="shutdown") == []
        assert "shutdown() was called" in pair.train(do="publish")[0]
    pair.engine("start_weight_update")
    with pytest.raises(requests.HTTPError):
        pair.engine("update_weights", update_info={"version": 2, "deadline_s": 0.5})
    assert not any(pair.engine("differences", version=13))
    with pytest.raises(requests.HTTPError):
        pair.engine("finish_weight_update")
