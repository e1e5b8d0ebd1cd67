"""Which `asyncfabric serve` command reads which keys of the schema; a command has flags for these and no others. Pure.

A new key of a section that a command reads whole appears by itself; others are added here. A test starts the services
and compares what they read. Files and the environment may hold keys of all commands: nodes share them.
"""

from __future__ import annotations

from collections.abc import Mapping

from asyncfabric_services.settings.keys import Key, all_keys

NODE = ("node", "http", "log")
API = ("api", "tls")
INSIDE = ("router.most_requests",)
ANSWERS = (*INSIDE, "router.most_waiting", "router.longest_wait", "router.default_tokens", "router.deadline")
PAGES = ("cache.memory", "cache.page_tokens")
LINK = ("cluster.bind", "cluster.advertise", "cluster.keys", "cluster.plain_tcp")
MEMBER = ("cluster.directory", *LINK)
FABRIC = (*MEMBER, "cluster.rails")
MODEL = (
    "model.path",
    "model.layers",
    "model.hidden",
    "model.query_heads",
    "model.kv_heads",
    "model.max_tokens",
    "model.seed",
    "model.threads",
)

READERS: Mapping[str, tuple[str, ...]] = {
    "local": (*NODE, *API, *MODEL, "model.name", *PAGES, "batch", *ANSWERS),
    "directory": (*NODE, *LINK, "directory"),
    "prefill": (*NODE, *INSIDE, *FABRIC, *MODEL, "model.name", "engine", "cache", "batch"),
    "decode": (*NODE, *INSIDE, *FABRIC, *MODEL, "model.name", "engine", "cache", "batch"),
    "router": (
        *NODE,
        *API,
        *MEMBER,
        "model.path",
        "model.name",
        "model.max_tokens",
        "engine.kind",
        "router",
        "cluster.patience",
    ),
    "expert": (*NODE, *INSIDE, *FABRIC, *MODEL, "model.experts", "batch.chunk_tokens"),
    "coordinator": (*NODE, *MEMBER, "weights.log"),
    "trainer": (
        *NODE,
        *FABRIC,
        *MODEL,
        "train",
        "weights.ranks",
        "weights.tp",
        "weights.form",
        "weights.codings",
    ),
    "rollout": (*NODE, *FABRIC, "model.threads", "weights.memory", "weights.codings"),
}
"""Command -> the sections, or single keys, that it reads."""


def keys_of(command: str | None) -> dict[str, Key]:
    """Return the keys that a command reads by name, in the order of the schema; all keys for None."""
    keys = all_keys()
    if command is None:
        return dict(keys)
    chosen = READERS[command]
    return {name: key for name, key in keys.items() if name in chosen or name.partition(".")[0] in chosen}


def readers_of(name: str) -> list[str]:
    """Return the commands that read a key."""
    return [command for command in READERS if name in keys_of(command)]
