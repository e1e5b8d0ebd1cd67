"""Each published version as a file of safetensors: to compare with, and for a training to go on from. Blocking."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import Module

KEPT = 32
_NAME = re.compile(r"version-(\d+)\.safetensors")


def checkpoint_path(folder: Path, version: int) -> Path:
    """Return where a version is kept."""
    return folder / f"version-{version}.safetensors"


def fault_of(folder: Path) -> str:
    """Return why versions cannot be kept in a folder, or ""; makes the folder."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return f"the folder {folder} cannot be made: {error.strerror}"
    return "" if os.access(folder, os.W_OK | os.X_OK) else f"the folder {folder} cannot be written: permission denied"


def save_version(folder: Path, version: int, state: Mapping[str, Tensor]) -> None:
    """Keep a version; the oldest go when there are more than KEPT. The file is there whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    draft = folder / f"draft-{version}"
    save_file(dict(state), draft)
    draft.replace(checkpoint_path(folder, version))
    for unfinished in folder.glob("draft-*"):  # of a process that was killed meanwhile
        unfinished.unlink()
    for old in versions_in(folder)[:-KEPT]:
        checkpoint_path(folder, old).unlink(missing_ok=True)


def versions_in(folder: Path) -> list[int]:
    """Return the versions that are kept, ascending."""
    if not folder.is_dir():
        return []
    return sorted(int(found[1]) for path in folder.iterdir() if (found := _NAME.fullmatch(path.name)))


def restore(model: Module, state: Mapping[str, Tensor]) -> None:
    """Put a kept version into a model; of parameters that are tied it has one. Raises ValueError for other names."""
    known = {name for name, _ in model.named_parameters()}
    if known != set(state):
        names = sorted(known ^ set(state))
        raise ValueError(f"the checkpoint is of another model: only one of the two has {', '.join(names[:4])}")
    model.load_state_dict(dict(state), strict=False)


def load_version(folder: Path, version: int) -> dict[str, Tensor]:
    """Return the state of a version; raises OSError when it is not kept."""
    state: dict[str, Tensor] = load_file(checkpoint_path(folder, version))
    return state
