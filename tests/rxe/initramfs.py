"""The guest's first file system: a static busybox, the kernel modules in the order of their needs, and guest/init.

Written in cpio's "newc" form here, so neither cpio nor kmod must be installed. Order is taken from each module's own
`depends=`, since an unpacked package has no modules.dep.
"""

from __future__ import annotations

import gzip
import hashlib
import lzma
import re
import shutil
import subprocess
from pathlib import Path

from kernel import CannotRunError, Kernel

GUEST = Path(__file__).parent / "guest"
NEEDED = (
    "virtio_pci",
    "9pnet_virtio",
    "9p",
    "overlay",
    "virtio_console",
    "veth",
    "bridge",
    "sch_netem",
    "ib_uverbs",
    "rdma_ucm",
    "rdma_rxe",
)
WELCOME = (
    "virtio_rng",
    "crc32c_generic",
    "crc32_generic",
    "libcrc32c",
)  # built in, or named otherwise, in some kernels
MODE_DIRECTORY, MODE_FILE, MODE_LINK, MODE_CONSOLE = 0o40755, 0o100755, 0o120777, 0o20600


def find_initramfs(cache: Path, kernel: Kernel) -> Path:
    """Return the initramfs for a kernel, made anew when the kernel, the modules or guest/init changed."""
    init = (GUEST / "init").read_bytes()
    made_of = hashlib.sha256(repr((kernel.release, NEEDED, WELCOME)).encode() + init).hexdigest()[:16]
    path = cache / f"initramfs-{kernel.release}-{made_of}.gz"
    if not path.exists():
        modules = {path.name: content for path, content in load_order(kernel)}
        busybox = shutil.which("busybox", path="/bin:/usr/bin")
        if busybox is None:
            raise CannotRunError("busybox is missing (apt-get install busybox-static)")
        unfinished = path.with_suffix(".part")
        unfinished.write_bytes(gzip.compress(archive(Path(busybox).read_bytes(), modules, init), 1))
        unfinished.rename(path)
    return path


def load_order(kernel: Kernel) -> list[tuple[Path, bytes]]:
    """Return the modules that the guest loads, each behind those that it depends on; built-in ones are left out."""
    files = {_name_of(path): path for path in kernel.modules.rglob("*.ko*")}
    order: dict[str, tuple[Path, bytes]] = {}

    def visit(name: str, needed: bool) -> None:
        if name in order:
            return
        if name not in files:
            if needed and name not in _built_in(kernel):
                raise CannotRunError(
                    f"{without(name, kernel)}; remove {kernel.image.parent} to download another kernel"
                )
            return
        content = _unpacked(files[name])
        for other in _depends(content):
            visit(other, needed)
        order[name] = (Path(_name_of(files[name]) + ".ko"), content)

    for name in WELCOME:
        visit(name, False)
    for name in NEEDED:
        visit(name, True)
    return list(order.values())


def without(name: str, kernel: Kernel) -> str:
    """Print what a kernel lacks."""
    what = "soft-RoCE (the module rdma_rxe)" if name == "rdma_rxe" else f"the module {name}"
    return f"the kernel {kernel.release} has no {what}"


def archive(busybox: bytes, modules: dict[str, bytes], init: bytes) -> bytes:
    """Return a newc archive; console is in it since the kernel opens it before anything is mounted."""
    entries = [(name, MODE_DIRECTORY, b"") for name in ("bin", "dev", "proc", "sys", "modules", "host", "top", "root")]
    entries += [
        ("dev/console", MODE_CONSOLE, b""),
        ("bin/busybox", MODE_FILE, busybox),
        ("bin/sh", MODE_LINK, b"busybox"),
    ]
    entries += [(f"modules/{name}", MODE_FILE, content) for name, content in modules.items()]
    entries += [("modules/order", MODE_FILE, "".join(f"{name}\n" for name in modules).encode())]
    entries += [("init", MODE_FILE, init), ("TRAILER!!!", 0, b"")]
    return b"".join(_entry(number, *entry) for number, entry in enumerate(entries, 1))


def _entry(number: int, name: str, mode: int, content: bytes) -> bytes:
    device = (5, 1) if mode == MODE_CONSOLE else (0, 0)
    fields = (number, mode, 0, 0, 1, 0, len(content), 0, 0, *device, len(name) + 1, 0)
    head = b"070701" + b"".join(b"%08X" % value for value in fields) + name.encode() + b"\0"
    return head + b"\0" * (-len(head) % 4) + content + b"\0" * (-len(content) % 4)


def _name_of(path: Path) -> str:
    return path.name.split(".ko")[0].replace("-", "_")


def _built_in(kernel: Kernel) -> set[str]:
    listed = kernel.modules / "modules.builtin"
    return {_name_of(Path(line)) for line in listed.read_text().split()} if listed.exists() else set()


def _depends(module: bytes) -> list[str]:
    found = re.search(rb"\0depends=([^\0]*)\0", module)
    return [name.replace("-", "_") for name in found[1].decode().split(",") if name] if found else []


def _unpacked(path: Path) -> bytes:
    if path.suffix == ".xz":
        return lzma.decompress(path.read_bytes())
    if path.suffix == ".zst":
        return subprocess.run(["zstd", "-dcq", str(path)], stdout=subprocess.PIPE, check=True).stdout
    return path.read_bytes()
