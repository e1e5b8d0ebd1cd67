"""Puts the face in the place of the module `nixl`, and takes it away again; the plugins of vLLM and SGLang do the same.

Called before the engine imports nixl, in each process of it; what has imported names of nixl before keeps them.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from asyncfabric.integrations.module_face import ModuleFace

logger: logging.Logger = logging.getLogger(__name__)

SWITCH = "ASYNCFABRIC_NIXL"
_YES = frozenset(("y", "yes", "on", "true", "1"))
_FACE = ModuleFace("nixl", Path(__file__).parent / "pythonpath")


def pythonpath() -> str:
    """Return the folder whose `nixl` is the face, to be the first on PYTHONPATH."""
    return _FACE.folder


def install() -> None:
    """Have `import nixl`, `nixl._api` and `nixl._bindings` find the face in this process, and in those it spawns.

    Idempotent. A nixl that is imported already is replaced for all later imports.
    """
    replaced = _FACE.install()
    if replaced:
        logger.warning("nixl of %s was imported before; names that were taken from it stay those of NIXL", replaced)


def uninstall() -> None:
    """Have later imports find the NIXL that is installed, if there is one; idempotent. Agents of the face go on."""
    _FACE.uninstall()


def plugin() -> None:
    """Install the face if ASYNCFABRIC_NIXL=1 is in the environment; the entry point of vLLM and SGLang."""
    if os.environ.get(SWITCH, "").strip().lower() in _YES:
        install()
