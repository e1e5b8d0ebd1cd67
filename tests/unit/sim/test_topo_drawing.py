"""Pictures and saved trees of `asyncfabric topo`: boxes hold what they should, copies look alike, secrets stay."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from machines import MACHINES, dgx_h100, laptop

from asyncfabric.observe.nvlink import SAVED_AS, NvLinks, links_of, read_nvlinks
from asyncfabric.observe.topology import read_topology
from asyncfabric_services.topo.labels import cpu_list
from asyncfabric_services.topo.snapshot import save_tree
from asyncfabric_services.topo.svg import draw_svg
from asyncfabric_services.topo.text import draw_text

pytest.importorskip("asyncfabric._native._engine", reason="THE DRAWINGS WERE NOT TESTED: `make build`")

SVG = "{http://www.w3.org/2000/svg}"
Rectangle = tuple[float, float, float, float]


def svg_of(root: Path) -> str:
    """Return the picture of a tree."""
    return draw_svg(read_topology(root), read_nvlinks(root))


def text_of(address: str, peers: list[str], up: int = 18) -> dict[str, Any]:
    """Return what NVML reports of a GPU with 18 links to switches."""
    links = [{"up": number < up, "to": "switch" if number < up else ""} for number in range(18)]
    return {"address": address, "links": links, "peers": peers}


def inside(one: Rectangle, other: Rectangle) -> bool:
    """State whether a box lies in another one."""
    (x, y, w, h), (ox, oy, ow, oh) = one, other
    return x >= ox and y >= oy and x + w <= ox + ow and y + h <= oy + oh


def apart(one: Rectangle, other: Rectangle) -> bool:
    """State whether two boxes do not touch."""
    (x, y, w, h), (ox, oy, ow, oh) = one, other
    return x + w <= ox or ox + ow <= x or y + h <= oy or oy + oh <= y


@pytest.mark.slow
@pytest.mark.parametrize("name", MACHINES)
def test_boxes_hold_what_they_should(name: str, tmp_path: Path) -> None:
    drawing = ElementTree.fromstring(svg_of(MACHINES[name](tmp_path).root))
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
    drawing = ElementTree.fromstring(svg_of(dgx_h100(tmp_path).root))
    labels = [element.text or "" for element in drawing.iter(f"{SVG}text")]
    assert sum("GPU" in label and "\N{LEFT RIGHT ARROW} mlx5_" in label for label in labels) == 8


def test_odd_names_are_escaped(tmp_path: Path) -> None:
    tree = laptop(tmp_path)
    card = tree.pci("pci0000:00/0000:00:10.0", 0x8086, 0x1533, 0x020000)
    tree.netdev("<b>&amp;", card)
    drawing = ElementTree.fromstring(svg_of(tree.root))
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


def test_the_text_states_what_is_unusual(tmp_path: Path) -> None:
    tree = dgx_h100(tmp_path)
    tree.allow("0-9")
    text = draw_text(read_topology(tree.root), read_nvlinks(tree.root))
    assert "224 CPUs (10 allowed)" in text
    assert "GPU 4   mlx5_6; same switch; worker not pinned" in text
    assert "spare   mlx5_1 mlx5_2 mlx5_7" in text
    assert "RoCE (down, netdev enp170s0f1np1)" in text


@pytest.mark.parametrize(
    ("cpus", "text"), [((), "none"), ((3,), "3"), ((0, 1, 2, 3), "0-3"), ((0, 1, 4, 6, 7, 8), "0-1,4,6-8")]
)
def test_cpu_lists_as_linux_writes_them(cpus: tuple[int, ...], text: str) -> None:
    assert cpu_list(cpus) == text


def test_nvlinks_are_drawn_counted_and_saved(tmp_path: Path) -> None:
    tree = dgx_h100(tmp_path / "tree")
    addresses = [gpu.place.address for gpu in read_topology(tree.root).gpus]
    stated = [
        text_of(address, [other for other in addresses if other != address], up=17 if index == 3 else 18)
        for index, address in enumerate(addresses)
    ]
    tree.write(SAVED_AS, json.dumps(stated))
    text = draw_text(read_topology(tree.root), read_nvlinks(tree.root))
    assert "NVLink 17 of 18 up  <-> mlx5_5" in text
    assert "  GPU 0   17 to GPU 3; 18 to GPU 1 2 4 5 6 7 over switches" in text
    assert "NVLink 18 of 18 up" in svg_of(tree.root)
    copy = tmp_path / "copy"
    save_tree(tree.root, copy)
    assert read_nvlinks(copy) == read_nvlinks(tree.root)


def test_nvlinks_without_a_switch_lead_where_they_lead() -> None:
    a, b, c = "0000:1b:00.0", "0000:43:00.0", "0000:52:00.0"
    links = links_of(
        [
            {"address": c, "links": [{"up": True, "to": a}], "peers": [a]},
            {"address": a, "links": [{"up": True, "to": b}, {"up": True, "to": b}, {"up": True, "to": c}], "peers": []},
            {"address": b, "links": [{"up": True, "to": a}, {"up": True, "to": a}, {"up": False, "to": ""}]},
        ]
    )
    assert links.between == ((0, 2, 1), (2, 0, 0), (1, 0, 0))
    assert [(gpu.links, gpu.up, gpu.switched) for gpu in links.gpus] == [(3, 3, False), (3, 2, False), (1, 1, False)]


def test_a_switch_that_the_driver_denies_leads_nowhere() -> None:
    links = links_of([text_of("0000:1b:00.0", []), text_of("0000:43:00.0", ["0000:1b:00.0"])])
    assert links.between == ((0, 0), (18, 0))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.sampled_from(["switch", "a", "b", "up"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["address", "links", "peers", "up", "to"]), inner, max_size=5)
    ),
    max_leaves=20,
)


@given(st.lists(json_values, max_size=5))
def test_links_of_anything_are_counted_or_left_out(stated: list[Any]) -> None:
    links = links_of(stated)
    assert len(links.between) == len(links.gpus) and all(len(row) == len(links.gpus) for row in links.between)
    assert all(0 <= gpu.up <= gpu.links for gpu in links.gpus)


def test_a_machine_without_a_driver_has_no_links(tmp_path: Path) -> None:
    assert read_nvlinks(tmp_path) == NvLinks((), ())
    (tmp_path / SAVED_AS).write_text("{")
    assert read_nvlinks(tmp_path) == NvLinks((), ())
