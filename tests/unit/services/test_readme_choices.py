"""The README names what `demo` and `topo` let one choose: their kinds, providers, devices and output files."""

from __future__ import annotations

from pathlib import Path

import click

from asyncfabric_services.demo.command import demo_command
from asyncfabric_services.topo.command import topo

LINES = (Path(__file__).resolve().parents[3] / "README.md").read_text(encoding="utf-8").splitlines()


def rows(command: str) -> str:
    """Return the rows of the table of commands that are about one."""
    return "\n".join(line for line in LINES if line.startswith(f"| `asyncfabric {command}"))


def test_the_choices_of_demo_are_named() -> None:
    table = rows("demo")
    kinds = {one.name: one.type.choices for one in demo_command.params if isinstance(one.type, click.Choice)}
    assert {"what", "provider", "device"} <= kinds.keys()
    assert {one for one in kinds["what"] if f"demo {one}`" in table or f"demo [{one}]`" in table} == set(kinds["what"])
    for choice in (*kinds["provider"], *kinds["device"]):
        assert f"`{choice}`" in table or f" {choice}`" in table, choice


def test_the_choices_of_topo_are_named() -> None:
    for option in topo.params:
        assert option.opts[0] in rows("topo")
