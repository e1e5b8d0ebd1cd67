"""No files import each other in a circle, in the whole tree, with imports within functions too."""

from __future__ import annotations

from import_graph import graph_of, in_circles, python_files, reached


def test_no_files_import_each_other_in_a_circle() -> None:
    texts = python_files("asyncfabric", "asyncfabric") | python_files("services", "asyncfabric_services")
    assert len(texts) > 400, "the walk over the sources found next to nothing"
    assert in_circles(graph_of(texts)) == []


def test_the_check_follows_imports() -> None:
    texts = {
        "w.a": "from w.b import x\nfrom typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from w.d import t\n",
        "w.b": "def f():\n    from w import c\n",
        "w.c": "import w.d\n",
        "w.d": "try:\n    import w.e\nexcept ImportError:\n    from w.b import y\n",
        "w.e": "",
    }
    graph = graph_of(texts)
    assert reached(graph, "w.a", False) == {"w.b"}
    assert reached(graph, "w.a", True) == {"w.b", "w.c", "w.d", "w.e"}
    assert sorted(in_circles(graph)) == ["w.b", "w.c", "w.d"]
