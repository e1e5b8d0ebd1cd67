"""Puts the face in the place of the module `deep_ep`, and takes it away again.

Called before the engine imports deep_ep, in each process of it; what has imported names of deep_ep before keeps them.
"""

from __future__ import annotations

import sys
from pathlib import Path

_FOLDER = Path(__file__).parent / "pythonpath"


def pythonpath() -> str:
    """Return the folder whose `deep_ep` is the face, to be the first on PYTHONPATH."""
    return str(_FOLDER)


def install() -> None:
    """Have `import deep_ep`, `deep_ep.utils` and `deep_ep.buffer` find the face in this process; idempotent.

    A deep_ep that is imported already is replaced for all later imports. Processes that are spawned find it as well.
    """
    folder = pythonpath()
    if folder in sys.path:
        sys.path.remove(folder)
    sys.path.insert(0, folder)
    _forget_modules(ours=False)


def uninstall() -> None:
    """Have later imports find the DeepEP that is installed, if there is one; idempotent. Buffers of the face go on."""
    if pythonpath() in sys.path:
        sys.path.remove(pythonpath())
    _forget_modules(ours=True)


def _forget_modules(*, ours: bool) -> None:
    """Drop `deep_ep` and what is in it from the imported modules, if it is ours or is not."""
    front = sys.modules.get("deep_ep")
    origin = getattr(front, "__file__", None) or ""
    if front is None or origin.startswith(str(_FOLDER)) != ours:
        return
    for name in [name for name in sys.modules if name == "deep_ep" or name.startswith("deep_ep.")]:
        del sys.modules[name]
