"""The only translation of native statuses into exceptions: what happened, to whom, how much was done, what to check.

Pure functions, any thread. The class of the exception follows from the kind of the status (how much is broken), the
sentence from its code, and the caller adds the context: which op, which region, which peer, how many bytes.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from threading import current_thread
from types import FrameType, TracebackType

from asyncfabric._bridge.engine import Completion, EngineStatusError, StatusKind
from asyncfabric._bridge.status import StatusCode
from asyncfabric.errors import (
    BusyError,
    ClosedError,
    DeviceError,
    FabricError,
    InternalError,
    PeerError,
    StaleKeyError,
    TransferError,
)

MESSAGE_CREDITS = 64
"""Messages of one sender that wait at most to be taken (kMessageCredits)."""

MAX_WATCH_WORDS = 256
"""Watch words of one fabric that may be open at once (SharedWords::kWatchWords)."""

CUDA_RAW = 100_000
"""Raw numbers from here on are results of CUDA's driver (cuda::raw_of)."""

_REMEDIES: dict[int, str] = {
    StatusCode.BUSY: "await transfers, or fabric.wait_writable(), before submitting more; config.max_ops is the bound",
    StatusCode.CLOSED: "use it only inside the block of `open_fabric()` and before release() or close()",
    StatusCode.CANCELLED: "bytes that were posted before that may have arrived; submit it again if it is needed",
    StatusCode.STALE_KEY: "ask the owner of the memory for a new key: it was revoked, or its process was restarted",
    StatusCode.ACCESS_DENIED: "check that the region is still registered at its owner and that the key has the right",
    StatusCode.TRANSPORT: "see fabric.rails and fabric.statistics(); later transfers to this peer may work again",
    StatusCode.AMBIGUOUS: "it was not retried, so that nothing is counted twice; ask the peer what arrived",
    StatusCode.DRAIN_TIMEOUT: "the memory stays pinned for good because a device may still touch it; use other memory",
    StatusCode.UNSUPPORTED: (
        "see can_read and can_gather of fabric.rails: let the owner of the memory write, or write pages"
    ),
    StatusCode.PEER_DEAD: "check that process and its log; connect to its address of now, or ask it for a new key",
    StatusCode.PEER_UNREACHABLE: (
        "check that the process runs and has file descriptors left, that its address is fresh, "
        "and that both sides opened a common rail"
    ),
    StatusCode.PEER_REJECTED: "both sides need a common provider and the same version; see fabric.rails on both",
    StatusCode.RAIL_DOWN: "see fabric.rails for what is still up",
    StatusCode.NO_MEMORY: "check free memory, the bound of the container and ulimit -l (locked memory)",
    StatusCode.NO_PROVIDER: "install the provider's library, or name other rails in FabricConfig.rails",
    StatusCode.TIMEOUT: "see fabric.why() for what is missing and from whom",
    StatusCode.UNCONFIRMED: "await fabric.open_counter(imm); fabric.why() names the peers that have not confirmed",
    StatusCode.NOT_TAKEN: (
        "let the peer iterate over fabric.messages(); a fabric that closes takes none, and itself waits for room at a "
        "peer for config.drain_deadline"
    ),
    StatusCode.SECRET_REFUSED: (
        "give both FabricConfig(secret=...) the same bytes or the same file (compare sha256sum), or neither; a secret "
        "that was replaced needs both processes restarted"
    ),
    StatusCode.INTERNAL: "this is a defect of asyncfabric: please report it with this text",
}

# What ran out, where the system's number shows it: its sentence and what to do, instead of those of NO_MEMORY.
_RAN_OUT: dict[int, tuple[str, str]] = {
    errno.EMFILE: (
        "no file descriptor is left",
        "raise ulimit -n (docker --ulimit nofile=65536:65536); `asyncfabric doctor` shows what there is",
    ),
    errno.ENFILE: ("no file descriptor is left on this machine", "raise fs.file-max"),
    errno.EAGAIN: (
        "no thread can be started",
        "a fabric has about 3 threads: raise the container's bound of processes (docker --pids-limit, podPidsLimit), "
        "or ulimit -u",
    ),
}


