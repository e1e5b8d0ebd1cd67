"""Every version that served, against its checkpoint loaded the usual way: bytes and logits. Blocking."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from asyncfabric_services.fanout.blueprint import FanoutBlueprint
from asyncfabric_services.fanout.coordinator_service import BLUEPRINT_SUFFIX
from asyncfabric_services.rollout.fingerprint import bytes_digest, logits_digest
from asyncfabric_services.rollout.fused_model import FusedModel
from asyncfabric_services.rollout.usual import load_usual
from asyncfabric_services.trainer.checkpoints import load_version, versions_in


class Usual:
    """What a version's checkpoint gives when it is loaded the usual way.

    Args:
        folder: of checkpoints.
        log: of the coordinator, beside which the blueprint is.
    """

    def __init__(self, folder: Path, log: Path) -> None:
        data = log.with_name(log.name + BLUEPRINT_SUFFIX).read_bytes()
        self.blueprint = msgspec.msgpack.decode(data, type=FanoutBlueprint)
        self.config: Any = self.blueprint.model_config()
        self._folder = folder
        self._model = FusedModel(self.config, self.blueprint.layout)
        self.digests = cache(self._digests)

    def kept(self) -> list[int]:
        """Return the versions that there are checkpoints of."""
        return versions_in(self._folder)

    def _digests(self, version: int) -> tuple[str, str]:
        """Return (hash of the tensors, hash of the logits); raises OSError when the version is not kept."""
        ranks = load_usual(load_version(self._folder, version), self._model.card, self.blueprint.layout)
        return bytes_digest(ranks), logits_digest(self._model, ranks)

    def wrong(self, row: Mapping[str, Any]) -> bool:
        """Return whether a version that served was another than its checkpoint."""
        return (row["weights"], row["logits"]) != self.digests(row["version"])
