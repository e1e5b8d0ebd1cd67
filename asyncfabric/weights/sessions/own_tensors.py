"""OwnTensors: the tensors that an engine has, and how a version comes into them, in few launches, from its shadow.

Any thread. A version fills the beginning of each tensor; an engine may have more rows or columns, as of a vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch

from asyncfabric.weights.plan.holdings import LocalTensor
from asyncfabric.weights.sessions.conversions import Conversion

WORD_BYTES = 8
"""What is copied as words of this size is read and written in whole vectors, whatever the elements are."""


class OwnTensors:
    """The targets of one rank; the shadows that versions arrive in are numbered.

    Attributes:
        arriving: names of what arrives in a shadow.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        filled: Mapping[str, tuple[int, ...]],
        conversions: Mapping[str, Conversion] = MappingProxyType({}),
    ) -> None:
        """Take an engine's tensors, the shape of what a version fills of each, and what converts some, by name."""
        self._parts = {
            name: tensors[name][tuple(slice(side) for side in shape)]
            for name, shape in filled.items()
            if name not in conversions
        }
        self.arriving: tuple[str, ...] = tuple(filled)
        self._conversions = conversions
        self._results = {
            name: [tensors[name + suffix] for suffix in conversion.suffixes] for name, conversion in conversions.items()
        }
        targets = self._parts | {
            name + suffix: target
            for name, conversion in conversions.items()
            for suffix, target in zip(conversion.suffixes, self._results[name], strict=True)
        }
        self._without_memory = next((name for name, target in targets.items() if target.is_meta), "")
        self._device = next((tensor.device for tensor in tensors.values() if tensor.is_cuda), None)
        self._pairs: dict[int, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        self._copied: torch.cuda.Event | None = None

    def copy(self, number: int, shadow: Mapping[str, torch.Tensor], stream: torch.cuda.Stream | None) -> None:
        """Copy a version from a shadow, whose tensors are the same ones each time that it has this number.

        Args:
            number: of the shadow.
            shadow: its tensors, by name.
            stream: of the engine's GPU: the copy is queued there, and `settle` waits for it. None copies on torch's
                current stream and returns when all of it is done.

        Raises:
            ValueError: the engine's tensors have no memory.
        """
        if self._without_memory:
            raise ValueError(f"{self._without_memory} has no memory that a version could be copied into: use take()")
        if number not in self._pairs:
            self._pairs[number] = _pairs(self._parts, shadow)
        targets, sources = self._pairs[number]
        with torch.no_grad():
            if self._device is None:
                _copy(targets, sources)
                self._convert(shadow)
                return
            with torch.cuda.stream(stream or torch.cuda.current_stream(self._device)):
                _copy(targets, sources)
                self._convert(shadow)
                self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
                self._copied.record()
        if stream is None:
            self.settle()

    def check(self, arriving: Mapping[str, LocalTensor]) -> None:
        """Try all conversions once, on zeros as they arrive, so that none fails when a version is applied.

        Raises:
            ValueError: the results are not what the engine's tensors take; the text names the tensor.
            Exception: whatever a conversion raises.
        """
        for name in self._conversions:
            if not any(target.is_meta for target in self._results[name]):
                one = arriving[name]
                dtype, device = getattr(torch, one.dtype), self._results[name][0].device
                self._converted(name, torch.zeros(one.shape, dtype=dtype, device=device))

    def _convert(self, shadow: Mapping[str, torch.Tensor]) -> None:
        for name, targets in self._results.items():
            arrived = shadow[name].to(targets[0].device, non_blocking=True)
            for target, result in zip(targets, self._converted(name, arrived), strict=True):
                _beginning(target, result).copy_(result.reshape(target.shape) if _reshaped(target, result) else result)

    def _converted(self, name: str, arrived: torch.Tensor) -> Sequence[torch.Tensor]:
        conversion, targets = self._conversions[name], self._results[name]
        results = conversion.function(arrived)
        if len(results) != len(targets):
            raise ValueError(f"{name}: its conversion returns {len(results)} tensors for {len(targets)} suffixes")
        for suffix, target, result in zip(conversion.suffixes, targets, results, strict=True):
            fits = len(result.shape) == len(target.shape) and all(map(int.__le__, result.shape, target.shape))
            if result.dtype != target.dtype or not (fits or _reshaped(target, result)):
                raise ValueError(
                    f"{name + suffix}: its conversion returns {tuple(result.shape)} of {result.dtype}, the engine has "
                    f"{tuple(target.shape)} of {target.dtype}"
                )
        return results

    def finish(self) -> None:
        """Return when the engine's GPU has done what it was given, on every stream; at once without a GPU."""
        if self._device is not None:
            torch.cuda.synchronize(self._device)

    def settle(self) -> None:
        """Return when no copy reads a shadow any more."""
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None


def _copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    if targets:
        torch._foreach_copy_(targets, sources, non_blocking=True)


def _reshaped(target: torch.Tensor, result: torch.Tensor) -> bool:
    """Return whether one of them has a dimension of length 1 that the other has not, as with scales of rows."""
    return len(result.shape) != len(target.shape) and result.numel() == target.numel()


def _beginning(target: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    return target if _reshaped(target, result) else target[tuple(slice(side) for side in result.shape)]


def _pairs(
    parts: Mapping[str, torch.Tensor], shadow: Mapping[str, torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return what is copied into what, as integers: a copy of floating numbers may change the bits of a NaN."""
    found = []
    for name, part in parts.items():
        if part.numel():
            pair = part, shadow[name]
            found.append(tuple(map(_words if all(map(_is_words, pair)) else _integers, pair)))
    return [target for target, _ in found], [source for _, source in found]


def _is_words(tensor: torch.Tensor) -> bool:
    begin = tensor.storage_offset() * tensor.element_size()
    return tensor.is_contiguous() and not any(each % WORD_BYTES for each in (tensor.nbytes, begin, tensor.data_ptr()))


def _words(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.int64)


def _integers(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])


def device_of_shadow(shadow: str, tensors: Mapping[str, torch.Tensor]) -> str:
    """Return the name of the device that versions arrive on.

    Args:
        shadow: "host", "device", which is where the tensors are, or the name of a device; "none": in the tensors.
        tensors: of the engine.

    Raises:
        ValueError: no such place, or the tensors are on several devices or without memory, so which one is not known.
    """
    if shadow == "host":
        return "cpu"
    if shadow == "none":
        return next((str(tensor.device) for tensor in tensors.values() if tensor.is_cuda), "cpu")
    if shadow != "device":
        if shadow.partition(":")[0] not in ("cpu", "cuda"):
            raise ValueError(
                f"shadow must be 'host', 'device' or the name of a device as 'cuda:0', or 'none', got {shadow!r}"
            )
        return shadow
    devices = sorted({str(tensor.device) for tensor in tensors.values()})
    if len(devices) != 1 or devices[0] == "meta":
        raise ValueError(f"shadow='device' needs tensors on one device, and these are on {devices}; name it")
    return devices[0]


def gpu_of(gpu: torch.device | str | None, tensors: Mapping[str, torch.Tensor]) -> int | None:
    """Return the number of the GPU that copies versions into an engine's tensors, None for an engine of the host.

    Args:
        gpu: its name; None is the one that has the tensors.
        tensors: of the engine.

    Raises:
        ValueError: another device, or a GPU without a number.
    """
    if gpu is None:
        return next((tensor.device.index for tensor in tensors.values() if tensor.is_cuda), None)
    device = torch.device(gpu)
    if device.type != "cuda" or device.index is None:
        raise ValueError(f"gpu must name a GPU and its number, as 'cuda:0', got {str(gpu)!r}")
    return int(device.index)


def tied(tensors: Mapping[str, torch.Tensor]) -> tuple[tuple[str, ...], ...]:
    """Return the groups of names that stand for one memory, as of a vocabulary that two layers share."""
    groups: dict[tuple[object, ...], list[str]] = {}
    for name, tensor in tensors.items():
        if not tensor.is_meta and tensor.numel():
            where = tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()
            groups.setdefault(where, []).append(name)
    return tuple(tuple(names) for names in groups.values() if len(names) > 1)