@dataclass(frozen=True, slots=True)
class FailedCall:
    """Where a status came up: the op in words, and how much of it was done.

    Attributes:
        what: the op and its objects, for example `write of 4096 bytes from region 3`.
        peer: the peer in words, empty when none is involved.
        done, total: bytes that left for certain, bytes that should have left; total -1 when bytes mean nothing.
    """

    what: str
    peer: str = ""
    done: int = 0
    total: int = -1


def refused(error: EngineStatusError, call: FailedCall) -> Exception:
    """Return the exception for a call that the engine refused at once."""
    detail = str(error.args[3]) if len(error.args) > 3 else ""
    return exception_for(error.code, error.status_kind, error.raw, call, detail)


def failed(completion: Completion, call: FailedCall, detail: str = "") -> Exception:
    """Return the exception for a call that ended with this completion."""
    if completion.code == StatusCode.NOT_TAKEN:
        untaken = (
            f"{completion.value} messages to it had no room, behind {MESSAGE_CREDITS} that its program did not take"
        )
        detail = f"{untaken}: {detail}" if detail else untaken
    return exception_for(completion.code, completion.status_kind, completion.raw, call, detail)


def exception_for(code: int, kind: int, raw: int, call: FailedCall, detail: str = "") -> Exception:
    """Return the exception that a status becomes; it is made anew for each awaiter, since tracebacks grow on it."""
    message = _message(code, raw, call, detail)
    if kind == StatusKind.VALUE:
        return ValueError(message)
    remedy = _remedy(code, raw)
    if kind == StatusKind.PEER:
        return PeerError(message, remedy=remedy, raw=raw, bytes=call.done)
    if kind in (StatusKind.TRANSFER, StatusKind.CANCELLED):
        return TransferError(message, remedy=remedy, raw=raw, bytes=call.done)
    return _SIMPLE.get(kind, InternalError)(message, remedy=remedy, raw=raw)


def counter_refused(error: EngineStatusError, imm: object, peers: Sequence[str] = ()) -> Exception:
    """Return the exception for a counter that cannot be opened; `peers` have not confirmed that the last is closed."""
    if error.status_kind != StatusKind.BUSY:
        return refused(error, FailedCall(f"opening the counter of imm {imm}"))
    if error.code == StatusCode.UNCONFIRMED:
        if imm is None:
            return BusyError(
                "every immediate value has an open counter, or one whose close peers have not confirmed",
                remedy="close counters that nobody waits for; see fabric.why()",
            )
        return BusyError(
            f"the last counter of imm {imm} is closed, and {_few(peers) or 'a peer'} has not confirmed yet that "
            "nothing that counts for it is under way",
            remedy="await fabric.open_counter(imm), or let fabric.counter() pick a free imm; a peer that stands still "
            "is lost after config.peer_deadline_host or _network",
        )
    if imm is None:
        return BusyError("every immediate value has an open counter", remedy="close counters that nobody waits for")
    return BusyError(
        f"the counter of imm {imm} is open already",
        remedy="close the open one, or let fabric.counter() pick a free imm",
    )


def _few(names: Sequence[str]) -> str:
    most = 4
    more = f" and {len(names) - most} others" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def watch_refused(error: EngineStatusError) -> Exception:
    """Return the exception for a watch word that cannot be opened."""
    if error.status_kind != StatusKind.BUSY:
        return refused(error, FailedCall("opening a watch word"))
    return BusyError(
        f"opening a watch word: {MAX_WATCH_WORDS} words of this fabric are open, and it has no more",
        remedy="leave the `async with` of words that nobody stores to, or let one word count for several writers",
    )


def short_id(handle: int) -> str:
    """Return an engine id as people read it: the slot, and the generation of the slot when it was used before."""
    slot, generation = handle & 0xFFFFFFFF, handle >> 32
    return f"{slot}.{generation}" if generation > 1 else f"{slot}"


def closed(what: str) -> ClosedError:
    """Return the error of an object that was closed, released, or whose fabric is closed."""
    return ClosedError(f"{what} is closed", remedy=_REMEDIES[StatusCode.CLOSED])


class closed_meanwhile:  # noqa: N801  # used like a function
    """What a look at the engine raises becomes ClosedError: another thread closed it between the check and the look."""

    __slots__ = ("_what",)

    def __init__(self, what: object) -> None:
        self._what = what

    def __enter__(self) -> None:
        """Look inside."""

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> None:
        if isinstance(error, EngineStatusError) and error.status_kind == StatusKind.CLOSED:
            raise closed(str(self._what)) from None


