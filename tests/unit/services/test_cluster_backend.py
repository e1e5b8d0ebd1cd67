"""The router's choice of nodes, and what it does when they die, are busy or refuse: real links, decoders by script."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import msgspec
import pytest
import trio
import trio.testing
from prometheus_client import CollectorRegistry

from asyncfabric.actors import Actor, Membership, Policy, handles, labels_of, member_changes, open_node, trace_context
from asyncfabric.control import DirectoryClient, Link, LinkConfig, open_link, serve_directory
from asyncfabric.errors import BrokenError, BusyError, InternalError
from asyncfabric.kv import KvLayout
from asyncfabric.observe.spans import SpanRing, new_context, parse_context
from asyncfabric_services.nodes.messages import DECODER, FIELDS_LABEL, LAYOUT_LABEL, Generate, Tokens, refuse_fields
from asyncfabric_services.router import cluster_backend
from asyncfabric_services.router.attempts import ATTEMPTS, Attempts, AttemptsActor
from asyncfabric_services.router.backend import GenerateRequest, ServedModel
from asyncfabric_services.router.cluster_backend import MOST_ATTEMPTS, ClusterBackend
from asyncfabric_services.router.fault import ApiFault
from asyncfabric_services.runner.sampling import Sampling
from asyncfabric_services.runner.tokenizer import ByteTokenizer

pytestmark = [pytest.mark.trio, pytest.mark.slow]
LAYOUT = KvLayout(layers=2, kv_heads=2, head_dim=8, page_tokens=16, dtype="float32")
REQUEST = GenerateRequest("r", "m", (3, 1, 4), 8, Sampling(), 60.0)


def after(prompt: list[int]) -> int:
    """Return the token that the model of these tests gives after a prompt."""
    return (7 * sum(prompt) + len(prompt)) % 251


def answer_to(prompt: tuple[int, ...], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(after(tokens))
    return tokens[len(prompt) :]


class Decoder(Actor):
    """Answers as its script asks: (tokens to report, how to end), one entry per request; then whole answers."""

    concurrency: ClassVar[int] = 16

    def __init__(self, script: list[tuple[int, str]], asked: list[Generate], ended: list[str]) -> None:
        self._script = script
        self._asked = asked
        self._ended = ended

    @handles(Generate)
    async def generate(self, message: Generate) -> int:
        self._asked.append(message)
        count, ending = self._script.pop(0) if self._script else (message.max_tokens, "")
        tokens = list(message.prompt)
        for _ in range(count):
            tokens.append(after(tokens))
            await message.reply.tell(Tokens(message.attempt, tokens[-1:]))
        match ending:
            case "strange":
                await message.reply.tell(Tokens(message.attempt, [message.prompt[0], ByteTokenizer.vocabulary]))
                await trio.sleep_forever()
            case "more":
                await message.reply.tell(Tokens(message.attempt, [1]))
            case "dies":
                raise InternalError("dies by script")
            case "busy":
                raise BusyError("busy by script")
            case "refuses":
                raise ValueError("too long by script")
            case "breaks":
                raise BrokenError("breaks by script")
            case "hangs":
                try:
                    await trio.sleep_forever()
                finally:
                    self._ended.append(message.attempt)
        return count


class Site:
    """A router's backend and its decode nodes."""

    def __init__(self, backend: ClusterBackend, attempts: Attempts, membership: Membership) -> None:
        self.backend = backend
        self.attempts = attempts
        self.membership = membership
        self.asked: dict[str, list[Generate]] = {}
        self.ended: list[str] = []
        self.decodes: dict[str, tuple[Link, DirectoryClient]] = {}
        self.prefills: list[tuple[Link, DirectoryClient]] = []

    async def membership_without(self, name: str) -> None:
        async for members in self.membership.views():
            if name not in {member.identity.name for member in members}:
                return

    async def ask(self, request: GenerateRequest = REQUEST) -> list[int]:
        async with self.backend.generate(request) as tokens:
            return [token async for token in tokens]


