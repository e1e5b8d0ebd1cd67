"""Ranks in processes of their own: memory mapped from each other, right to the bit, and one that is killed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from nvlink_rank import ranks_of

SHAPE: dict[str, Any] = {"num_experts": 10, "top_k": 4, "hidden": 1024, "max_tokens": 64}


def devices(ranks: int) -> list[str]:
    return [f"cuda:{rank % torch.cuda.device_count()}" for rank in range(ranks)]


def test_steps_between_processes_are_right() -> None:
    with ranks_of(devices(2), SHAPE | {"in_dtype": "float8_e4m3fn", "scale_block": 64}) as ranks:
        for rank in ranks:
            rank.send("steps", 0, 20)
        assert [rank.receive() for rank in ranks] == [0, 0]
        for rank in ranks:
            rank.send("leave")
        assert [rank.receive() for rank in ranks] == ["closed"] * 2


@pytest.mark.alone
def test_a_killed_rank_is_named_and_the_others_go_on_without_it() -> None:
    with ranks_of(devices(3), SHAPE) as ranks:
        for rank in ranks:
            rank.send("steps", 0, 2)
        assert [rank.receive() for rank in ranks] == [0, 0, 0]
        ranks[1].process.kill()
        ranks[1].process.join()
        left = [ranks[0], ranks[2]]
        for rank in left:
            rank.send("steps", 2, 1)
        assert [rank.receive() for rank in left] == [(1,), (1,)]
        for rank in left:
            rank.send("exclude", [1])
        assert [rank.receive() for rank in left] == ["went on"] * 2
        for rank in left:
            rank.send("steps", 2, 5)
        assert [rank.receive() for rank in left] == [0, 0]
        for rank in left:
            rank.send("leave")
        assert [rank.receive() for rank in left] == ["closed"] * 2
