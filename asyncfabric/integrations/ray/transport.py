"""The transport itself: registers tensors at their source, reads them at the receiver, aborts without killing anybody.

Threads are Ray's: extract_tensor_transport_metadata comes on the thread of the task, receiving and freeing on
`_ray_system`, aborting on `_ray_system_error`, ray.get on whichever thread calls it. One fabric for each process, that
of `process_fabric`. Reads are one-sided: the source does nothing while its tensors are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from threading import Lock
from typing import Any, NoReturn

import ray
import torch
from ray.exceptions import RayDirectTransportError
from ray.experimental import register_tensor_transport
from ray.experimental.rdt.util import get_tensor_transport_manager

import asyncfabric as af
from asyncfabric.blocking import Region
from asyncfabric.integrations.process_fabric import config_in_force, process_fabric
from asyncfabric.integrations.ray.fetches import FetchesUnderWay, RayFetch, Reads
from asyncfabric.integrations.ray.interface import (
    CommunicatorMetadata,
    TensorTransportManager,
    TensorTransportMetadata,
)
from asyncfabric.integrations.ray.messages import ReadMetadata, SourceMetadata, this_process
from asyncfabric.integrations.reading import submit_read
from asyncfabric.integrations.registrations import Range, Registrations
from asyncfabric.integrations.torch_memory import (
    empty_tensors,
    offset_in_storage,
    settle_streams,
    storage_bytes,
    storage_range,
)

NAME = "asyncfabric"
DEVICES = ("cpu", "cuda")


def register(name: str = NAME) -> None:
    """Register the transport with Ray under a name; again with the same name does nothing.

    Call it before actors are created, in the process that creates them; Ray passes it on to them.

    Raises:
        ValueError: the name belongs to another transport.
    """
    from ray.experimental.rdt.util import transport_manager_info

    known = transport_manager_info.get(name.upper())
    if known is not None and known.transport_manager_class is AsyncfabricTransport:
        return
    register_tensor_transport(name, list(DEVICES), AsyncfabricTransport, torch.Tensor)


def pin(tensor: torch.Tensor) -> None:
    """Keep the memory behind a tensor registered in this process until `unpin`; each call counts.

    Memory is registered for as long as an object of Ray has it, or a fetch writes into it. For buffers that are used
    again and again that is once for each use; pinned ones are registered once.

    Raises:
        ValueError: a tensor without memory.
        DeviceError: no memory could be pinned.
    """
    _own_transport().hold_storage(tensor)


def unpin(tensor: torch.Tensor) -> None:
    """Take back one `pin`; objects and fetches that use the memory keep it registered.

    Raises:
        KeyError: the memory is not registered.
    """
    _own_transport().registrations.let_go(storage_range(tensor))


class AsyncfabricTransport(TensorTransportManager):
    """Ray's interface over a blocking fabric. Ray makes one in each process."""

    def __init__(self) -> None:
        """Open nothing yet: a process that only coordinates needs no fabric."""
        self.registrations: Registrations = Registrations(process_fabric)
        self._fetches = FetchesUnderWay()
        self._lock = Lock()
        self._sources: dict[str, tuple[SourceMetadata, list[Range]]] = {}
        self._reachable: set[str] = set()
        self._name = ""

    def tensor_transport_backend(self) -> str:
        """Return the name that Ray knows the transport by."""
        return NAME.upper()

    @staticmethod
    def is_one_sided() -> bool:
        """Return True: the receiver reads, the source does nothing."""
        return True

    @staticmethod
    def can_abort_transport() -> bool:
        """Return True: reads are cancelled and drained, and no actor has to be killed."""
        return True

    def actor_has_tensor_transport(self, actor: Any) -> bool:
        """Ask an actor whether it can open its fabric; a yes is remembered.

        Raises:
            RayActorError: the actor is dead.
        """
        name = actor._actor_id.hex()
        if name not in self._reachable:
            call = actor.__ray_call__.options(concurrency_group="_ray_system")
            if not ray.get(call.remote(_fabric_opens)):
                return False
            self._reachable.add(name)
        return True

    def extract_tensor_transport_metadata(self, obj_id: str, rdt_object: list[torch.Tensor]) -> SourceMetadata:
        """Register the tensors of an object and return where they are; Ray calls it in the process that made them.

        Raises:
            ValueError: tensors on different kinds of device, or one that is not contiguous.
            DeviceError: no rail can be opened, or no memory pinned.
        """
        self._fetches.collect()
        with self._lock:
            known = self._sources.get(obj_id)
        if known is not None:  # a task that ran once more: the tensors are those of its first run
            return known[0]
        metadata = SourceMetadata([(tensor.shape, tensor.dtype) for tensor in rdt_object])
        held: list[Range] = []
        try:
            if rdt_object:
                kind = _one_kind(rdt_object)
                settle_streams({tensor.device for tensor in rdt_object})
                metadata.tensor_device = kind
                metadata.keys = [self._key(tensor, held) for tensor in rdt_object]
                metadata.address = bytes(process_fabric().address)
                metadata.source = self._own_name()
        except BaseException:
            self._let_go(held)
            raise
        with self._lock:
            self._sources[obj_id] = metadata, held
        return metadata

    def get_communicator_metadata(self, src_actor: Any, dst_actor: Any, backend: str | None = None) -> ReadMetadata:
        """Return nothing of interest: the metadata of the source is enough to read."""
        return ReadMetadata()

    def fetch_multiple_tensors(
        self,
        obj_id: str,
        tensor_transport_metadata: TensorTransportMetadata,
        communicator_metadata: CommunicatorMetadata,
        target_buffers: list[torch.Tensor] | None = None,
    ) -> RayFetch:
        """Begin to read the tensors of an object, into buffers of the caller where there are some.

        Raises:
            ValueError: buffers on different kinds of device, or one that is not contiguous.
            RayDirectTransportError: the source cannot be reached, its keys are dead, or the fetch was aborted.
        """
        assert isinstance(tensor_transport_metadata, SourceMetadata)
        source = tensor_transport_metadata
        if not source.tensor_meta:
            return RayFetch(obj_id, [])
        if target_buffers:
            _one_kind(target_buffers)
        reads = self._fetches.begin(obj_id, source.source)
        if reads is None:
            raise RayDirectTransportError(f"reading object {obj_id} from {source.source} was aborted before it began")
        try:
            tensors = self._begin(reads, source, target_buffers)
        except BaseException as error:
            reads.cancel()
            self._end(reads, error)
        return RayFetch(obj_id, tensors, reads, self._fetches.dropped)

    def wait_fetch_complete(self, fetch_request: RayFetch, timeout: float = -1) -> list[torch.Tensor]:
        """Wait for a fetch and return its tensors.

        Args:
            fetch_request: what `fetch_multiple_tensors` returned.
            timeout: seconds, 0 only looks, less than 0 waits as long as it takes.

        Raises:
            TimeoutError: it has not ended by then, and goes on: wait again, or drop the request, which cancels it.
            RayDirectTransportError: it failed or was aborted; nothing writes into its buffers any more.
        """
        reads = fetch_request.reads
        if reads is not None and not reads.ended:
            try:
                reads.wait(None if timeout < 0 else timeout)
            except TimeoutError:
                raise TimeoutError(
                    f"reading object {reads.obj_id} from {reads.source} has not ended after {timeout:g} s: "
                    f"{reads.progress()}"
                ) from None
            except af.FabricError as error:
                _raise_as_ray(reads, error)
        return list(fetch_request.tensors)

    def recv_multiple_tensors(
        self,
        obj_id: str,
        tensor_transport_metadata: TensorTransportMetadata,
        communicator_metadata: CommunicatorMetadata,
        target_buffers: list[torch.Tensor] | None = None,
    ) -> list[torch.Tensor]:
        """Read the tensors of an object and return them when all their bytes are there.

        Raises:
            ValueError, RayDirectTransportError: as `fetch_multiple_tensors` and `wait_fetch_complete`.
        """
        fetch = self.fetch_multiple_tensors(obj_id, tensor_transport_metadata, communicator_metadata, target_buffers)
        return self.wait_fetch_complete(fetch)

    def send_multiple_tensors(
        self,
        tensors: list[torch.Tensor],
        tensor_transport_metadata: TensorTransportMetadata,
        communicator_metadata: CommunicatorMetadata,
    ) -> NoReturn:
        """Refuse: receivers read, and Ray never calls this of a one-sided transport."""
        raise NotImplementedError("asyncfabric is one-sided: the receiver reads, nothing is sent")

    def garbage_collect(
        self, obj_id: str, tensor_transport_meta: TensorTransportMetadata, tensors: list[torch.Tensor]
    ) -> None:
        """Let the tensors of an object go; memory that no other object has is released, and its keys are dead.

        Raises:
            TransferError: a device may still touch the memory, so it stays pinned until the process ends.
        """
        self._fetches.collect()
        with self._lock:
            _, held = self._sources.pop(obj_id, (None, []))
        self._let_go(held)

    def abort_transport(self, obj_id: str, communicator_metadata: CommunicatorMetadata) -> None:
        """Cancel the reads of an object: whoever waits for them gets RayDirectTransportError once they have drained."""
        self._fetches.abort(obj_id)

    def hold_storage(self, tensor: torch.Tensor) -> tuple[Region, Range]:
        """Register the whole storage of a tensor, or count one more holder of it; not for users.

        Raises:
            ValueError: a tensor without memory.
            DeviceError: no memory could be pinned.
        """
        memory = storage_range(tensor)
        if not memory.length:
            raise ValueError(f"a tensor of shape {tuple(tensor.shape)} without memory cannot be registered")
        return self.registrations.hold(memory, partial(storage_bytes, tensor)), memory

    def _key(self, tensor: torch.Tensor, held: list[Range]) -> bytes:
        length = tensor.nbytes
        if not length:
            return b""
        region, memory = self.hold_storage(tensor)
        held.append(memory)
        offset = offset_in_storage(tensor)
        return bytes(region[offset : offset + length].key("read"))

    def _let_go(self, held: Sequence[Range]) -> None:
        with ExitStack() as stack:  # all of them, also when one stays pinned
            for memory in held:
                stack.callback(self.registrations.let_go, memory)

    def _own_name(self) -> str:
        if not self._name:
            self._name = this_process()
        return self._name

    def _begin(
        self, reads: Reads, source: SourceMetadata, target_buffers: list[torch.Tensor] | None
    ) -> list[torch.Tensor]:
        """Register where the bytes go and submit a read for each tensor."""
        fabric = process_fabric()
        fabric.connect(source.address)
        parts = []
        if target_buffers:
            tensors = target_buffers
            for tensor in tensors:
                if not tensor.nbytes:
                    continue
                region, memory = self.hold_storage(tensor)
                reads.holds.callback(self.registrations.let_go, memory)
                offset = offset_in_storage(tensor)
                parts.append(region[offset : offset + tensor.nbytes])
        else:
            tensors, buffers, places = empty_tensors(source.tensor_meta, source.tensor_device or "cpu")
            regions = []
            for buffer in buffers:
                region = fabric.register(buffer, access="local")
                reads.holds.callback(region.release)
                regions.append(region)
            parts = [regions[number][offset : offset + size] for number, offset, size in places if size]
        settle_streams({tensor.device for tensor in tensors})
        keys = [af.RegionKey.from_bytes(key) for key in source.keys if key]
        for key, part in zip(keys, parts, strict=True):
            if reads.aborted:
                raise af.TransferError("the fetch was aborted while its reads were submitted")
            reads.add(submit_read(fabric, key, 0, part))
        return tensors

    def _end(self, reads: Reads, error: BaseException) -> NoReturn:
        """Drain what a fetch that failed has submitted, and raise why it failed."""
        try:
            reads.wait(None)
        except af.FabricError:
            pass  # the first failure is raised below
        if isinstance(error, af.FabricError):
            _raise_as_ray(reads, error)
        raise error


