"""What the code itself costs: seconds of a processor core for each thing that an update does. Values only.

Measured on a machine by `asyncfabric plan calibrate`, never assumed: there are no defaults.
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray


class HostCosts(msgspec.Struct, frozen=True, kw_only=True):
    """Core time, unless stated otherwise. One GB is 1e9 bytes.

    Attributes:
        write_s_per_gb: of a sender's engine, for a byte that it writes.
        write_us: of a sender's engine, for each write: one run that is contiguous at both ends.
        receive_s_per_gb: of a receiver's engine, for a byte that arrives; 0 where writes need nobody there.
        checksum_s_per_gb: for a byte that is hashed, once at the sender and once at each receiver.
        gather_s_per_gb: for a byte that lies in short runs and is put in order before it is hashed and written.
        box_s_per_gb: of a sender's engine, for a byte that it puts in order and hashes while it writes it.
        cast_s_per_gb, fp8_s_per_gb: for a byte written that was cast, or quantised in blocks.
        unit_ms: of a trainer's event loop, for each unit of boxes.
        message_ms, report_ms: of the sender's and of the receiver's event loop, for a message about what was written.
        opened_ms: of a receiver's event loop, for each of its senders: it sends it the key before anything is written.
        row_us: of the threads that hash at a receiver, for each row: what it takes beside its bytes.
        process_ms: of each trainer and receiver, for taking part in an update at all.
        shared_ms: of each trainer that shares a process with others, instead; only calibrations have such.
        begin_message_ms: of the coordinator, for each message until everybody may write; many at once, on one core.
        end_message_ms: of the coordinator, for each message besides those.
        update_ms: of the coordinator, for an update, however many take part: its log, its thread, its report.
    """

    write_s_per_gb: float
    write_us: float
    receive_s_per_gb: float
    checksum_s_per_gb: float
    gather_s_per_gb: float
    box_s_per_gb: float
    cast_s_per_gb: float
    fp8_s_per_gb: float
    unit_ms: float
    message_ms: float
    report_ms: float
    opened_ms: float
    row_us: float
    process_ms: float
    shared_ms: float
    begin_message_ms: float
    end_message_ms: float
    update_ms: float

    def __post_init__(self) -> None:
        for name in COSTS:
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")

    @property
    def values(self) -> NDArray[np.float64]:
        """The numbers in the order of COSTS."""
        return np.array([getattr(self, name) for name in COSTS], np.float64)

    def beside_devices(self, op_us: float | None = None) -> HostCosts:
        """Return what is left where NICs move bytes and GPUs convert and hash: event loops and posting.

        `op_us` is what posting a write takes, measured by itself: `write_us` is of engines that copy, too.
        """
        return msgspec.structs.replace(
            self,
            write_us=self.write_us if op_us is None else min(self.write_us, op_us),
            write_s_per_gb=0.0,
            receive_s_per_gb=0.0,
            checksum_s_per_gb=0.0,
            gather_s_per_gb=0.0,
            box_s_per_gb=0.0,
            cast_s_per_gb=0.0,
            fp8_s_per_gb=0.0,
        )


COSTS: tuple[str, ...] = HostCosts.__struct_fields__


class Hosts(msgspec.Struct, frozen=True, kw_only=True):
    """Machines whose cores the ranks share.

    Attributes:
        costs: of the code.
        cores: of each machine, those that nobody else uses; may be a fraction.
        ranks: trainers, then receivers, fill machines with so many each; 0: all ranks are on one machine.
        one_interpreter: what hashes is begun by the event loop, as on GPUs: both are one thread.
    """

    costs: HostCosts
    cores: float
    ranks: int = 0
    one_interpreter: bool = False

    def __post_init__(self) -> None:
        if not self.cores > 0 or self.ranks < 0:
            raise ValueError(f"a machine has cores, and ranks or 0 for all, got {self.cores} and {self.ranks}")
