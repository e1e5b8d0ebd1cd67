"""The coordinator's durable memory: which versions were begun, and which of them were decided. Blocking file calls.

One line of JSON for each record, with a checksum. A version that was begun and has no decision was never decided: that
is an abort. WC-2: a decision is on the disk before it is sent. A record that could not be written
is taken back, so that a later reader cannot find a decision that was never announced.
"""

from __future__ import annotations

import fcntl
import os
import zlib
from math import inf
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Literal

import msgspec

from asyncfabric.errors import BrokenError, BusyError, ClosedError
from asyncfabric.unreadable import UNREADABLE


class DecisionRecord(msgspec.Struct, frozen=True):
    """One line: `kind` is begin or commit; `manifest` is the digest of the version's manifest."""

    kind: Literal["begin", "commit"]
    version: int
    manifest: str


class _Line(msgspec.Struct, frozen=True):
    record: DecisionRecord
    crc: int


class DecisionLog:
    """The open log; `with DecisionLog(path) as log`. Used from one thread at a time.

    Without a path it is in memory, and ends with the process.

    Attributes:
        begun: the latest version that was begun, 0 for none.
        committed: the latest version that was decided, 0 for none.
        manifest: digest of the committed version's manifest.
        took_s: seconds until the last record was on the disk.

    Raises:
        BusyError: another process has it open.
        BrokenError: it cannot be read, or a line before the last is damaged.
    """

    def __init__(self, path: Path | None) -> None:
        self._what = f"the decision log {path or 'in memory'}"
        self.begun: int = 0
        self.committed: int = 0
        self.manifest: str = ""
        self.took_s: float = inf
        self._begun_manifest = ""
        self._broken = ""
        try:
            if path is None:
                self._file = os.memfd_create("asyncfabric-decisions")
            else:
                self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise BrokenError(f"{self._what} cannot be opened: {error}", raw=error.errno or 0) from error
        try:
            self._lock()
            self._length = self._read()
            os.ftruncate(self._file, self._length)  # a line that was cut by a crash was never a decision
            os.fsync(self._file)
            if path is not None:
                _sync_folder(path.parent)
        except BaseException:
            os.close(self._file)
            self._file = -1
            raise

    def __enter__(self) -> DecisionLog:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close it."""
        self.close()

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def begin(self, version: int, manifest: str) -> None:
        """Record that a version is attempted; blocks until it is on the disk. Errors are those of `commit`.

        Raises ValueError for a version that is not later than all begun ones.
        """
        if version <= self.begun:
            raise ValueError(f"version must be greater than {self.begun}, the latest that was begun; got {version}")
        self._append(DecisionRecord("begin", version, manifest))
        self.begun = version

    def commit(self, version: int) -> None:
        """Record the decision; blocks until it is on the disk.

        Raises ValueError unless the version is the one that was begun last. Raises BrokenError when the disk refuses;
        the record is then not in the log, or, if even that is unsure, the log takes no more records and raises.
        """
        if version != self.begun or version == self.committed:
            raise ValueError(f"version {version} is not open: begun {self.begun}, committed {self.committed}")
        manifest = self._begun_manifest
        self._append(DecisionRecord("commit", version, manifest))
        self.committed, self.manifest = version, manifest

    # ---- the file

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BusyError(
                f"{self._what} is in use", remedy="one coordinator at a time; end the other one first"
            ) from None

    def _read(self) -> int:
        """Take in what is there; returns how many bytes of it are good."""
        with os.fdopen(os.dup(self._file), "rb") as file:
            text = file.read()
        good = 0
        lines = text.split(b"\n")[:-1]  # what follows the last newline was cut
        for number, line in enumerate(lines, start=1):
            try:
                record = _decoded(line)
            except UNREADABLE as error:
                if number == len(lines):
                    break
                raise BrokenError(
                    f"{self._what} is damaged in line {number}",
                    remedy="restore it from a copy, or ask the replicas which version they serve and begin a new log",
                ) from error
            self._take(record)
            good += len(line) + 1
        return good

    def _take(self, record: DecisionRecord) -> None:
        if record.kind == "begin":
            self.begun, self._begun_manifest = record.version, record.manifest
        else:
            self.committed, self.manifest = record.version, record.manifest

    def _append(self, record: DecisionRecord) -> None:
        if self._file < 0:
            raise ClosedError(f"{self._what} is closed")
        if self._broken:
            raise BrokenError(self._broken, remedy="restart the coordinator when the disk is well again")
        line = msgspec.json.encode(_Line(record, _crc(record))) + b"\n"
        began = monotonic()
        try:
            written = 0
            while written < len(line):  # a disk that is nearly full takes a part
                written += os.pwrite(self._file, line[written:], self._length + written)
            os.fsync(self._file)
        except OSError as error:
            self._take_back(record, error)
        self.took_s = monotonic() - began
        self._length += len(line)
        if record.kind == "begin":
            self._begun_manifest = record.manifest

    def _take_back(self, record: DecisionRecord, error: OSError) -> None:
        what = f"{self._what} could not take {record.kind} of version {record.version}: {error}"
        try:
            os.ftruncate(self._file, self._length)
            os.fsync(self._file)
        except OSError as second:
            self._broken = f"{what}; and what it holds is not known: {second}"
            raise BrokenError(self._broken, remedy="restart the coordinator", raw=error.errno or 0) from error
        raise BrokenError(what, remedy="make room on that disk", raw=error.errno or 0) from error


def _decoded(line: bytes) -> DecisionRecord:
    read = msgspec.json.decode(line, type=_Line)
    if read.crc != _crc(read.record):
        raise msgspec.ValidationError("the checksum is wrong")
    return read.record


def _crc(record: DecisionRecord) -> int:
    return zlib.crc32(msgspec.json.encode(record))


def _sync_folder(folder: Path) -> None:
    """A new file is durable only when its folder is."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
