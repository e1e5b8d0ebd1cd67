"""`asyncfabric serve local` as a real process: answers of one process, clients that leave, SIGTERM, a checkpoint."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

pytest.importorskip("torch", reason="the runner needs torch")
pytest.importorskip("transformers", reason="the runner needs transformers")
openai = pytest.importorskip("openai", reason="the router is tested with the openai client")
pytest.importorskip("hypercorn", reason="the router needs hypercorn")

from asyncfabric_services.router.command import serve as serve_command  # noqa: E402

pytestmark = pytest.mark.slow
RUN = "from asyncfabric_services.cli import main; main()"
TINY = {"MODEL__LAYERS": "3", "MODEL__HIDDEN": "64", "MODEL__QUERY_HEADS": "4", "MODEL__KV_HEADS": "2"}
SMALL = TINY | {"HTTP__PORT": "0", "CACHE__MEMORY": "64MiB", "LOG__FORM": "json"}
PATIENCE = 60.0


class Server:
    """A running `asyncfabric serve local`."""

    def __init__(self, child: subprocess.Popen[str], address: str) -> None:
        self.child = child
        self.address = address

    def client(self) -> Any:
        return openai.OpenAI(base_url=f"{self.address}/v1", api_key="none", max_retries=0, timeout=PATIENCE)

    def metric(self, name: str) -> float:
        with socket.create_connection(("127.0.0.1", int(self.address.rpartition(":")[2])), PATIENCE) as one:
            one.sendall(b"GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            text = b"".join(iter(lambda: one.recv(65536), b"")).decode()
        return next(float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"{name} "))

    def until_metric(self, name: str, value: float) -> None:
        """Wait until a metric has a value; fails when it does not come."""
        deadline = time.monotonic() + PATIENCE
        while (now := self.metric(name)) != value:
            assert time.monotonic() < deadline, f"{name} is {now}, expected {value}"


@contextmanager
def serve(**settings: str) -> Iterator[Server]:
    environment = {f"ASYNCFABRIC_{name}": value for name, value in (SMALL | settings).items()}
    child = subprocess.Popen(
        [sys.executable, "-P", "-c", RUN, "serve", "local"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )
    try:
        assert child.stdout is not None
        line = child.stdout.readline()
        assert line, child.communicate(timeout=PATIENCE)[1]
        yield Server(child, json.loads(line)["listening"])
    finally:
        child.kill()
        child.communicate()


def test_requests_wait_in_order_and_one_too_many_is_asked_to_come_back() -> None:
    """A router that answers one at a time: three wait, by priority, and Retry-After follows how fast others leave."""
    limits = {"ROUTER__MOST_REQUESTS": "1", "ROUTER__MOST_WAITING": "3"}
    with serve(**limits) as server, server.client() as client, ThreadPoolExecutor(5) as threads:
        ended: list[str] = []

        def ask(name: str, priority: int, tokens: int) -> None:
            text_of(client, name, tokens, extra_body={"priority": priority})
            ended.append(name)

        asked = [threads.submit(ask, "inside", 0, 400)]
        server.until_metric("asyncfabric_router_inside_requests", 1)
        for waiting, (name, priority) in enumerate((("second", 0), ("third", 60), ("first", -60)), 1):
            asked.append(threads.submit(ask, name, priority, 4))
            server.until_metric("asyncfabric_router_waiting_requests", waiting)
        with pytest.raises(openai.RateLimitError) as busy:
            text_of(client, "one too many", 4)
        assert 1 <= int(busy.value.response.headers["retry-after"]) <= 60
        for one in asked:
            one.result(PATIENCE)
        assert ended == ["inside", "first", "second", "third"]


def text_of(client: Any, prompt: str, count: int, **more: Any) -> str:
    ask = {"model": "asyncfabric-random", "prompt": prompt, "max_tokens": count, "temperature": 0} | more
    answer = client.completions.create(**ask)
    return str(answer.choices[0].text)


def alone(prompt: str, count: int) -> str:
    """Return the answer of plain transformers in this process."""
    import torch
    from transformers.cache_utils import DynamicCache

    from asyncfabric_services.runner.model import ModelChoice, load_model

    torch.set_num_threads(1)
    model = load_model(ModelChoice(layers=3, hidden=64, query_heads=4, kv_heads=2), page_tokens=16).model
    cache, fed, stated = DynamicCache(config=model.config), list(prompt.encode()), []
    with torch.inference_mode():
        for _ in range(count):
            logits = model(torch.tensor([fed]), past_key_values=cache, logits_to_keep=1).logits[0, -1]
            fed = [int(logits.argmax())]
            stated += fed
    return bytes(stated).decode(errors="replace")


@pytest.fixture(scope="module")
def shared() -> Iterator[Server]:
    """One server for the tests that leave it as it was: a process takes seconds to load torch."""
    with serve() as server:
        yield server


def test_a_crowd_gets_the_answers_of_one_process(shared: Server) -> None:
    prompts = [f"{index}: {'Pages are written once. ' * (index % 5 + 1)}" for index in range(12)]
    with shared.client() as client, ThreadPoolExecutor(6) as crowd:
        answers = list(crowd.map(lambda prompt: text_of(client, prompt, 20), prompts))
    assert shared.metric("asyncfabric_runner_leased_pages") == 0
    passes = shared.metric("asyncfabric_runner_pass_requests_count")
    assert shared.metric("asyncfabric_runner_pass_requests_sum") > passes, "nothing was batched"
    assert answers == [alone(prompt, 20) for prompt in prompts]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_gives_its_pages_back(shared: Server, stream: bool) -> None:
    answered = 'asyncfabric_router_tokens_total{kind="answer"}'
    before = shared.metric(answered)
    body = json.dumps({"model": "asyncfabric-random", "prompt": "x" * 300, "max_tokens": 4000, "stream": stream})
    with socket.create_connection(("127.0.0.1", int(shared.address.rpartition(":")[2])), PATIENCE) as one:
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        )
        one.sendall((head + body).encode())
        shared.until_metric("asyncfabric_runner_running_requests", 1)
        assert shared.metric("asyncfabric_runner_leased_pages") > 200
        if stream:
            assert one.recv(100)
    shared.until_metric("asyncfabric_runner_leased_pages", 0)
    shared.until_metric("asyncfabric_router_inside_requests", 0)
    assert shared.metric(answered) - before < 4000


def test_sigterm_lets_a_stream_finish_and_then_ends_with_0() -> None:
    with serve() as server, server.client() as client:
        stream = client.completions.create(
            model="asyncfabric-random", prompt="hello", max_tokens=400, temperature=0, stream=True
        )
        parts = [next(stream)]
        server.child.send_signal(signal.SIGTERM)
        parts += list(stream)
        assert parts[-1].choices[0].finish_reason == "length"
        stated = "".join(part.choices[0].text for part in parts)
        _, err = server.child.communicate(timeout=PATIENCE)
        assert server.child.returncode == 0
        log = [json.loads(line) for line in err.splitlines()]
        assert any(line["message"] == "draining" and line["requests"] == 1 for line in log)
        assert any(line["message"] == "request answered" and line["answer_tokens"] == 400 for line in log)
    assert stated == alone("hello", 400)


def test_sigterm_ends_with_0_within_the_drain_deadline_when_an_answer_takes_too_long() -> None:
    with serve(HTTP__DRAIN="2s") as server, server.client() as client:
        stream = client.completions.create(
            model="asyncfabric-random", prompt="hello", max_tokens=10_000, temperature=0, stream=True
        )
        next(stream)
        server.child.send_signal(signal.SIGTERM)
        with pytest.raises(openai.APIError, match="stopped before the answer was complete"):
            list(stream)
        assert server.child.wait(PATIENCE) == 0


def test_a_second_signal_does_not_wait() -> None:
    with serve(HTTP__DRAIN="10m") as server, server.client() as client:
        stream = client.completions.create(model="asyncfabric-random", prompt="a", max_tokens=10_000, stream=True)
        next(stream)
        stated: list[str] = []
        assert server.child.stderr is not None
        reader = threading.Thread(target=lambda: stated.extend(server.child.stderr or []))
        server.child.send_signal(signal.SIGTERM)
        reader.start()
        server.until_metric("asyncfabric_router_inside_requests", 1)
        server.child.send_signal(signal.SIGINT)
        code = server.child.wait(PATIENCE)
        reader.join()
        assert code == 0, "".join(stated)
        stream.close()


def test_a_checkpoint_is_served_under_its_name(tmp_path: Path) -> None:
    path = tmp_path / "small-llama"
    save_checkpoint(path)
    with serve(MODEL__PATH=str(path)) as server, server.client() as client:
        assert [model.id for model in client.models.list().data] == ["small-llama"]
        chat = client.chat.completions.create(
            model="small-llama", messages=[{"role": "user", "content": "Pages"}], max_tokens=8, temperature=0
        )
        parts = client.chat.completions.create(
            model="small-llama",
            messages=[{"role": "user", "content": "Pages"}],
            max_tokens=8,
            temperature=0,
            stream=True,
        )
        assert "".join(part.choices[0].delta.content or "" for part in parts) == chat.choices[0].message.content
        assert chat.usage.completion_tokens <= 8


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


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"HTTP__PROT": "1"}, "did you mean ASYNCFABRIC_HTTP__PORT?"),
        ({"CACHE__MEMORY": "100"}, "one page of all layers needs"),
        ({"MODEL__PATH": "/nowhere"}, "the model cannot be loaded: there is no folder /nowhere"),
        ({"HTTP__HOST": "192.0.2.1"}, "cannot listen on 192.0.2.1"),
    ],
)
def test_a_server_that_cannot_start_states_why(settings: dict[str, str], text: str) -> None:
    """In this process: torch is loaded here already."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    environment = {f"ASYNCFABRIC_{name}": value for name, value in (SMALL | settings).items()}
    run = CliRunner().invoke(serve_command, ["local"], env=environment)
    for handler in set(root.handlers) - set(handlers):
        root.removeHandler(handler)
    root.setLevel(level)
    assert run.exit_code == 2, run.output
    assert text in run.output
    assert "Traceback" not in run.output
