"""The folder of a checkpoint, looked at first: transformers takes a path that is not there for a name on a hub."""

from __future__ import annotations

from pathlib import Path


def checkpoint_folder(path: Path) -> Path:
    """Return the path; raises FileNotFoundError, in words, where there is no folder with a `config.json`."""
    if not path.is_dir():
        raise FileNotFoundError(f"there is no folder {path}")
    if not (path / "config.json").is_file():
        raise FileNotFoundError(f"{path} has no config.json: expected configuration, safetensors and tokenizer in it")
    return path
