"""LaneShape: how the memory of one lane is laid out, and how much of it there is. Pure values.

The receiving region begins with one row of zeros, which padding is copied from. Then for each step in flight: a private
slot for each member, and the area for what did not fit there. A slot is [front][private rows]; a record fills the end
of the front, so that record and rows are contiguous whatever their number. Behind all that lie the areas for the rows
that come back. All rows begin at multiples of `row_bytes`, so that one gather reaches every row of the region.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

HEAD_BYTES = 32
AREA_BYTES = 192 << 20
"""Most bytes of one area, over all lanes; what does not fit goes in passes."""


@dataclass(frozen=True, kw_only=True)  # no slots: the sizes are worked out once
class LaneShape:
    """Sizes of one lane.

    Attributes:
        members: places that tokens go to, this one included.
        max_tokens: tokens that one member dispatches in a step, at most.
        top_k: choices of a token.
        fan_out: members that one token goes to, at most.
        row_bytes: bytes of a dispatched row.
        back_row_bytes: bytes of a row that comes back.
        scales: fp32 scales of a row.
        private: rows of a private slot.
        in_flight: steps in flight.
        area_bytes: most bytes of one area.
    """

    members: int
    max_tokens: int
    top_k: int
    fan_out: int
    row_bytes: int
    back_row_bytes: int
    scales: int
    private: int
    in_flight: int
    area_bytes: int

    @cached_property
    def head_bytes(self) -> int:
        """Bytes of a record's head: fixed numbers, and a count for each member."""
        return HEAD_BYTES + -(-self.members * 4 // 16) * 16

    @cached_property
    def meta_bytes(self) -> int:
        """Bytes that a record has for each row: origin, experts, weights, scales."""
        return 4 * (1 + 2 * self.top_k + self.scales)

    @cached_property
    def front_rows(self) -> int:
        """Rows of the front of a slot."""
        return -(-(self.head_bytes + self.max_tokens * self.meta_bytes) // self.row_bytes)

    @cached_property
    def slot_rows(self) -> int:
        """Rows of a slot."""
        return self.front_rows + self.private

    @cached_property
    def area_rows(self) -> int:
        """Rows of the area behind the private slots; 0 where private slots hold all that can come."""
        worst = self.members * (self.max_tokens - self.private)
        return min(worst, max(1, self.area_bytes // self.row_bytes))

    @cached_property
    def set_rows(self) -> int:
        """Rows that one step in flight takes."""
        return self.members * self.slot_rows + self.area_rows

    @cached_property
    def back_rows(self) -> int:
        """Rows of the area for what comes back."""
        return min(self.max_tokens * self.fan_out, max(1, self.area_bytes // self.back_row_bytes))

    @cached_property
    def in_rows(self) -> int:
        """Rows of the receiving region before the areas for what comes back."""
        return 1 + self.in_flight * self.set_rows

    @cached_property
    def receive_bytes(self) -> int:
        """Bytes of the region that peers write to."""
        return self.in_rows * self.row_bytes + self.in_flight * self.back_rows * self.back_row_bytes

    @cached_property
    def staging_bytes(self) -> int:
        """Bytes of the region that this member writes from: slots, one area, and rows that go back."""
        rows = self.members * self.slot_rows + self.area_rows
        return rows * self.row_bytes + self.back_rows * self.back_row_bytes

    @cached_property
    def total_bytes(self) -> int:
        """Bytes of both regions."""
        return self.receive_bytes + self.staging_bytes

    def record_bytes(self, rows: int) -> int:
        """Return the length of a record about so many rows."""
        return self.head_bytes + rows * self.meta_bytes

    def slot_row(self, turn: int, member: int) -> int:
        """Return the region's row at which the private rows of a member begin, for a step in flight."""
        return 1 + turn * self.set_rows + member * self.slot_rows + self.front_rows

    def rest_offset(self, turn: int) -> int:
        """Return the byte at which the area for what private slots do not hold begins."""
        return (1 + turn * self.set_rows + self.members * self.slot_rows) * self.row_bytes

    def back_offset(self, turn: int) -> int:
        """Return the byte at which the area for what comes back begins."""
        return self.in_rows * self.row_bytes + turn * self.back_rows * self.back_row_bytes
