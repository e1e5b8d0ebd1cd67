"""A click type for files that a command writes when it has measured or recorded: whether it can is asked before.

Runs while options are parsed. Nothing is created here; a folder that goes away meanwhile is still an error at the end.
"""

from __future__ import annotations

import os
from pathlib import Path

import click


class OutputFile(click.ParamType[Path]):
    """A file to write, which may be there; its folder must be there."""

    name = "file"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """Return the path, or fail as a usage error that states what is in the way."""
        path = Path(str(value))
        if path.is_dir():
            self.fail(f"{path} is a folder: name a file in it", param, ctx)
        if not path.parent.is_dir():
            self.fail(f"cannot write {path}: there is no folder {path.parent}", param, ctx)
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            self.fail(f"cannot write {path}: permission denied", param, ctx)
        return path
