"""Ring 4: the public suite over the fake engine and over every provider of this build, with one and with several rails.

A provider joins with one line in RINGS. Missing providers skip, stating what is missing; checks skip by capability.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import anyio
import pytest

import asyncfabric as af
from asyncfabric.testing import FakeEngine, conformance
from asyncfabric.testing.conformance import FabricFactory
from asyncfabric.testing.threaded import open_threaded

SANITIZED = bool(os.environ.get("ASYNCFABRIC_EXPECT_SANITIZE"))  # set by `make asan` and `make tsan`
SHUFFLED = "fault+local?reorder=16&seed={seed}"
PACED = "fault+tcp?reorder=16&seed={seed}&eager_posts=1&posts_per_pass=32"  # unordered, at the pace of the efa profile
LATE = "fault+local?delay_us=300&reorder=64&seed={seed}"


def _rdma(provider: str, rails: int, *, far: bool = False) -> tuple[str, ...]:
    """Return rails on RDMA devices of this machine: of the near half, or of the far half, with a network between."""
    present = Path("/sys/class/infiniband")
    devices = sorted(path.name for path in present.iterdir()) if present.is_dir() else []
    first = len(devices) // 2 if far else 0
    return tuple(f"{provider}:{devices[(first + n) % len(devices)]}" if devices else provider for n in range(rails))


def _fabric(rails: tuple[str, ...], **options: object) -> Callable[[], object]:
    config = af.FabricConfig(rails=rails, **options)  # type: ignore[arg-type]
    return functools.partial(af.open_fabric, config)


def _fake(rails: int) -> Callable[[], object]:
    return functools.partial(af.open_fabric, af.FabricConfig(rails=("local",) * rails), engine_factory=FakeEngine)


def _native(name: str, rails: tuple[str, ...], target: tuple[str, ...] | None = None, **about: object) -> FabricFactory:
    # 256 fabrics of one process bring 700 threads, which share two cores with the connecting. Elsewhere the deadline is
    # waited for in vain, by the check of unreachable peers.
    patience = float(about.pop("patience", 25.0 if "peers" not in about else 4.0))  # type: ignore[arg-type]
    silence = float(about.pop("silence", 1.0))  # type: ignore[arg-type]
    if SANITIZED:  # threads cost ten times as much: fewer of them, and more time
        about = about | {"peers": min(int(about.get("peers", 32)), 32), "deadline": 300.0}
    deadlines = {"connect_deadline": patience, "peer_deadline_host": silence}
    return FabricFactory(
        open=_fabric(rails, **deadlines),  # type: ignore[arg-type]
        open_target=_fabric(target, **deadlines) if target is not None else None,  # type: ignore[arg-type]
        name=name,
        rails=len(rails),
        **about,  # type: ignore[arg-type]
    )


def _threaded(name: str, rails: tuple[str, ...], **about: object) -> FabricFactory:
    """Return the factory of blocking fabrics, whose waits block threads."""
    native = _native(name, rails, **about)
    return replace(native, open=functools.partial(open_threaded, *native.open.args))  # type: ignore[attr-defined]


SLOW = {"deep_write_bytes": 64 * 1024, "peers": 16}
# For the emulated machine of tests/rxe, where Python is a dozen times slower than here.
SLOWEST = {"deep_write_bytes": 1024, "peers": 8, "deadline": 120.0, "patience": 12.0, "silence": 10.0}
HEAVY = SLOWEST | {"peers": 4}  # libfabric keeps 2 MiB of receives and a listener for each connection
LIGHT = {"deep_write_bytes": 256 * 1024}
LIGHTEST = {"deep_write_bytes": 4096}  # an engine in Python

# The whole suite for each provider, memory of each kind, more rails at either end, each order in which requests arrive.
RINGS: tuple[FabricFactory, ...] = (
    FabricFactory(open=_fake(1), name="fake-1", peers=64, **LIGHTEST),  # type: ignore[arg-type]
    FabricFactory(open=_fake(2), name="fake-2", rails=2, memory="foreign", peers=64, **LIGHTEST),  # type: ignore[arg-type]
    _native("local-1-allocated", ("local",)),
    _native("local-1-foreign", ("local",), memory="foreign", peers=64, **LIGHT),
    _native("local-copiers", ("local?copiers=3",), peers=64, **LIGHT),  # as on machines with many cores
    _native("local-2-foreign", ("local",) * 2, memory="foreign", peers=64, **LIGHT),
    _native("local-2to3-foreign", ("local",) * 2, ("local",) * 3, memory="foreign", peers=16, **LIGHT),
    _native("tcp-1", ("tcp",), memory="foreign", **SLOW),
    _native("verbs-1", _rdma("verbs", 1), _rdma("verbs", 1, far=True), memory="foreign", **SLOWEST),
    _native("verbs-2", _rdma("verbs", 2), _rdma("verbs", 2, far=True), **SLOWEST),
    _native("ofi-verbs-1", _rdma("ofi-verbs", 1), _rdma("ofi-verbs", 1, far=True), memory="foreign", **HEAVY),
    _native("cuda-1-allocated", ("cuda:0",), device="cuda", **SLOW),
    _native("cuda-1-foreign", ("cuda:0",), device="cuda", memory="foreign", **SLOW),
    _native("cuda-1-host", ("cuda:0",), memory="foreign", **SLOW),
    _native("cuda-across", ("cuda:0",), ("cuda:1",), device="cuda", **SLOW),
    _native(
        "shuffled-3to2",
        tuple(SHUFFLED.format(seed=n) for n in (2, 3, 4)),
        (SHUFFLED.format(seed=5),) * 2,
        peers=16,
        **LIGHT,
    ),
    _native("efa-like-2to1", tuple(PACED.format(seed=n) for n in (8, 9)), (PACED.format(seed=10),), **SLOW),
    _native("late-2", (LATE.format(seed=6), LATE.format(seed=7)), memory="foreign", peers=16, **LIGHT),
    _threaded("local-threads", ("local",), memory="foreign", peers=16, **LIGHT),
)

# What the number of rails changes is how the engine cuts, counts and ends what is under way, for all providers alike.
STRIPED: tuple[FabricFactory, ...] = (
    _native("local-3", ("local",) * 3),
    _native("local-4", ("local",) * 4),
    _native("local-4to1", ("local",) * 4, ("local",), **LIGHT),
    _native("tcp-2", ("tcp",) * 2, **SLOW),
    _native("shuffled-1", (SHUFFLED.format(seed=1),), memory="foreign", **LIGHT),
)

FIVE_GIB = next(check for check in conformance.SUITE if conformance.name_of(check) == "five_gib")
CUT_AND_COUNTED = [
    check
    for check in conformance.SUITE
    if conformance.name_of(check)
    in {
        "integrity_at_sizes",
        "counts_of_each_op",
        "scatter_to_one_peer_many_times",
        "many_page_batches_in_flight",
        "cancelled_transfers_are_drained",
        "release_of_a_target_under_fire",
        "one_failure_harms_that_transfer_alone",
        "revoke_under_fire",
    }
]  # in order: processes that share the tests out must all find the same list


@functools.cache
def _missing(rails: tuple[str, ...]) -> str:
    """Return why fabrics with these rails cannot be opened here, or nothing."""

    async def attempt() -> None:
        async with af.open_fabric(af.FabricConfig(rails=rails)):
            pass

    try:
        anyio.run(attempt, backend="trio")
    except (af.DeviceError, ImportError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _rails_of(factory: FabricFactory) -> tuple[str, ...]:
    return factory.open.args[0].rails  # type: ignore[attr-defined,no-any-return]


def _cases() -> Iterator[object]:
    for factory in RINGS:
        for check in conformance.SUITE:
            if check is not FIVE_GIB:
                yield pytest.param(factory, check, "trio", id=f"{factory.name}-{conformance.name_of(check)}")
    # The other loop is met by the bridge, above all engines: tests/unit run on the fake one under both.
    asyncio = _native("local-1-asyncio", ("local",), peers=16, **LIGHT)
    for check in conformance.SUITE:
        if check is not FIVE_GIB:
            yield pytest.param(asyncio, check, "asyncio", id=f"{asyncio.name}-{conformance.name_of(check)}")
    # The kernel hands out and clears five GiB of pages for this one.
    # Sanitizers keep a shadow of what is touched, several times its size.
    big = _native("local-big", ("local",), big=not SANITIZED, deadline=200.0)
    yield pytest.param(big, FIVE_GIB, "trio", id="local-five_gib", marks=pytest.mark.timeout(240))
    for factory in STRIPED:
        for check in CUT_AND_COUNTED:
            yield pytest.param(factory, check, "trio", id=f"{factory.name}-{conformance.name_of(check)}")


@pytest.mark.parametrize(("factory", "check", "backend"), list(_cases()))
def test_conformance(factory: FabricFactory, check: conformance.Check, backend: str) -> None:
    if not factory.name.startswith("fake"):
        reason = _missing(_rails_of(factory))
        if factory.open_target is not None:
            reason = reason or _missing(factory.open_target.args[0].rails)  # type: ignore[attr-defined]
        if reason:
            pytest.skip(f"{factory.name} cannot be opened here: {reason}")
    conformance.run(check, factory, backend=backend)