@asynccontextmanager
async def open_site(
    folder: Path,
    scripts: dict[str, list[tuple[int, str]]],
    patience: float = 20.0,
    prefills: int = 1,
    layout: str = msgspec.json.encode(LAYOUT).decode(),
    spans: SpanRing | None = None,
) -> AsyncIterator[Site]:
    config = LinkConfig(ipc_folder=str(folder / "ipc"))
    async with AsyncExitStack() as stack:
        link = await stack.enter_async_context(open_link("router", config=config))
        await stack.enter_async_context(serve_directory(link))
        directory = await stack.enter_async_context(DirectoryClient(link, link.address))
        node = await stack.enter_async_context(open_node("router", link))
        membership, attempts = Membership(), Attempts()
        answers = await node.spawn(AttemptsActor, attempts, name=ATTEMPTS)
        backend = ClusterBackend(
            ServedModel("m", ByteTokenizer(), 100),
            node,
            link,
            directory,
            membership,
            attempts,
            answers,
            most_running=8,
            patience=patience,
            registry=CollectorRegistry(),
            spans=spans,
        )
        site = Site(backend, attempts, membership)
        for name, script in scripts.items():
            other = await stack.enter_async_context(open_link(name, config=config))
            client = await stack.enter_async_context(DirectoryClient(other, link.address))
            there = await stack.enter_async_context(open_node(name, other, policy=Policy(restarts=99)))
            asked = site.asked[name] = []
            await there.spawn(Decoder, script, asked, site.ended, name=DECODER)
            await client.register("decode", other.address, labels_of(b"fabric"))
            site.decodes[name] = other, client
        for number in range(prefills):
            other = await stack.enter_async_context(open_link(f"prefill-{number}", config=config))
            client = await stack.enter_async_context(DirectoryClient(other, link.address))
            site.prefills.append((other, client))
            await client.register("prefill", other.address, labels_of(b"fabric") | {LAYOUT_LABEL: layout})
        changes = await stack.enter_async_context(directory.watch())
        nursery = await stack.enter_async_context(trio.open_nursery())
        nursery.start_soon(membership.follow, member_changes(changes))
        await membership.wait_for("decode", len(scripts))
        await membership.wait_for("prefill", prefills)
        with trio.fail_after(60):
            yield site
        nursery.cancel_scope.cancel()


async def test_an_answer_goes_on_where_a_dead_node_left_it(tmp_path: Path) -> None:
    async with open_site(tmp_path, {"a": [(3, "dies")], "b": [(2, "dies")], "c": []}) as site:
        assert await site.ask() == answer_to(REQUEST.prompt, 8)
        (first,), (second,), (third,) = site.asked["a"], site.asked["b"], site.asked["c"]
        assert (first.answered, second.answered, third.answered) == (0, 3, 5)
        assert third.prompt == [*REQUEST.prompt, *answer_to(REQUEST.prompt, 5)]
        assert third.max_tokens == 3
        assert len({first.attempt, second.attempt, third.attempt}) == 3
        assert [source.layout for source in third.sources] == [LAYOUT]


async def test_fields_of_an_engine_go_to_nodes_that_take_them(tmp_path: Path) -> None:
    """Also as the second choice by load, and after a loss; without such a node the router refuses them itself."""
    request = replace(REQUEST, fields={"top_k": 5})
    async with open_site(tmp_path, {"a": [], "b": [(3, "dies")], "c": []}, patience=0.1) as site:
        assert not site.backend.models()[0].passes_fields
        with pytest.raises(ApiFault, match="no decode node can take the request"):
            await site.ask(request)
        for name in "bc":
            link, client = site.decodes[name]
            await client.register("decode", link.address, labels_of(b"fabric", load=5) | {FIELDS_LABEL: "any"})
        with trio.fail_after(60):
            while not site.backend.models()[0].passes_fields:
                await trio.lowlevel.checkpoint()
        for _ in range(3):
            assert await site.ask(request) == answer_to(REQUEST.prompt, 8)
        assert site.asked["a"] == []
        for message in site.asked["b"] + site.asked["c"]:
            assert message.fields == b'{"top_k":5}'
            with pytest.raises(ValueError, match="does not know the fields 'top_k'"):
                refuse_fields(message)
        await site.ask()
        assert [message.fields for message in site.asked["a"]] == [b""]
        refuse_fields(site.asked["a"][0])


async def test_a_node_that_dies_after_its_last_token_is_not_asked_again(tmp_path: Path) -> None:
    async with open_site(tmp_path, {"a": [(8, "dies")], "b": []}) as site:
        assert await site.ask() == answer_to(REQUEST.prompt, 8)
        assert site.asked["b"] == []


