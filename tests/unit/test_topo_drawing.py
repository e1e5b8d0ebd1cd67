"""Pictures and saved trees of `asyncfabric topo`: boxes hold what they should, copies look alike, secrets stay."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from machines import MACHINES, dgx_h100, laptop

from asyncfabric.observe.topology import read_topology
from asyncfabric_services.topo.snapshot import save_tree
from asyncfabric_services.topo.svg import draw_svg
from asyncfabric_services.topo.text import draw_text
from asyncfabric_services.topo.words import cpu_list

pytest.importorskip("asyncfabric._native._engine", reason="THE DRAWINGS WERE NOT TESTED: `make build`")

SVG = "{http://www.w3.org/2000/svg}"
Rectangle = tuple[float, float, float, float]


def inside(one: Rectangle, other: Rectangle) -> bool:
    """Say whether a box lies in another one."""
    (x, y, w, h), (ox, oy, ow, oh) = one, other
    return x >= ox and y >= oy and x + w <= ox + ow and y + h <= oy + oh


def apart(one: Rectangle, other: Rectangle) -> bool:
    """Say whether two boxes do not touch."""
    (x, y, w, h), (ox, oy, ow, oh) = one, other
    return x + w <= ox or ox + ow <= x or y + h <= oy or oy + oh <= y


@pytest.mark.slow
@pytest.mark.parametrize("name", MACHINES)
def test_boxes_hold_what_they_should(name: str, tmp_path: Path) -> None:
    drawing = ElementTree.fromstring(draw_svg(read_topology(MACHINES[name](tmp_path).root)))
    width, height = float(drawing.attrib["width"]), float(drawing.attrib["height"])
    boxes: list[Rectangle] = []
    for box in drawing.iter(f"{SVG}rect"):
        x, y, w, h = (float(box.attrib[key]) for key in ("x", "y", "width", "height"))
        boxes.append((x, y, w, h))
    assert all(inside(box, (0, 0, width, height)) for box in boxes)
    for one in boxes:
        for other in boxes:
            assert one is other or apart(one, other) or inside(one, other) or inside(other, one), (one, other)


def test_each_gpu_is_drawn_with_its_nics(tmp_path: Path) -> None:
    drawing = ElementTree.fromstring(draw_svg(read_topology(dgx_h100(tmp_path).root)))
    labels = [element.text or "" for element in drawing.iter(f"{SVG}text")]
    assert sum("GPU" in label and "\N{LEFT RIGHT ARROW} mlx5_" in label for label in labels) == 8


def test_odd_names_are_escaped(tmp_path: Path) -> None:
    tree = laptop(tmp_path)
    card = tree.pci("pci0000:00/0000:00:10.0", 0x8086, 0x1533, 0x020000)
    tree.netdev("<b>&amp;", card)
    drawing = ElementTree.fromstring(draw_svg(read_topology(tree.root)))
    assert any("<b>&amp;" in (element.text or "") for element in drawing.iter(f"{SVG}text"))


@pytest.mark.parametrize("name", MACHINES)
def test_a_saved_tree_looks_the_same_and_keeps_secrets(name: str, tmp_path: Path) -> None:
    tree = MACHINES[name](tmp_path / "tree")
    tree.write("proc/driver/nvidia/gpus/0000:1b:00.0/information", "Model: \t\t NVIDIA H100\nGPU UUID: \t GPU-secret")
    tree.write("proc/self/status", "Name:\tsecret\nCpus_allowed_list:\t0-3")
    copy = tmp_path / "copy"
    assert save_tree(tree.root, copy) > 20
    assert read_topology(copy) == read_topology(tree.root)
    files = [path for path in copy.rglob("*") if path.is_file() and not path.is_symlink()]
    assert not any("secret" in path.read_text() for path in files)
    with pytest.raises(FileExistsError):
        save_tree(tree.root, copy)


def test_the_text_says_what_is_unusual(tmp_path: Path) -> None:
    tree = dgx_h100(tmp_path)
    tree.allow("0-9")
    text = draw_text(read_topology(tree.root))
    assert "224 CPUs (10 allowed)" in text
    assert "GPU 4   mlx5_6; same switch; worker not pinned" in text
    assert "spare   mlx5_1 mlx5_2 mlx5_7" in text
    assert "RoCE (down, netdev enp170s0f1np1)" in text


@pytest.mark.parametrize(
    ("cpus", "text"), [((), "none"), ((3,), "3"), ((0, 1, 2, 3), "0-3"), ((0, 1, 4, 6, 7, 8), "0-1,4,6-8")]
)
def test_cpu_lists_as_linux_writes_them(cpus: tuple[int, ...], text: str) -> None:
    assert cpu_list(cpus) == text
