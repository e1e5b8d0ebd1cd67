"""ModuleFace: a folder of ours in the place of a foreign module, in this process and in those that it spawns.

What has imported names of the module before keeps them.
"""

from __future__ import annotations

import sys
from pathlib import Path


class ModuleFace:
    """The place of one module.

    Attributes:
        name: of the module.
        folder: whose module of this name is ours; to be the first on PYTHONPATH.
    """

    def __init__(self, name: str, folder: Path) -> None:
        """Nothing changes before `install`."""
        self.name: str = name
        self.folder: str = str(folder)

    def install(self) -> str:
        """Have later imports find ours; idempotent. Returns the file of a foreign one that was imported, or nothing."""
        if self.folder in sys.path:
            sys.path.remove(self.folder)
        sys.path.insert(0, self.folder)
        return self._forget(ours=False)

    def uninstall(self) -> None:
        """Have later imports find the module that is installed, if there is one; idempotent."""
        if self.folder in sys.path:
            sys.path.remove(self.folder)
        self._forget(ours=True)

    def _forget(self, *, ours: bool) -> str:
        """Drop the module and what is in it from the imported ones, if it is ours or is not; return its file."""
        front = sys.modules.get(self.name)
        origin = getattr(front, "__file__", None) or ""
        if front is None or origin.startswith(self.folder) != ours:
            return ""
        for name in [name for name in sys.modules if name == self.name or name.startswith(f"{self.name}.")]:
            del sys.modules[name]
        return origin
