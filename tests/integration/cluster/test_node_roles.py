"""Keys with a role between real nodes: a directory over tcp, and a node that has a key of another role."""

from __future__ import annotations

from pathlib import Path

import pytest

for needed in ("torch", "transformers", "hypercorn"):
    pytest.importorskip(needed, reason=f"the nodes need {needed}")

from cluster import bare_cluster  # noqa: E402

from asyncfabric.control import make_keys, read_keys  # noqa: E402
from asyncfabric.control.keys import add_trusted, trust_file, write_keys  # noqa: E402

pytestmark = pytest.mark.slow


def test_a_key_for_decode_registers_as_decode_and_as_nothing_else(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "directory.key", tmp_path / "decode.key"
    write_keys(ours, *make_keys(), frozenset(["directory"]))
    write_keys(theirs, *make_keys())  # its owner states nothing of a role: the directory's list does
    add_trusted(trust_file(ours), read_keys(theirs).public, roles=frozenset(["decode"]))
    add_trusted(trust_file(theirs), read_keys(ours).public)
    with bare_cluster(tmp_path, directory={"CLUSTER__KEYS": str(ours)}, CLUSTER__BIND="tcp") as made:
        for name in ("router", "decode-1"):
            made.nodes[name] = made.service(name, made.settings | {"CLUSTER__KEYS": str(theirs)})
            made.started.append(made[name])
            made[name].receive()
        assert made["router"].ended() == 3
        log = made["router"].log.read_text()
        assert f"under the key {read_keys(theirs).public[:8]}..., which is trusted as decode" in log
        assert "asyncfabric keys trust KEY --role ROLE" in log and "Traceback" not in log
        made["directory"].until("asyncfabric_directory_nodes", lambda nodes: nodes == 1)
        assert '"name":"decode-1","role":"decode"' in made["directory"].get("/nodes").replace(" ", "")
        assert made.end("decode-1", "directory") == {"decode-1": 0, "directory": 0}
