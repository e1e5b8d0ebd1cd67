"""The guest's kernel: Debian's own, downloaded by apt and unpacked under build/rxe; nothing is installed into /boot.

A kernel that is there already is used without asking apt, so a cached one serves offline and after Debian moved on.
The image is unpacked to its ELF file once: TCG would spend four seconds of every boot on decompressing it.
"""

from __future__ import annotations

import lzma
import shutil
import struct
import subprocess
import zlib
from dataclasses import dataclass
from pathlib import Path

META_PACKAGE = "linux-image-amd64"  # not linux-image-cloud-amd64, which has neither rdma_rxe nor 9p


class CannotRunError(Exception):
    """This machine cannot run the ring; the text names what is missing and what to do."""


@dataclass(frozen=True)
class Kernel:
    """An unpacked kernel: `image` boots, `modules` is .../lib/modules/<release>."""

    image: Path
    modules: Path

    @property
    def release(self) -> str:
        return self.modules.name


def find_kernel(cache: Path) -> Kernel:
    """Return the newest cached kernel, or download one."""
    trees = sorted(cache.glob("kernel-*/ready"), key=lambda path: path.stat().st_mtime)
    tree = trees[-1].parent if trees else _download(cache)
    return unpacked_kernel(tree)


def unpacked_kernel(tree: Path) -> Kernel:
    """Return the kernel of a tree that `dpkg -x` made."""
    releases = sorted((tree / "lib" / "modules").iterdir())
    if not releases:
        raise CannotRunError(f"{tree} holds no kernel modules; remove it, and the next run downloads a kernel")
    return Kernel(tree / "vmlinux", releases[-1])


def _download(cache: Path) -> Path:
    package = _depends_on(META_PACKAGE)
    tree = cache / f"kernel-{package.removeprefix('linux-image-')}"
    shutil.rmtree(tree, ignore_errors=True)
    tree.mkdir(parents=True)
    print(f"rxe: downloading {package}", flush=True)
    got = subprocess.run(["apt-get", "-q", "download", package], cwd=tree, capture_output=True, text=True)
    archives = list(tree.glob("*.deb"))
    if got.returncode != 0 or not archives:
        raise CannotRunError(f"apt-get could not download {package}: {got.stderr.strip()}")
    subprocess.run(["dpkg", "-x", str(archives[0]), str(tree)], check=True)
    archives[0].unlink()
    image = next((tree / "boot").glob("vmlinuz-*"))
    (tree / "vmlinux").write_bytes(elf_of(image.read_bytes()))
    (tree / "ready").touch()  # last: an interrupted download is not taken for a kernel
    return tree


def _depends_on(package: str) -> str:
    try:
        listed = subprocess.run(["apt-cache", "depends", package], capture_output=True, text=True)
    except FileNotFoundError:
        raise CannotRunError("no kernel is cached, and there is no apt to download one with") from None
    for line in listed.stdout.splitlines():
        kind, _, name = line.strip().partition(": ")
        if kind == "Depends" and name.startswith("linux-image-"):
            return name
    raise CannotRunError(f"apt does not know {package}; this ring needs Debian's kernel (apt-get update?)")


def elf_of(image: bytes) -> bytes:
    """Return the ELF kernel inside of a bzImage (boot protocol 2.08: payload_offset and payload_length)."""
    sectors = image[0x1F1] or 4
    offset, length = struct.unpack_from("<II", image, 0x248)
    start = (sectors + 1) * 512 + offset
    payload = image[start : start + length]
    if payload.startswith(b"\xfd7zXZ"):
        elf = lzma.LZMADecompressor().decompress(payload)  # the four bytes behind the stream are its length
    elif payload.startswith(b"\x1f\x8b"):
        elf = zlib.decompressobj(wbits=31).decompress(payload)
    elif payload.startswith(b"\x28\xb5\x2f\xfd"):
        elf = subprocess.run(["zstd", "-dcq"], input=payload[:-4], stdout=subprocess.PIPE, check=True).stdout
    else:
        raise CannotRunError(f"the kernel image is packed in an unknown way ({payload[:4].hex()})")
    if not elf.startswith(b"\x7fELF"):
        raise CannotRunError("what came out of the kernel image is not an ELF file")
    return elf
