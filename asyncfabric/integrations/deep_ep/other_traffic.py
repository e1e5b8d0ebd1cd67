"""The calls of DeepEP's ElasticBuffer that move no rows of experts: each is refused by name.

Any thread.
"""

from __future__ import annotations

from typing import Any, NoReturn

ENGRAM = "entries of a table are fetched from other ranks by reads of their registered memory (Region and RegionKey)"
PIPELINE = "tensors of a pipeline are sent to a rank by writes into its registered memory (Region and RegionKey)"
GATHER = "all_gather and reduce_scatter are those of torch.distributed"


class NotThere:
    """A call that raises ValueError, with its name and what there is in its place."""

    def __init__(self, instead: str) -> None:
        """Take a sentence."""
        self._instead = instead
        self._name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __call__(self, *arguments: Any, **named: Any) -> NoReturn:
        """Refuse.

        Raises:
            ValueError: always.
        """
        raise ValueError(f"{self._name} is not there: an exchange of experts has dispatch and combine; {self._instead}")


class OtherTraffic:
    """What ElasticBuffer of DeepEP offers beside dispatch and combine, all of it experimental there."""

    engram_write: NotThere = NotThere(ENGRAM)
    engram_fetch: NotThere = NotThere(ENGRAM)
    get_engram_storage_size_hint: NotThere = NotThere(ENGRAM)
    pp_set_config: NotThere = NotThere(PIPELINE)
    pp_send: NotThere = NotThere(PIPELINE)
    pp_recv: NotThere = NotThere(PIPELINE)
    get_pp_buffer_size_hint: NotThere = NotThere(PIPELINE)
    create_agrs_session: NotThere = NotThere(GATHER)
    destroy_agrs_session: NotThere = NotThere(GATHER)
    agrs_new_session: NotThere = NotThere(GATHER)
    agrs_set_config: NotThere = NotThere(GATHER)
    agrs_get_inplace_tensor: NotThere = NotThere(GATHER)
    get_agrs_num_max_session_bytes: NotThere = NotThere(GATHER)
    get_agrs_buffer_size_hint: NotThere = NotThere(GATHER)
    all_gather: NotThere = NotThere(GATHER)