@pytest.mark.parametrize(("count", "ending"), [(3, "strange"), (8, "more")])
async def test_a_node_that_reports_what_is_no_answer_is_left_for_another(
    tmp_path: Path, count: int, ending: str
) -> None:
    """A token that the router's tokenizer does not know ended as the client's mistake, with 400."""
    async with open_site(tmp_path, {"a": [(count, ending)], "b": []}) as site:
        assert await site.ask() == answer_to(REQUEST.prompt, 8)
        assert [message.answered for message in site.asked["b"]] == ([3] if ending == "strange" else [])


async def test_nobody_but_nodes_that_report_what_is_no_answer_is_no_fault_of_the_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_backend, "MOST_ATTEMPTS", 2)
    async with open_site(tmp_path, {"a": [(0, "strange")] * 2}) as site:
        with pytest.raises(BrokenError, match="a was lost: it sent token 256 of a vocabulary of 256"):
            await site.ask()


async def test_a_node_whose_address_is_none_is_passed_over(tmp_path: Path) -> None:
    async with open_site(tmp_path, {"a": [], "b": []}) as site:
        _, client = site.decodes["a"]
        await client.register("decode", "no address", labels_of(b"fabric", load=-1))
        async for members in site.membership.views():
            if any(member.address == "no address" for member in members):
                break
        assert await site.ask() == answer_to(REQUEST.prompt, 8)
        assert (len(site.asked["a"]), len(site.asked["b"])) == (0, 1)


async def test_a_node_that_was_cut_off_and_comes_back_is_asked_again(tmp_path: Path) -> None:
    async with open_site(tmp_path, {"a": [(3, "dies")]}) as site, trio.open_nursery() as nursery:
        link, client = site.decodes["a"]

        async def come_back() -> None:
            while not site.asked["a"]:
                await trio.testing.wait_all_tasks_blocked()
            await client.leave()
            await site.membership_without("a")
            await client.register("decode", link.address, labels_of(b"fabric"))

        nursery.start_soon(come_back)
        assert await site.ask() == answer_to(REQUEST.prompt, 8)
        assert [message.answered for message in site.asked["a"]] == [0, 3]


async def test_what_an_ended_attempt_still_states_is_dropped(tmp_path: Path) -> None:
    async with open_site(tmp_path, {"a": [(3, "dies")], "b": []}) as site:
        got = []
        async with site.backend.generate(REQUEST) as tokens:
            async for token in tokens:
                got.append(token)
                if len(got) == 4:
                    site.attempts.take(Tokens(site.asked["a"][0].attempt, [99]))
        assert got == answer_to(REQUEST.prompt, 8)


async def test_a_busy_node_gives_way_to_another_and_all_busy_is_busy(tmp_path: Path) -> None:
    async with open_site(tmp_path, {"a": [(0, "busy"), (0, "busy")], "b": [(8, ""), (0, "busy")]}) as site:
        assert await site.ask() == answer_to(REQUEST.prompt, 8)
        with pytest.raises(BusyError, match="busy by script"):
            await site.ask()


async def test_what_no_node_can_serve_is_not_tried_twice(tmp_path: Path) -> None:
    async with open_site(tmp_path, {"a": [(0, "refuses")], "b": [(0, "refuses")]}) as site:
        with pytest.raises(ValueError, match="too long by script"):
            await site.ask()
        assert len(site.asked["a"]) + len(site.asked["b"]) == 1


async def test_failures_are_tried_again_and_then_reported(tmp_path: Path) -> None:
    script = [(0, "breaks"), (1, "breaks"), *[(0, "breaks")] * MOST_ATTEMPTS]
    async with open_site(tmp_path, {"a": script}) as site:
        got = []
        with pytest.raises(BrokenError, match="breaks by script"):
            async with site.backend.generate(REQUEST) as tokens:
                async for token in tokens:
                    got.append(token)
        assert got == answer_to(REQUEST.prompt, 1)
        assert len(site.asked["a"]) == MOST_ATTEMPTS


@pytest.mark.parametrize(("scripts", "prefills", "role"), [({}, 1, "decode"), ({"a": []}, 0, "prefill")])
async def test_no_node_is_a_503(
    tmp_path: Path, scripts: dict[str, list[tuple[int, str]]], prefills: int, role: str
) -> None:
    async with open_site(tmp_path, scripts, patience=0.01, prefills=prefills) as site:
        with pytest.raises(ApiFault, match=f"no {role} node") as caught:
            await site.ask()
        assert (caught.value.status, caught.value.retry_after) == (503, 1)


