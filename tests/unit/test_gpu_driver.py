"""The binding to CUDA's driver over a library that notes its calls: what is passed, what is refused, what is undone."""

from __future__ import annotations

import ctypes
import ctypes.util
import os
from typing import Any

import pytest

from asyncfabric import DeviceError
from asyncfabric._gpu import Driver, Module, memory
from asyncfabric._gpu.driver import open_driver
from asyncfabric._gpu.memory import Access, AllocationProp, Location

REFUSED = 999


class NotingLibrary:
    """A libcuda that notes each call, gives numbers where it is asked for some, and refuses functions by name."""

    def __init__(self, **refusing: int) -> None:
        self.refusing = refusing
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.launched: list[int] = []

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.calls]

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            if name == "cuGetErrorName":
                arguments[1]._obj.value = b"CUDA_ERROR_OF_A_TEST"
                return 0
            self.calls.append((name, arguments))
            if name in self.refusing:
                return self.refusing[name]
            if name == "cuLaunchKernel":
                self.launched = [ctypes.c_uint32.from_address(each).value for each in arguments[9]]
            elif name == "cuMemExportToShareableHandle":
                arguments[0]._obj.value = os.open(os.devnull, os.O_RDONLY)
            elif arguments and hasattr(arguments[0], "_obj") and hasattr(arguments[0]._obj, "value"):
                arguments[0]._obj.value = 0x1000
            return 0

        return call


def test_a_refusal_names_the_function_and_the_driver_s_error() -> None:
    driver = Driver(NotingLibrary(cuMemHostRegister_v2=2))
    with pytest.raises(DeviceError, match=r"^cuMemHostRegister: CUDA_ERROR_OF_A_TEST \(2\)$") as caught:
        memory.pin(driver, 0x7000, 4096)
    assert caught.value.raw == 2


def test_what_is_pinned_already_is_not_pinned_again() -> None:
    assert memory.pin(Driver(NotingLibrary()), 0x7000, 4096)
    assert not memory.pin(Driver(NotingLibrary(cuMemHostRegister_v2=712)), 0x7000, 4096)


def test_what_is_only_asked_raises_nothing() -> None:
    driver = Driver(NotingLibrary(cuCtxGetCurrent=3, cuDeviceCanAccessPeer=1, cuDeviceGetPCIBusId=1))
    assert driver.status("cuCtxGetCurrent") == 3
    assert driver.current_device() is None and not driver.reaches(0, 1) and driver.pci_address(0) == ""


@pytest.mark.skipif(bool(ctypes.util.find_library("cuda")), reason="this machine has a driver")
def test_a_machine_without_a_driver_reports_it() -> None:
    with pytest.raises(DeviceError, match=r"libcuda\.so\.1.*comes with the driver"):
        open_driver()


def test_a_launch_passes_the_values_of_its_arguments_and_the_shared_memory_that_was_reserved() -> None:
    library = NotingLibrary()
    module = Module(Driver(library), b".version 8.3")
    found = module.function("moe_gate")
    found.launch((3, 2), 256, 0x55, [ctypes.c_uint32(7), ctypes.c_uint32(9)])
    found.reserve_shared(4096, 100)
    found.launch((1, 1), 32, 0, [])
    module.unload()
    first, second = (arguments for name, arguments in library.calls if name == "cuLaunchKernel")
    assert [*first[1:8], first[8].value, first[10]] == [3, 2, 1, 256, 1, 1, 0, 0x55, None]
    assert second[7] == 4096 and second[8].value is None
    assert library.names == [
        "cuModuleLoadData",
        "cuModuleGetFunction",
        "cuLaunchKernel",
        "cuFuncSetAttribute",
        "cuFuncSetAttribute",
        "cuLaunchKernel",
        "cuModuleUnload",
    ]
    assert [arguments[1:] for name, arguments in library.calls if name == "cuFuncSetAttribute"] == [(8, 4096), (9, 100)]


def test_the_values_of_a_launch_are_those_of_its_arguments() -> None:
    library = NotingLibrary()
    Module(Driver(library), b"").function("f").launch((1, 1), 1, 0, [ctypes.c_uint32(7), ctypes.c_uint32(9)])
    assert library.launched == [7, 9]


def test_structs_are_as_large_as_the_driver_s() -> None:
    assert [ctypes.sizeof(each) for each in (Location, AllocationProp, Access)] == [8, 32, 12]


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize(
    ("refused", "undone"),
    [
        ("cuMemAddressReserve", []),
        ("cuMemMap", ["cuMemAddressFree"]),
        ("cuMemSetAccess", ["cuMemUnmap", "cuMemAddressFree"]),
    ],
)
def test_pages_undo_the_steps_that_were_done(own: bool, refused: str, undone: list[str]) -> None:
    pytest.importorskip("torch")
    from asyncfabric.moe.gpu.pages import Pages

    library = NotingLibrary(**{refused: REFUSED})
    with pytest.raises(DeviceError, match=f"{refused}: "):
        Pages(Driver(library), 1, 5000, None if own else 77)
    after = library.names[library.names.index(refused) + 1 :]
    assert after == [*undone, "cuMemRelease"]


@pytest.mark.parametrize("own", [True, False])
def test_pages_are_zeroed_by_their_owner_and_closed_once(own: bool) -> None:
    pytest.importorskip("torch")
    from asyncfabric.moe.gpu.pages import Pages

    library = NotingLibrary()
    pages = Pages(Driver(library), 1, 5000, None if own else 77)
    assert (pages.length_bytes, pages.address) == (8192, 0x1000)
    assert ("cuMemsetD8_v2" in library.names) == own
    pages.close()
    pages.close()
    assert library.names.count("cuMemUnmap") == library.names.count("cuMemAddressFree") == 1
    assert library.names.count("cuMemRelease") == 1
