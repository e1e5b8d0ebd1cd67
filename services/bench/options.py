"""What all bench commands take, as one value and as click options."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import click

from asyncfabric_services.output_file import OutputFile
from asyncfabric_services.quantities import DurationType, SizeListType, SizeType

PROVIDERS = ("local", "tcp", "verbs", "fault+local")
KIB, MIB = 1 << 10, 1 << 20


@dataclass(frozen=True, slots=True)
class Options:
    """One run. Durations are seconds, sizes bytes; `sizes` and `page_sizes` are what the command's rows go through."""

    device: str = "host"
    provider: str = "local"
    rails: int = 1
    memory: str = "allocated"
    polling: str = "adaptive"
    spin: float | None = None
    sizes: tuple[int, ...] = (64 * KIB, MIB, 16 * MIB, 64 * MIB)
    page_sizes: tuple[int, ...] = (4 * KIB, 16 * KIB, 64 * KIB)
    pages: int = 1024
    window: int = 16
    reads: bool = False
    duration: float = 0.5
    count: int | None = None
    repeats: int = 5
    region_bytes: int = 256 * MIB
    engine_level: bool = False
    seed: int = 20
    deadline: float = 600.0
    started: float = field(default_factory=time.monotonic)

    @property
    def rail_texts(self) -> list[str]:
        """Return the rails to open."""
        return ["cuda:0"] if self.on_gpu else [self.provider] * self.rails

    @property
    def engine(self) -> dict[str, Any]:
        """Return how engines are opened: arguments of FabricConfig."""
        how: dict[str, Any] = {"rails": self.rail_texts, "polling": self.polling}
        return how if self.spin is None else how | {"spin_us": self.spin * 1e6}

    @property
    def engine_there(self) -> dict[str, Any]:
        """Return the same for the target: on the last GPU, which is the first one of a machine with one."""
        return self.engine | {"rails": ["cuda:last"]} if self.on_gpu else self.engine

    @property
    def on_gpu(self) -> bool:
        """State whether the memory is a GPU's."""
        return self.device == "cuda"

    @property
    def limits_first(self) -> bool:
        """State whether limits are measured before a fabric is open: its busy thread would take their cores."""
        return self.polling == "busy" and not self.on_gpu

    @property
    def deadline_at(self) -> float:
        """Return the moment on time.monotonic() at which the run is given up."""
        return self.started + self.deadline

    @property
    def carrier(self) -> str:
        """Return the provider that moves the bytes: what a limit is chosen by."""
        return self.provider.removeprefix("fault+")


Command = Callable[..., Any]


def shared_options(command: Command) -> Command:
    """Add the options that every bench command has."""
    for option in (
        click.option("--plot", type=OutputFile(), help="Write a picture of the rows."),
        click.option("--json", "as_json", is_flag=True, help="Print one JSON object per measured point."),
        click.option("--deadline", type=DurationType(), default="600s", show_default=True, help="Give up after this."),
        click.option("--seed", type=int, default=20, show_default=True, help="Seed of data and page lists."),
        click.option("--region", "region_bytes", type=SizeType(), default="256MiB", show_default=True,
                     help="Memory that is walked round at each end."),
        click.option("--repeats", type=click.IntRange(1, 1000), default=5, show_default=True),
        click.option("--count", type=click.IntRange(1), help="Ops per repeat, instead of --duration."),
        click.option("--duration", type=DurationType(), default="0.5s", show_default=True, help="Length of a repeat."),
    ):  # fmt: skip
        command = option(command)
    return command


def fabric_options(command: Command) -> Command:
    """Add the options of commands that open fabrics."""
    for option in (
        click.option(
            "--spin", type=DurationType(), help="How long an adaptive engine spins before it sleeps; default: its own."
        ),
        click.option(
            "--polling", type=click.Choice(["adaptive", "busy", "manual"]), default="adaptive", show_default=True
        ),
        click.option("--memory", type=click.Choice(["allocated", "foreign"]), default="allocated", show_default=True,
                     help="Engine-owned pages, or a user's array that is registered."),
        click.option("--rails", type=click.IntRange(1, 32), default=1, show_default=True, help="Rails to open."),
        click.option("--provider", type=click.Choice(PROVIDERS), default="local", show_default=True),
    ):  # fmt: skip
        command = option(command)
    return shared_options(command)


def device_option(command: Command) -> Command:
    """Add the option that states whose memory is measured."""
    text = "Memory of the host, or of the first GPU and the last one (over a cuda rail, limits by torch)."
    return click.option("--device", type=click.Choice(["host", "cuda"]), default="host", show_default=True, help=text)(
        command
    )


def sizes_option(default: str, text: str, name: str = "--size") -> Callable[[Command], Command]:
    """Return the option for a list of sizes."""
    destination = "page_sizes" if name == "--page-bytes" else "sizes"
    return click.option(name, destination, type=SizeListType(), default=default, show_default=True, help=text)