def _raise_as_ray(reads: Reads, error: af.FabricError) -> NoReturn:
    what = "was aborted" if reads.aborted and not isinstance(error, af.PeerError) else f"failed: {error}"
    raise RayDirectTransportError(
        f"reading object {reads.obj_id} from {reads.source} {what}; {reads.progress()}. "
        "This process and its other transfers go on; if the source died, make the object again"
    ) from error


def _one_kind(tensors: Sequence[torch.Tensor]) -> str:
    kinds = {tensor.device.type for tensor in tensors}
    if len(kinds) > 1:
        raise ValueError(f"all tensors of an object must be on one kind of device, got {sorted(kinds)}")
    for number, tensor in enumerate(tensors):
        if not tensor.is_contiguous():
            raise ValueError(f"tensor {number} of shape {tuple(tensor.shape)} is not contiguous; use .contiguous()")
    return kinds.pop()


def _fabric_opens(instance: object) -> bool:
    """Run in an actor: return whether its fabric can be opened; why not is in the log of the actor."""
    try:
        process_fabric()
    except af.FabricError as error:
        print(f"asyncfabric: no fabric with the rails {config_in_force().rails}: {error}", flush=True)
        return False
    return True


def _own_transport() -> AsyncfabricTransport:
    register()
    transport: AsyncfabricTransport = get_tensor_transport_manager(NAME.upper())
    return transport
