"""SentNotes: what becomes of the notes to one agent, which leave without a transfer of their own each.

Any thread; completions come under the lock of the fabric.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from asyncfabric._api.transfer import AnyTransfer
from asyncfabric.errors import ClosedError, FabricError
from asyncfabric.types import Waiting

if TYPE_CHECKING:
    from asyncfabric import blocking
    from asyncfabric._bridge.engine import Completion

logger: logging.Logger = logging.getLogger(__name__)


class SentNotes(AnyTransfer):
    """The notes to one agent that are under way: it gets the completion of each, and reports those that failed."""

    __slots__ = ()

    def __init__(self, fabric: blocking.Fabric, agent: str) -> None:
        super().__init__(fabric._dispatcher, "note", f"agent {agent!r}", 0)

    def complete(self, completion: Completion) -> None:
        """Report a note that did not arrive."""
        if not completion.code:
            return
        self.completion = completion
        try:
            self.result()
        except ClosedError:
            pass  # the agent is closed
        except FabricError as error:
            logger.warning("a note to %s did not arrive: %s", self._where, error)
        finally:
            self.completion = None

    def describe(self) -> str:
        """Return the notes in words."""
        return f"note to {self._where}"

    def waiting(self) -> list[Waiting]:
        """Return the line of one note."""
        return [Waiting(self.describe(), "the last work requests", 0, 1)]
