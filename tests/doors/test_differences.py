"""The table of differences in the guide is the one that the tests of behaviour hold. Prints it: `python FILE`."""

from __future__ import annotations

from pathlib import Path

from differences import DIFFERENCES

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "nixl.md"


def table() -> str:
    lines = ["| in | NIXL 1.5.1 | asyncfabric | because |", "|---|---|---|---|"]
    return "\n".join(lines + [f"| {' | '.join(one)} |" for one in DIFFERENCES.values()])


def test_the_guide_lists_the_differences() -> None:
    assert table() in PAGE.read_text()


if __name__ == "__main__":
    print(table())
