"""The harness itself, without booting anything: kernels that lack something, the order of modules, the archive."""

from __future__ import annotations

import gzip
import lzma
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from initramfs import NEEDED, archive, find_initramfs, load_order
from kernel import CannotRunError, Kernel, elf_of, find_kernel

RING = Path(__file__).with_name("ring.py")


def _kernel(tree: Path, modules: dict[str, str], built_in: tuple[str, ...] = ()) -> Kernel:
    """Make a kernel tree whose modules name only what they depend on."""
    folder = tree / "lib" / "modules" / "6.1.0-test"
    (folder / "kernel").mkdir(parents=True)
    for name, needs in modules.items():
        (folder / "kernel" / f"{name}.ko").write_bytes(
            b"\x7fELF\0license=GPL\0depends=" + needs.encode() + b"\0name=x\0"
        )
    (folder / "modules.builtin").write_text("".join(f"kernel/{name}.ko\n" for name in built_in))
    return Kernel(tree / "vmlinux", folder)


def test_modules_come_behind_those_that_they_need(tmp_path: Path) -> None:
    modules = dict.fromkeys(NEEDED, "") | {"rdma_rxe": "ib-core,udp_tunnel", "ib_core": "", "udp_tunnel": ""}
    order = [path.name for path, _ in load_order(_kernel(tmp_path, modules))]
    assert sorted(order) == sorted(f"{name}.ko" for name in modules)
    assert order.index("ib_core.ko") < order.index("rdma_rxe.ko")
    assert order.index("udp_tunnel.ko") < order.index("rdma_rxe.ko")


@pytest.mark.parametrize("name", ["rdma_rxe", "9p"])
def test_a_kernel_that_lacks_something_is_named(tmp_path: Path, name: str) -> None:
    lacking = _kernel(tmp_path, {module: "" for module in NEEDED if module != name})
    with pytest.raises(CannotRunError, match=name) as caught:
        load_order(lacking)
    assert "6.1.0-test" in str(caught.value)


def test_what_is_built_in_is_not_missing(tmp_path: Path) -> None:
    kernel = _kernel(tmp_path, {module: "" for module in NEEDED if module != "9p"}, built_in=("9p",))
    assert "9p.ko" not in [path.name for path, _ in load_order(kernel)]


def test_the_command_ends_with_its_own_status_when_it_cannot_run(tmp_path: Path) -> None:
    _kernel(tmp_path / "tree", {})
    command = [
        sys.executable,
        str(RING),
        "--cache",
        str(tmp_path / "cache"),
        "--kernel",
        str(tmp_path / "tree"),
        "--prepare",
    ]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 3
    assert "rxe: cannot run here" in ended.stderr
    assert "virtio_pci" in ended.stderr


def test_a_cached_kernel_is_used_without_asking_apt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(CannotRunError, match="no apt"):
        find_kernel(tmp_path)
    tree = tmp_path / "kernel-5.10.0-old"
    made = _kernel(tree, dict.fromkeys(NEEDED, ""))
    with pytest.raises(CannotRunError, match="no apt"):
        find_kernel(tmp_path)  # a tree without its mark was not finished
    (tree / "ready").touch()
    assert find_kernel(tmp_path) == made


def test_the_archive_is_one_that_cpio_reads(tmp_path: Path) -> None:
    content = archive(b"busybox", {"odd.ko": b"12345"}, b"#!/bin/sh\n")
    names, at = {}, 0
    while True:
        assert content[at : at + 6] == b"070701"
        fields = [int(content[at + 6 + 8 * n : at + 14 + 8 * n], 16) for n in range(13)]
        name = content[at + 110 : at + 110 + fields[11] - 1].decode()
        begin = (at + 110 + fields[11] + 3) // 4 * 4
        names[name] = content[begin : begin + fields[6]]
        at = (begin + fields[6] + 3) // 4 * 4
        if name == "TRAILER!!!":
            break
    assert at == len(content)
    assert names["modules/odd.ko"] == b"12345"
    assert names["modules/order"] == b"odd.ko\n"
    assert names["bin/sh"] == b"busybox"


def test_a_changed_init_makes_a_new_initramfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = _kernel(tmp_path / "tree", dict.fromkeys(NEEDED, ""))
    (tmp_path / "guest").mkdir()
    (tmp_path / "guest" / "init").write_bytes(b"one")
    monkeypatch.setattr("initramfs.GUEST", tmp_path / "guest")
    monkeypatch.setattr("initramfs.shutil.which", lambda name, path=None: str(RING))
    first = find_initramfs(tmp_path, kernel)
    assert find_initramfs(tmp_path, kernel) == first
    (tmp_path / "guest" / "init").write_bytes(b"two")
    assert find_initramfs(tmp_path, kernel) != first


@pytest.mark.parametrize("pack", [lzma.compress, gzip.compress])
def test_the_kernel_is_taken_out_of_its_image(pack: object) -> None:
    elf = b"\x7fELF" + bytes(range(256)) * 40
    payload = pack(elf) + struct.pack("<I", len(elf))  # type: ignore[operator]
    image = bytearray(2 * 512 + 0x300)
    image[0x1F1] = 1
    struct.pack_into("<II", image, 0x248, 0x300, len(payload))
    assert elf_of(bytes(image) + payload) == elf
    with pytest.raises(CannotRunError, match="unknown way"):
        elf_of(bytes(image) + b"nothing packed")
