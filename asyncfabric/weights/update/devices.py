"""Devices by their names. What is for GPUs is imported when the first of them is asked for."""

from __future__ import annotations

from asyncfabric.weights.update.device import HOST, Device
from asyncfabric.weights.update.host_device import HostDevice


def device_of(name: str) -> Device:
    """Return the device of a name.

    Raises:
        ValueError: it is none that weights can be on.
        ImportError: a GPU's without torch.
    """
    if name == HOST:
        return HostDevice()
    if not name.startswith("cuda"):
        raise ValueError(f"weights are on 'cpu' or 'cuda:N', got {name!r}")
    from asyncfabric.weights.update.cuda.device import TorchDevice

    return TorchDevice(name)
