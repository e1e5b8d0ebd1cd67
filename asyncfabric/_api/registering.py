"""How memory becomes a Region: registering the caller's, allocating the engine's.

Runs on the event loop's thread, or in a step of a fabric of threads; the pinning itself runs on the engine's control
thread.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING

from asyncfabric._api.control import ControlCall, submit_control
from asyncfabric._api.region import HOST, RegionT, make_region
from asyncfabric._api.streams import first_gpu
from asyncfabric._bridge import faults
from asyncfabric._bridge.buffers import SOME_GPU, ResolvedBuffer, resolve_buffer
from asyncfabric.errors import DeviceError
from asyncfabric.types import ACCESS_BITS

if TYPE_CHECKING:
    from asyncfabric._bridge.dispatcher import CompletionDispatcher

Resolver = Callable[[object], ResolvedBuffer]


def checked_device(device: object) -> int:
    """Return the engine's number of `cpu`, `cuda`, `cuda:N`, or of something that prints like that."""
    text = str(device)
    if text == "cpu":
        return HOST
    kind, _, ordinal = text.partition(":")
    if kind != "cuda" or (ordinal and not ordinal.isdecimal()) or (not ordinal and text != "cuda"):
        raise ValueError(f"device must be 'cpu', 'cuda' or 'cuda:N', got {device!r}")
    return int(ordinal or 0)


async def register_region(
    kind: type[RegionT], dispatcher: CompletionDispatcher, resolver: Resolver, buffer: object, access: int
) -> RegionT:
    """Register memory of the caller.

    Cancellation: shielded until the engine answered; then the region is released again and it goes on.
    """
    memory = resolver(buffer)
    if memory.device == SOME_GPU:
        memory = memory._replace(device=max(first_gpu(dispatcher.engine.rails()), 0))
    _check_device(dispatcher, memory.device)
    if memory.readonly and access & ACCESS_BITS["write"]:
        raise ValueError(f"a read-only {type(buffer).__name__} may be registered with access 'read' or 'local' only")
    what = f"registering {memory.length} bytes of {type(buffer).__name__}"
    begun = monotonic()
    submit = dispatcher.engine.submit_register
    call = submit_control(dispatcher, what, submit, memory.address, memory.length, memory.device, access)
    # Parked with the call: the buffer must live while the engine pins it, also if the task is interrupted.
    call.keepalive = memory.keepalive
    region_id = await _answered(dispatcher, call)
    return make_region(
        kind,
        dispatcher,
        region_id,
        memory.address,
        memory.length,
        memory.device,
        access,
        of_caller=True,
        readonly=memory.readonly,
        keepalive=memory.keepalive,
        cost_s=monotonic() - begun,
    )


async def allocate_region(
    kind: type[RegionT], dispatcher: CompletionDispatcher, length: int, device: int, access: int
) -> RegionT:
    """Allocate pages of the engine's own.

    Cancellation: shielded until the engine answered; then the region is released again and it goes on.
    """
    _check_device(dispatcher, device)
    what = f"allocating {length} bytes"
    begun = monotonic()
    call = submit_control(dispatcher, what, dispatcher.engine.submit_allocate, length, device, access)
    region_id = await _answered(dispatcher, call)
    cost_s = monotonic() - begun
    if device != HOST:
        address = dispatcher.engine.region_info(region_id).base
        about = (kind, dispatcher, region_id, address, length, device, access)
        return make_region(*about, of_caller=False, cost_s=cost_s)
    # The view, not the engine's own address: it stays readable after release, until the last tensor over it is gone.
    view = dispatcher.engine.region_memory(region_id)
    base = resolve_buffer(view).address
    about = (kind, dispatcher, region_id, base, length, device, access)
    return make_region(*about, of_caller=False, keepalive=view, cost_s=cost_s)


def _check_device(dispatcher: CompletionDispatcher, device: int) -> None:
    name = f"cuda:{device}"
    if device != HOST and all(rail["device"] != name for rail in dispatcher.engine.rails()):
        raise DeviceError(
            f"memory of {name} needs a rail of that GPU, and this fabric has none",
            remedy=f"open the fabric with FabricConfig(rails=({name!r},)), or with rails='auto' after the first use of "
            "that GPU, or copy through memory of device 'cpu'",
        )


async def _answered(dispatcher: CompletionDispatcher, call: ControlCall) -> int:
    """Return the new region's id; interrupted, wait for the answer anyway and give the region back."""
    try:
        await call.settle()
    except BaseException:
        completion = call.completion
        if completion is not None and completion.code == 0 and not dispatcher.closing:
            submit = dispatcher.engine.submit_release
            release = submit_control(dispatcher, f"releasing after {call.what}", submit, completion.value)
            release.keepalive = call.keepalive
            await release.settle_shielded()
        raise
    region_id = call.value()
    if dispatcher.closed:  # between the answer and this task's turn: the engine has released the region
        raise faults.closed(f"the fabric of {call.what}")
    return region_id