def mark_forked() -> None:
    """State from here on, in every error of a closed object, that this process is the child of a fork."""
    _REMEDIES[StatusCode.CLOSED] += (
        "; this process was forked: what its parent had opened is closed here, and open there; "
        "start processes by spawn, or open a fabric of its own"
    )


def another_loop() -> RuntimeError:
    """Return the error of a call in another event loop, or another thread, than the fabric was opened in."""
    return RuntimeError(
        f"{_called()}() is called from thread {current_thread().name!r}: a fabric is used from the event loop and the "
        "thread that opened it, and this is another one, so nothing was changed; threads have ImmCounter.spin and "
        "WatchWord.store, or ask the fabric's loop (trio.from_thread, loop.call_soon_threadsafe); a fabric "
        "of asyncfabric.blocking takes calls of any thread"
    )


def _called() -> str:
    """Return the name of the call by which the program came into this package."""
    name = ""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith("asyncfabric."):
        name, frame = frame.f_code.co_name, frame.f_back
    return name


def peer_lost(what: str, peer: str, completion: Completion | None) -> PeerError:
    """Return the error of a wait that declared it waits for a peer which is lost."""
    text = StatusCode(completion.code).text if completion is not None and completion.code else "the peer is lost"
    return PeerError(
        f"{what}, and {peer} that it waits for will send no more: {text}",
        remedy=_REMEDIES[StatusCode.PEER_DEAD],
        raw=completion.raw if completion is not None else 0,
    )


def not_ended(what: str) -> BusyError:
    """Return the error of asking for a result too early."""
    return BusyError(f"{what} has not ended yet", remedy="await it first")


def in_words(what: str, total: int, where: object) -> str:
    """Return an op as people write it: `write of 4096 bytes (region 3, <RegionKey ...>)`."""
    parts = where if isinstance(where, tuple) else (where,)
    objects = ", ".join(repr(part) for part in parts if part is not None)
    return f"{what} of {total} bytes ({objects})" if objects else f"{what} of {total} bytes"


_SIMPLE: dict[int, type[FabricError]] = {
    StatusKind.BUSY: BusyError,
    StatusKind.CLOSED: ClosedError,
    StatusKind.STALE: StaleKeyError,
    StatusKind.DEVICE: DeviceError,
}


def _message(code: int, raw: int, call: FailedCall, detail: str) -> str:
    try:
        text = StatusCode(code).text
    except ValueError:
        text = f"unknown status {code}"
    detail = detail.removesuffix(f" [number {raw}]")  # stated in words below
    if _ran_out(code, raw):
        text, detail = _RAN_OUT[raw][0], detail.removeprefix(text).removeprefix(": ")
    elif _ran_out_there(code, raw):
        text = f"{text}: there, {_RAN_OUT[raw][0]}"
    if detail.startswith(text):
        text = detail
    elif detail:
        text = f"{text}: {detail}"
    to = f" to {call.peer}" if call.peer else ""
    done = f"; at least {call.done} of {call.total} bytes had left" if call.total >= 0 else ""
    # A detail that ends a call's name by its number states whose number it is: results of CUDA are no errno.
    own = raw - CUDA_RAW if raw >= CUDA_RAW else raw
    number = f" [{_number(raw)}]" if raw and f"({own})" not in detail else ""
    return f"{call.what}{to}: {text}{number}{done}"


def _ran_out(code: int, raw: int) -> bool:
    return code == StatusCode.NO_MEMORY and raw in _RAN_OUT


def _ran_out_there(code: int, raw: int) -> bool:
    return code == StatusCode.PEER_REJECTED and raw in (errno.EMFILE, errno.ENFILE)


def _remedy(code: int, raw: int) -> str:
    if _ran_out(code, raw):
        return _RAN_OUT[raw][1]
    return f"at the peer: {_RAN_OUT[raw][1]}" if _ran_out_there(code, raw) else _REMEDIES.get(code, "")


def _number(raw: int) -> str:
    """Return errno as text where it is one; providers also use negative numbers and numbers of their own."""
    if raw >= CUDA_RAW:
        return f"CUDA driver error {raw - CUDA_RAW}"
    text = os.strerror(abs(raw))
    return f"{raw}" if text.startswith("Unknown error") else f"{raw}: {text}"
