"""Reading small files of sysfs and procfs below a root: None when there is no answer. Blocking, any thread."""

from __future__ import annotations

from pathlib import Path

CAP_IPC_LOCK, CAP_SYS_PTRACE = 14, 19
_MOST = 64 * 1024


def read_text(root: Path, name: str) -> str | None:
    """Return a file's text without white space at its ends; a name that no file can have is that of no file."""
    try:
        with (root / name).open(encoding="utf-8", errors="replace") as file:
            return file.read(_MOST).strip()
    except (OSError, ValueError):  # ValueError: a NUL in the name, which may come from another such file
        return None


def read_number(root: Path, name: str) -> int | None:
    """Return a file's one number."""
    text = read_text(root, name)
    try:
        return None if text is None else int(text, 0)
    except ValueError:
        return None


def chosen(text: str | None) -> str | None:
    """Return the word in brackets: "always [madvise] never"."""
    if text is None or "[" not in text:
        return None
    return text.partition("[")[2].partition("]")[0]


def has_capability(root: Path, number: int) -> bool:
    """State whether this process holds a capability."""
    for line in (read_text(root, "proc/self/status") or "").splitlines():
        if line.startswith("CapEff:"):
            try:
                return bool(int(line.partition(":")[2], 16) >> number & 1)
            except ValueError:
                return False
    return False
