"""The data calls with page lists: many pages of one size in one call, written to a peer or read from one.

Runs on the event loop's thread, of a fabric of threads on any. The lists become int64 buffers that the engine copies;
which page is wrong is found out here, after the engine refused the call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, SupportsIndex

from asyncfabric._api.checks import MAX_BYTES, checked_imm, checked_index
from asyncfabric._api.data_ops import _READ, _WRITE, DataOps, _part
from asyncfabric._api.key import RegionKey
from asyncfabric._api.pages import check_pages, page_array
from asyncfabric._api.region import AnyRegion, RegionSlice
from asyncfabric._api.transfer import TransferT

if TYPE_CHECKING:
    from asyncfabric._api.pages import PageList


class _Pages(NamedTuple):
    """Checked arguments: the lists, and how a page number becomes an offset on each side."""

    sources: Any
    targets: Any
    page_bytes: int
    source_stride: int
    target_stride: int
    source_offset: int
    target_offset: int

    def check_sources(self, length: int, what: str) -> None:
        """Raise ValueError naming the first source page that leaves `length` bytes."""
        shape = (self.page_bytes, self.source_stride, self.source_offset)
        check_pages("source_pages", self.sources, *shape, length, what)

    def check_targets(self, length: int, what: str) -> None:
        """Raise ValueError naming the first target page that leaves `length` bytes."""
        shape = (self.page_bytes, self.target_stride, self.target_offset)
        check_pages("target_pages", self.targets, *shape, length, what)


class PageOps(DataOps[TransferT]):
    """The data calls with page lists; a part of Fabric."""

    def write_pages(
        self,
        source: AnyRegion | RegionSlice,
        source_pages: PageList,
        key: RegionKey,
        target_pages: PageList,
        *,
        page_bytes: SupportsIndex,
        source_stride: SupportsIndex | None = None,
        target_stride: SupportsIndex | None = None,
        source_offset: SupportsIndex = 0,
        target_offset: SupportsIndex = 0,
        imm: SupportsIndex | None = None,
        after: object = None,
    ) -> TransferT:
        """Write many pages in one call: page source_pages[i] of the source to page target_pages[i] behind the key.

        Page p is the `page_bytes` bytes from `offset + p * stride` on. Pages may repeat; the order in which repeated
        target pages are written is not defined. The lists are copied before the call returns.

        Args:
            source: region or slice that the source pages count in.
            source_pages: integers in a list, numpy or torch array, array.array or memoryview.
            target_pages: as many integers, of the same kinds.
            key: the right to write.
            page_bytes: size of a page, at least 1.
            source_stride: bytes from one source page to the next; None means `page_bytes`.
            target_stride: bytes from one target page to the next; None means `page_bytes`.
            source_offset: where source page 0 begins.
            target_offset: where target page 0 begins.
            imm: counter at the target that gets one arrival per page.
            after: as for `write`.

        Raises:
            TypeError, ValueError: a bad argument; for a page out of bounds the text names it and the bound.
                Rails without order refuse pages that are longer than one request (EFA: 1 GiB).
            StaleKeyError, BusyError, ClosedError: as for `write`.
        """
        region, start, length = _part(source, self._dispatcher)
        opened = self._reach(key, _WRITE, "write")
        pages = _checked(
            source_pages, target_pages, page_bytes, source_stride, target_stride, source_offset, target_offset
        )
        number = checked_imm(imm)
        dispatcher, count = self._dispatcher, len(pages.sources)
        transfer = self._transfer_type(dispatcher, f"write of {count} pages", (source, key), count * pages.page_bytes)
        if count == 0:
            return self._nothing(transfer)
        if length != region._length:
            # The engine knows the bounds of the region only, so those of a slice are checked here.
            pages.check_sources(length, repr(source))
        submit = dispatcher.engine.submit_write_pages
        shape = (*pages[1:5], start + pages.source_offset, pages.target_offset)
        arguments = (region._id, pages.sources, opened.id, *shape, number)
        mark = self._mark(after, region) if after is not None else None
        try:
            if mark is not None:
                return self._submit_after(mark, transfer, submit, *arguments)
            return self._submit(transfer, submit, *arguments)
        except ValueError:
            pages.check_sources(length, repr(source))
            pages.check_targets(opened.length, repr(key))
            raise

    def read_pages(
        self,
        key: RegionKey,
        source_pages: PageList,
        destination: AnyRegion | RegionSlice,
        target_pages: PageList,
        *,
        page_bytes: SupportsIndex,
        source_stride: SupportsIndex | None = None,
        target_stride: SupportsIndex | None = None,
        source_offset: SupportsIndex = 0,
        target_offset: SupportsIndex = 0,
    ) -> TransferT:
        """Read many pages in one call: page source_pages[i] behind the key to page target_pages[i] of the destination.

        Page p is the `page_bytes` bytes from `offset + p * stride` on. Source pages may repeat; where target pages
        repeat, it is not defined which one stays. The lists are copied before the call returns.

        Args:
            key: the right to read, from the owner of the memory. Its peer is connected on first use.
            source_pages: integers in a list, numpy or torch array, array.array or memoryview.
            destination: region or slice that the target pages count in.
            target_pages: as many integers, of the same kinds.
            page_bytes: size of a page, at least 1.
            source_stride: bytes from one source page to the next; None means `page_bytes`.
            target_stride: bytes from one target page to the next; None means `page_bytes`.
            source_offset: where source page 0 begins.
            target_offset: where target page 0 begins.

        Raises:
            TypeError, ValueError: a bad argument; for a page out of bounds the text names it and the bound. Also a key
                without the right to read, and a destination that was registered from a read-only buffer.
            StaleKeyError, BusyError, ClosedError: as for `write`.

        Awaiting it raises TransferError where no rail to the peer can read (see `can_read` of `fabric.rails`).
        """
        region, start, length = _part(destination, self._dispatcher)
        opened = self._reach(key, _READ, "read")
        if region._readonly:
            raise ValueError(f"cannot read into {destination!r}: it was registered from a read-only buffer")
        pages = _checked(
            source_pages, target_pages, page_bytes, source_stride, target_stride, source_offset, target_offset
        )
        dispatcher, count = self._dispatcher, len(pages.sources)
        about = (f"read of {count} pages", (key, destination), count * pages.page_bytes)
        transfer = self._transfer_type(dispatcher, *about)
        if count == 0:
            return self._nothing(transfer)
        if length != region._length:
            pages.check_targets(length, repr(destination))
        shape = (*pages[1:5], pages.source_offset, start + pages.target_offset)
        try:
            submit = dispatcher.engine.submit_read_pages
            return self._submit(transfer, submit, region._id, pages.sources, opened.id, *shape)
        except ValueError:
            pages.check_sources(opened.length, repr(key))
            pages.check_targets(length, repr(destination))
            raise


def _checked(
    source_pages: PageList,
    target_pages: PageList,
    page_bytes: SupportsIndex,
    source_stride: SupportsIndex | None,
    target_stride: SupportsIndex | None,
    source_offset: SupportsIndex,
    target_offset: SupportsIndex,
) -> _Pages:
    sources, targets = page_array("source_pages", source_pages), page_array("target_pages", target_pages)
    if len(sources) != len(targets):
        raise ValueError(f"{len(sources)} source pages, but {len(targets)} target pages")
    size = checked_index("page_bytes", page_bytes, 1, MAX_BYTES)
    return _Pages(
        sources,
        targets,
        size,
        size if source_stride is None else checked_index("source_stride", source_stride, 0, MAX_BYTES),
        size if target_stride is None else checked_index("target_stride", target_stride, 0, MAX_BYTES),
        checked_index("source_offset", source_offset, 0, MAX_BYTES),
        checked_index("target_offset", target_offset, 0, MAX_BYTES),
    )
