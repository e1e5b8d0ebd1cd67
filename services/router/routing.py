"""The order in which a router asks nodes: by prefix within a limit of imbalance, else by load. Pure; one task uses it.

A node is over the limit when it has one request more than IMBALANCE times the mean of those inside. Such a node is
chosen when it is the least loaded one, never for its prefix. Where it has less than MOST of a prompt, the latest
choices count like requests inside: a beginning that all prompts share comes to all nodes, and draws nobody to one.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence

from asyncfabric.actors import Identity, Member
from asyncfabric_services.nodes.messages import PREFIX_LABEL
from asyncfabric_services.router.prefix_map import PrefixMap
from asyncfabric_services.runner.prefix import PromptBlocks

IMBALANCE = 1.3
SPARE = 1.0  # with few requests inside, whole ones are far from their mean
MOST = 2 / 3
LATEST = 256  # choices
MOST_BLOCK_TOKENS = 1 << 20

Labels = Mapping[Identity, Mapping[str, str]]


class Routing:
    """The choice among the nodes of one role; `load` states how loaded a member is."""

    def __init__(self, load: Callable[[Member], float], *, by_prefix: bool) -> None:
        self._load = load
        self._by_prefix = by_prefix
        self._map = PrefixMap()
        self._latest: deque[Identity] = deque(maxlen=LATEST)

    def ordered(self, members: Sequence[Member], prompt: PromptBlocks, labels: Labels) -> list[Member]:
        """Return ready members, which come by load, in the order in which they are to be asked.

        Of equally loaded ones that comes first which is remembered to have least; a node whose label states no size of
        blocks keeps no prefix.
        """
        if not self._by_prefix or not members:
            return list(members)
        inside = {member.identity: self._load(member) for member in members}
        by_load = sorted(members, key=lambda member: (inside[member.identity], self._map.held(member.identity)))
        matched: Counter[Identity] = Counter()
        for size in {_block_tokens(node, labels) for node in inside} - {0}:
            for node, blocks in self._map.matched(prompt.of(size)).items():
                matched[node] = max(matched[node], blocks * size)
        latest = Counter(node for node in self._latest if node in inside)
        most_inside = IMBALANCE * sum(inside.values()) / len(members) + SPARE
        most_latest = IMBALANCE * (latest.total() + 1) / len(members) + SPARE

        def fair(node: Identity) -> bool:
            return inside[node] <= most_inside and (
                matched[node] >= MOST * prompt.tokens or latest[node] + 1 <= most_latest
            )

        near = [member for member in by_load if matched[member.identity] and fair(member.identity)]
        if not near:
            return by_load
        best = max(near, key=lambda member: matched[member.identity])  # of equal ones the least loaded
        return [best, *(member for member in by_load if member is not best)]

    def chosen(self, member: Member, prompt: PromptBlocks, labels: Labels) -> None:
        """Note that a member is asked for this prompt: it will have its blocks."""
        if self._by_prefix:
            self._latest.append(member.identity)
            size = _block_tokens(member.identity, labels)
            self._map.add(member.identity, prompt.of(size) if size else ())


def _block_tokens(node: Identity, labels: Labels) -> int:
    """Return the size of the blocks that a node keeps, 0 when its label states none that can be read."""
    text = labels.get(node, {}).get(PREFIX_LABEL, "")
    size = int(text) if text.isascii() and text.isdecimal() and len(text) < 8 else 0
    return size if size <= MOST_BLOCK_TOKENS else 0
