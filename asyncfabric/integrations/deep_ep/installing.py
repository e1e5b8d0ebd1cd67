"""Puts the face in the place of the module `deep_ep`, and takes it away again.

Called before the engine imports deep_ep, in each process of it; what has imported names of deep_ep before keeps them.
"""

from __future__ import annotations

from pathlib import Path

from asyncfabric.integrations.module_face import ModuleFace

_FACE = ModuleFace("deep_ep", Path(__file__).parent / "pythonpath")


def pythonpath() -> str:
    """Return the folder whose `deep_ep` is the face, to be the first on PYTHONPATH."""
    return _FACE.folder


def install() -> None:
    """Have `import deep_ep`, `deep_ep.utils` and `deep_ep.buffer` find the face in this process; idempotent.

    A deep_ep that is imported already is replaced for all later imports. Processes that are spawned find it as well.
    """
    _FACE.install()


def uninstall() -> None:
    """Have later imports find the DeepEP that is installed, if there is one; idempotent. Buffers of the face go on."""
    _FACE.uninstall()
