"""What `rails="auto"` would choose on this machine: for a process without a GPU, and for one that uses each of them.

A look at the topology, on any thread; no device is opened, so a rail that is chosen here may still fail to open, and is
then left out with its reason (`Fabric.rails_left_out`).
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from asyncfabric._bridge.choice import NOT_BUILT, ChosenRail, GpuInUse, RailChoice, choose_rails
from asyncfabric._bridge.native import read_native_build, read_native_topology

__all__ = ["NOT_BUILT", "AutomaticChoice", "ChosenRail", "RailChoice", "read_choices"]


@dataclass(frozen=True, slots=True)
class AutomaticChoice:
    """What a fabric would open in a process that uses one GPU, or none.

    Attributes:
        gpu: its index in `Topology.gpus`, by PCI address; -1: the process uses none.
        choice: the rails with their reasons, and what is left out.
    """

    gpu: int
    choice: RailChoice


def read_choices(root: str | os.PathLike[str] = "/") -> tuple[AutomaticChoice, ...]:
    """Return the choices of this machine, or of the one whose `sys` and `proc` were copied to the folder `root`.

    Raises:
        DeviceError: the compiled engine is not there.
    """
    topology, built = read_native_topology(os.fspath(root)), read_native_build()["providers"]
    choices = [AutomaticChoice(-1, choose_rails(topology, None, built))]
    for index, gpu in enumerate(topology["gpus"]):
        in_use = GpuInUse(index, gpu["place"]["address"])
        choices.append(AutomaticChoice(index, choose_rails(topology, in_use, built)))
    return tuple(choices)
