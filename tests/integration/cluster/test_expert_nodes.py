"""Expert nodes as processes: what they show, what they refuse, and one that drains while the other goes on."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import trio

for needed in ("torch", "transformers", "hypercorn"):
    pytest.importorskip(needed, reason=f"expert nodes need {needed}")

from cluster import Cluster, bare_cluster  # noqa: E402

from asyncfabric.errors import BrokenError  # noqa: E402
from asyncfabric_services.experts.conductor import Conductor  # noqa: E402
from asyncfabric_services.experts.group import open_group  # noqa: E402
from asyncfabric_services.experts.sparse_model import greedy, load_sparse, mask_experts  # noqa: E402
from asyncfabric_services.settings.schema import ModelSection  # noqa: E402

pytestmark = pytest.mark.slow
PATIENCE_S = 60.0
SOON_S = 3.0
"""A deadline that is meant to pass; what is asserted is who is named, not when."""
PROMPTS = [list(b"One token after the other."), list(b"Each expert"), list(b"knows a part")]
COUNT = 8
MODEL = ModelSection(layers=3, hidden=64, query_heads=4, kv_heads=2, experts=5)


def rows_of(made: Cluster, name: str, page: str) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = json.loads(made[name].get(f"/{page}"))[page]
    return rows


async def versions(made: Cluster) -> None:
    folder = str(made.folder / "ipc")
    directory = made["directory"].link
    with trio.fail_after(PATIENCE_S * 3):
        async with open_group(directory, 2, ipc_folder=folder, patience=PATIENCE_S) as conductor:
            await answers(conductor, made)
            conductor._patience = SOON_S
            made["expert-b"].child.send_signal(signal.SIGTERM)
            assert await trio.to_thread.run_sync(made["expert-b"].ended) == 0
            model = load_sparse(MODEL)
            mask_experts(model, range(3, 5))
            expected = [greedy(model, prompt, COUNT) for prompt in PROMPTS]
            assert await conductor.generate(PROMPTS, COUNT) == expected
            assert [departure.ranks for departure in conductor.departures] == [(1,)]
            assert made["expert-a"].metric("asyncfabric_expert_present_ranks") == 1
        with pytest.raises(BrokenError, match=r"the node is in group \w+ and let the other experts go"):
            await beside(directory, folder)


async def answers(conductor: Conductor, made: Cluster) -> None:
    model = load_sparse(MODEL)
    assert await conductor.generate(PROMPTS, COUNT) == [greedy(model, prompt, COUNT) for prompt in PROMPTS]
    assert conductor.departures == []
    for wrong in ([], [256], list(range(65))):
        with pytest.raises(ValueError, match=r"expected 1\.\.64 token ids below 256"):
            await conductor.generate([wrong], COUNT)
    for name in ("expert-a", "expert-b"):
        other = "expert-b" if name == "expert-a" else "expert-a"
        assert json.loads(made[name].get("/health"))["state"] == "ready"
        assert made[name].metric("asyncfabric_expert_forward_forwards_total") == 2 * COUNT, "two rounds"
        assert made[name].metric("asyncfabric_expert_present_ranks") == 2
        assert other in {row["peer"] for row in rows_of(made, name, "peers")}
        assert len(rows_of(made, name, "regions")) >= 2
        assert isinstance(rows_of(made, name, "why"), list)


async def beside(directory: str, folder: str) -> None:
    async with open_group(directory, 1, ipc_folder=folder, patience=PATIENCE_S):
        raise AssertionError("a node was in two groups")


def test_one_of_two_drains(tmp_path: Path) -> None:
    with bare_cluster(tmp_path, MODEL__EXPERTS="5") as made:
        made.start("expert-a", "expert-b")
        trio.run(versions, made)
        assert made["expert-a"].end() == 0
