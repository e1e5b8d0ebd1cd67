"""A `serve` command has flags for exactly the settings that its service reads: each service is opened and watched.

The trainer is left out, since it needs the process group that torchrun makes.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import trio
from click.testing import CliRunner

for needed in ("torch", "transformers", "starlette", "hypercorn"):
    pytest.importorskip(needed, reason=f"node services need {needed}")

from asyncfabric_services.nodes import stage  # noqa: E402
from asyncfabric_services.router import command  # noqa: E402
from asyncfabric_services.settings.readers import READERS, keys_of  # noqa: E402
from asyncfabric_services.settings.sources import LoadedSettings  # noqa: E402

TINY = {"MODEL__LAYERS": "1", "MODEL__HIDDEN": "16", "MODEL__QUERY_HEADS": "2", "MODEL__KV_HEADS": "1"}
TINY |= {"MODEL__EXPERTS": "2", "CACHE__MEMORY": "1MiB", "HTTP__PORT": "0"}
LATER = {"rollout": {"weights.memory", "weights.codings"}}
"""Read once the first trainer is known."""
OF_ALL = {"router.most_requests"}
"""Read by every node; a node that takes no requests from others has no use for it, and no flag."""
BEFORE = {"log.level", "log.form"}
"""Read by the command itself."""


class Watched:
    """Settings, or a section of them, that note what is read."""

    def __init__(self, inner: Any, read: set[str], section: str = "") -> None:
        self._inner, self._read, self._section = inner, read, section

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inner, name)
        if not self._section:
            return Watched(value, self._read, name)
        self._read.add(f"{self._section}.{name}")
        return value


async def _opened(service: Any, settings: Watched) -> None:
    with trio.CancelScope() as scope:
        await service.serve(settings, lambda _: scope.cancel())
    assert scope.cancelled_caught, "it ended before it listened"


@pytest.mark.parametrize("name", sorted(READERS.keys() - {"trainer"}))
def test_a_command_has_flags_for_what_its_service_reads(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage, "LEAVE_SECONDS", 0.0)
    given = TINY | {"CLUSTER__BIND": f"ipc://{tmp_path}/", "CLUSTER__DIRECTORY": f"ipc://{tmp_path}/none.sock"}
    given |= {"WEIGHTS__LOG": str(tmp_path / "decisions")}
    read = set[str]()

    def run(module: str, loaded: LoadedSettings) -> int:
        trio.run(_opened, importlib.import_module(module), Watched(loaded.settings, read))
        return 0

    monkeypatch.setattr(command, "_run", run)
    environment = {f"ASYNCFABRIC_{key}": value for key, value in given.items()}
    ran = CliRunner().invoke(command.serve, [name], env=environment, catch_exceptions=False)
    assert ran.exit_code == 0, ran.output
    shown = set(keys_of(name))
    assert read - shown <= OF_ALL, "it reads what it has no flag for"
    assert shown - read == BEFORE | LATER.get(name, set()), "it has flags that change nothing"
