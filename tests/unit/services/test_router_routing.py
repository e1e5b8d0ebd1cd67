"""The choice by prefix and load: chats find their node, no node gets too many, nothing is remembered without bound."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncfabric.actors import Identity, Joined, Member, Membership
from asyncfabric_services.nodes.messages import PREFIX_LABEL
from asyncfabric_services.router.prefix_map import MOST_HOLDERS, PrefixMap
from asyncfabric_services.router.routing import IMBALANCE, LATEST, MOST, SPARE, Labels, Routing
from asyncfabric_services.runner.prefix import PromptBlocks


class Site:
    """Members of one role, their loads, and a routing over them."""

    def __init__(self, nodes: int, *, by_prefix: bool = True, block_tokens: str = "4") -> None:
        self.membership = Membership()
        for number in range(nodes):
            self.membership.apply(Joined(Member(Identity(f"node-{number}", number + 1), "prefill")))
        self.members = self.membership.members("prefill")
        self.labels: Labels = {member.identity: {PREFIX_LABEL: block_tokens} for member in self.members}
        self.load: Counter[Identity] = Counter()
        self.computed: dict[Identity, list[list[int]]] = {member.identity: [] for member in self.members}
        self.routing = Routing(lambda member: self.load[member.identity], by_prefix=by_prefix)

    def ordered(self, prompt: list[int]) -> list[Member]:
        return self.routing.ordered(self.by_load(), PromptBlocks(prompt), self.labels)

    def by_load(self) -> list[Member]:
        return sorted(self.members, key=lambda member: (self.load[member.identity], member.identity.name))

    def found(self, node: Identity, prompt: list[int]) -> int:
        """Return how many tokens of whole blocks of a prompt begin one that a node computed."""
        return max((_alike(one, prompt) // 4 * 4 for one in self.computed[node]), default=0)

    def choose(self, prompt: list[int]) -> Identity:
        return self.choose_for(PromptBlocks(prompt))

    def choose_for(self, blocks: PromptBlocks) -> Identity:
        chosen = self.routing.ordered(self.by_load(), blocks, self.labels)[0]
        self.routing.chosen(chosen, blocks, self.labels)
        return chosen.identity


def _alike(one: list[int], other: list[int]) -> int:
    return next(
        (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


def test_a_prompt_goes_where_its_beginning_was_computed() -> None:
    site = Site(4)
    first = site.choose(list(range(9)))
    others = {site.choose([number] * 9) for number in range(1, 4)}
    assert len({first, *others}) == 4  # equally loaded nodes take turns
    site.load[first] = 1
    for length in range(10, 40):
        assert site.choose(list(range(length))) == first  # a chat without company stays where it is
    assert site.choose([99, *range(9)]) != first
    site.load[first] = 3
    assert site.choose(list(range(40))) != first


def test_the_longest_match_wins_and_of_equal_ones_the_least_loaded() -> None:
    site = Site(3)
    one, two, three = (member for member in site.members)
    for member, length in ((one, 8), (two, 12), (three, 12)):
        site.routing.chosen(member, PromptBlocks(range(length)), site.labels)
    site.load = Counter({two.identity: 1})
    assert site.ordered(list(range(20)))[0] is three
    site.load = Counter({three.identity: 1})
    assert [member.identity.name for member in site.ordered(list(range(20)))] == ["node-1", "node-0", "node-2"]


def test_without_prefixes_the_order_is_that_of_the_load() -> None:
    for site in (
        Site(3, by_prefix=False),
        Site(3, block_tokens=""),
        Site(3, block_tokens="-1"),
        Site(3, block_tokens="9" * 7),
    ):
        site.load.update({site.members[0].identity: 2, site.members[1].identity: 1})
        for _ in range(9):
            assert site.choose(list(range(9))).name == "node-2"
        site.load.clear()
        assert site.choose(list(range(9))).name == "node-0"
    assert Site(0).ordered([1]) == []


def test_a_new_life_of_a_node_has_nothing_of_the_old_one() -> None:
    site = Site(2)
    first = site.choose(list(range(9)))
    site.membership.apply(Joined(Member(Identity(first.name, 77), "prefill")))
    site.members = site.membership.members("prefill")
    site.labels = {member.identity: {PREFIX_LABEL: "4"} for member in site.members}
    site.load[Identity(first.name, 77)] = 1
    assert site.choose(list(range(9))).name != first.name


def test_nodes_with_blocks_of_other_sizes_are_compared_by_tokens() -> None:
    site = Site(2)
    small, large = (member.identity for member in site.members)
    site.labels = {small: {PREFIX_LABEL: "2"}, large: {PREFIX_LABEL: "8"}}
    for member in site.members:
        site.routing.chosen(member, PromptBlocks(range(16 if member.identity == large else 10)), site.labels)
    assert site.ordered(list(range(20)))[0].identity == large
    assert site.ordered([*range(10), *[99] * 10])[0].identity == small


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 1 << 30), st.integers(1, 9))
def test_no_node_over_the_limit_is_chosen_for_its_prefix(seed: int, nodes: int) -> None:
    """Also: the same history gives the same choice, and all members come once."""
    rnd, site, again = random.Random(seed), Site(nodes), Site(nodes)
    latest: list[Identity] = []
    for _ in range(100):
        shared = [rnd.randrange(3)] * rnd.choice((0, 8, 40))
        prompt = [*shared, *(rnd.randrange(3) for _ in range(rnd.randrange(1, 20)))]
        if rnd.random() < 0.5:
            node = rnd.choice(site.members).identity
            site.load[node] = again.load[node] = rnd.randrange(20)
        order = site.ordered(prompt)
        assert sorted(order, key=str) == sorted(site.members, key=str)
        chosen = site.choose(prompt)
        assert chosen == order[0].identity == again.choose(prompt)
        least = min(site.load[member.identity] for member in site.members)
        if site.load[chosen] > least:
            assert site.load[chosen] <= IMBALANCE * site.load.total() / nodes + SPARE
            found = site.found(chosen, prompt)
            assert found
            if found < MOST * len(prompt):
                assert latest.count(chosen) + 1 <= IMBALANCE * (len(latest) + 1) / nodes + SPARE
        site.computed[chosen].append(prompt)
        latest = [*latest, chosen][-LATEST:]


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 1 << 30))
def test_the_map_is_bounded_and_counts_what_it_holds(seed: int) -> None:
    rnd, remembered = random.Random(seed), PrefixMap(most_blocks=50)
    nodes = [Identity(f"n{number}", 1) for number in range(MOST_HOLDERS + 4)]
    for _ in range(100):
        prompt = PromptBlocks([rnd.randrange(2)] * rnd.randrange(300)).of(4)
        node = rnd.choice(nodes)
        remembered.add(node, prompt)
        assert len(remembered) <= 50
        assert remembered.matched(prompt)[node] == min(len(prompt), 50)
        holders = Counter(one for held in remembered._holders.values() for one in held)
        assert max(map(len, remembered._holders.values()), default=0) <= MOST_HOLDERS
        assert {one: remembered.held(one) for one in nodes if remembered.held(one)} == holders


def chats(count: int, turns: int, shared: int, seed: int) -> list[Iterator[list[int]]]:
    """Return chats of growing prompts; all begin with the same `shared` tokens."""

    def chat(number: int) -> Iterator[list[int]]:
        rnd = random.Random(f"{seed} {number}")
        prompt = [7] * shared + [rnd.randrange(256) for _ in range(rnd.randrange(200, 600))]
        for _ in range(turns):
            yield list(prompt)
            prompt += [rnd.randrange(256) for _ in range(rnd.randrange(40, 160))]

    return [chat(number) for number in range(count)]


def play(site: Site, *, inside: int, shared: int, seed: int) -> tuple[float, float]:
    """Play 200 chats of 5 turns, `inside` at a time; return the share of later turns that found all of the turn before,
    and the most requests of a node over the mean."""
    rnd, waiting = random.Random(seed), chats(200, 5, shared, seed)
    running = [waiting.pop() for _ in range(inside)]
    held: dict[bytes, set[Identity]] = {}
    busy: list[tuple[Iterator[list[int]], Identity]] = []
    asked: Counter[Identity] = Counter()
    before: dict[int, list[bytes]] = {}
    later = found = 0
    while running or busy:
        if running and (len(busy) < inside // 2 or not busy):
            chat = running.pop(0)
            prompt = next(chat, None)
            if prompt is None:
                running += [waiting.pop()] if waiting else []
                continue
            hashes = PromptBlocks(prompt)
            node, blocks = site.choose_for(hashes), hashes.of(16)
            asked[node] += 1
            site.load[node] += 1
            if last := before.get(id(chat)):
                later += 1
                found += all(node in held[block] for block in last)
            before[id(chat)] = blocks
            for block in blocks:
                held.setdefault(block, set()).add(node)
            busy.append((chat, node))
        else:
            chat, node = busy.pop(rnd.randrange(len(busy)))
            site.load[node] -= 1
            running.append(chat)
    return found / later, max(asked.values()) * len(site.members) / asked.total()


@pytest.mark.parametrize(("inside", "shared"), [(4, 500), (16, 0), (16, 500), (64, 500)])
def test_chats_find_their_node_and_the_nodes_are_balanced(inside: int, shared: int) -> None:
    hits, imbalance = play(Site(4, block_tokens="16"), inside=inside, shared=shared, seed=1)
    assert hits >= 0.8 and imbalance <= IMBALANCE, (hits, imbalance)


def test_by_load_alone_a_chat_finds_its_node_by_chance() -> None:
    hits, imbalance = play(Site(4, by_prefix=False, block_tokens="16"), inside=16, shared=0, seed=1)
    assert 0.15 <= hits <= 0.45 and imbalance <= IMBALANCE, (hits, imbalance)
