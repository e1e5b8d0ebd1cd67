"""Puts the face in the place of the module `nixl`, and takes it away again; the plugins of vLLM and SGLang do the same.

Called before the engine imports nixl, in each process of it; what has imported names of nixl before keeps them.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

logger: logging.Logger = logging.getLogger(__name__)

SWITCH = "ASYNCFABRIC_NIXL"
_YES = frozenset(("y", "yes", "on", "true", "1"))
_FOLDER = Path(__file__).parent / "pythonpath"


def pythonpath() -> str:
    """Return the folder whose `nixl` is the face, to be the first on PYTHONPATH."""
    return str(_FOLDER)


def install() -> None:
    """Have `import nixl`, `nixl._api` and `nixl._bindings` find the face in this process, and in those it spawns.

    Idempotent. A nixl that is imported already is replaced for all later imports.
    """
    folder = pythonpath()
    if folder in sys.path:
        sys.path.remove(folder)
    sys.path.insert(0, folder)
    replaced = _forget_modules(ours=False)
    if replaced:
        logger.warning("nixl of %s was imported before; names that were taken from it stay those of NIXL", replaced)


def uninstall() -> None:
    """Have later imports find the NIXL that is installed, if there is one; idempotent. Agents of the face go on."""
    if pythonpath() in sys.path:
        sys.path.remove(pythonpath())
    _forget_modules(ours=True)


def plugin() -> None:
    """Install the face if ASYNCFABRIC_NIXL=1 is in the environment; the entry point of vLLM and SGLang."""
    if os.environ.get(SWITCH, "").strip().lower() in _YES:
        install()


def _forget_modules(*, ours: bool) -> str:
    """Drop `nixl` and what is in it from the imported modules, if it is ours or is not; return where it came from."""
    front = sys.modules.get("nixl")
    origin = getattr(front, "__file__", None) or ""
    if front is None or origin.startswith(str(_FOLDER)) != ours:
        return ""
    for name in [name for name in sys.modules if name == "nixl" or name.startswith("nixl.")]:
        del sys.modules[name]
    return origin