async def test_a_prefill_node_whose_layout_is_unknown_is_not_held_against_a_decode_node(tmp_path: Path) -> None:
    async with open_site(tmp_path, {"a": []}, patience=0.01, layout="") as site:
        with pytest.raises(ApiFault, match="no prefill node"):
            await site.ask()
        assert site.asked["a"] == []


async def test_a_prefill_node_that_states_its_layout_late_is_waited_for(tmp_path: Path) -> None:
    async with open_site(tmp_path, {"a": []}, layout="") as site, trio.open_nursery() as nursery:
        link, client = site.prefills[0]
        label = {LAYOUT_LABEL: msgspec.json.encode(LAYOUT).decode()}

        async def report_later() -> None:
            await trio.testing.wait_all_tasks_blocked(0.05)
            await client.register("prefill", link.address, labels_of(b"fabric") | label)

        nursery.start_soon(report_later)
        assert await site.ask() == answer_to(REQUEST.prompt, 8)


async def test_leaving_ends_the_handler_there_before_the_scope_is_left(tmp_path: Path) -> None:
    async with open_site(tmp_path, {"a": [(2, "hangs")]}) as site:
        async with site.backend.generate(REQUEST) as tokens:
            assert [await anext(tokens), await anext(tokens)] == answer_to(REQUEST.prompt, 2)
            assert site.backend.capacity().running == 1
        assert site.ended == [site.asked["a"][0].attempt]
        assert site.backend.capacity().running == 0


async def test_requests_go_to_the_least_loaded(tmp_path: Path) -> None:
    async with open_site(tmp_path, {name: [(1, "hangs")] * 2 for name in "abc"}) as site, AsyncExitStack() as stack:
        for _ in range(6):
            tokens = await stack.enter_async_context(site.backend.generate(REQUEST))
            await anext(tokens)
        assert [len(site.asked[name]) for name in "abc"] == [2, 2, 2]


async def test_requests_are_shown_with_their_nodes_and_what_they_wait_for(tmp_path: Path) -> None:
    async with open_site(tmp_path, {"a": [(2, "hangs")]}) as site:
        async with site.backend.generate(REQUEST) as tokens:
            assert [await anext(tokens), await anext(tokens)] == answer_to(REQUEST.prompt, 2)
            (asked,) = site.backend.asked()
            row = asked.row()
            assert row.pop("for_s") > 0
            assert row == {
                "request": "r",
                "decode": "a",
                "sources": ["prefill-0"],
                "attempts": 1,
                "prompt_tokens": 3,
                "tokens": 2,
                "max_tokens": 8,
            }
            line = asked.waiting()
            assert (line.what, line.waits_for, line.have, line.need) == ("request r", "tokens", 2, 8)
            assert line.missing_from == ("a",)
        assert site.backend.asked() == []


async def test_a_request_that_no_node_takes_waits_for_one(tmp_path: Path) -> None:
    async with open_site(tmp_path, {}) as site, site.backend.generate(REQUEST):
        await trio.testing.wait_all_tasks_blocked(0.01)
        (asked,) = site.backend.asked()
        line = asked.waiting()
        assert (line.waits_for, line.missing_from, line.detail) == ("a node that takes it", (), {"attempts": 0})


async def test_each_attempt_is_a_span_that_its_decode_node_continues(tmp_path: Path) -> None:
    spans = SpanRing()
    spans.on = True
    async with open_site(tmp_path, {"a": [(3, "dies")], "b": []}, spans=spans) as site:
        context = new_context().text()
        token = trace_context.set(context)
        try:
            await site.ask()
        finally:
            trace_context.reset(token)
        (first,), (second,) = site.asked["a"], site.asked["b"]
    attempts = {span.args["decode"]: span for span in spans.take()}
    trace, parent = (parse_context(context) or ("", ""))[:2]
    for name, message in (("a", first), ("b", second)):
        assert parse_context(message.trace) == (trace, attempts[name].id, 1, "")
        assert attempts[name].parent == parent
    assert attempts["a"].end_ns <= attempts["b"].begin_ns
