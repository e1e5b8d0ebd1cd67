"""ThreadComm: what mpi4py's communicator is to a Buffer of DeepEP's interface, among threads of one process."""

from __future__ import annotations

import threading
from typing import Any


class ThreadComm:
    """One rank of those that share values and a barrier."""

    def __init__(self, rank: int, values: list[Any], barrier: threading.Barrier, patience_s: float = 60.0) -> None:
        """Be a rank; `values` has a place for each."""
        self.rank, self.values, self.barrier, self.patience_s = rank, values, barrier, patience_s

    def Get_rank(self) -> int:  # noqa: N802  # the name is mpi4py's
        """Return the rank."""
        return self.rank

    def Get_size(self) -> int:  # noqa: N802
        """Return the number of ranks."""
        return len(self.values)

    def allgather(self, value: Any) -> list[Any]:
        """Return the values of all ranks."""
        self.values[self.rank] = value
        self.barrier.wait(self.patience_s)
        found = list(self.values)
        self.barrier.wait(self.patience_s)
        return found
