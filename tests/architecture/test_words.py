"""Words that have been replaced by the field's own do not come back, in names or in prose."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from house_tree import CXX, CYTHON, ROOT, shown, source_files

INSTEAD = {
    "helm": "engine lock",
    "stairwell": "completion dispatcher",
    "crew": "copy pool",
    "warden": "key revoker",
    "cemetery": "ended-connection table",
    "desk": "admission, handler, queue or store",
    "station": "worker",
    "scene": "fixture, scenario or setup",
    "seating": "rank assignment",
    "attendance": "participants",
    "retelling": "re-report",
    "story": "scenario",
    "landings": "slots or targets",
    "lift": "data path",
    "stairs": "control path",
    "hall": "common",
    "paying": "cost rule",
    **dict.fromkeys(("told", "tells", "telling"), "report, notify, order or distinguish, in the form that fits"),
    **dict.fromkeys(("retold", "untold"), "report"),
    **dict.fromkeys(("hear", "heard", "hearing", "unheard"), "receive, or learn of"),
    **dict.fromkeys(("say", "said", "saying", "unsaid"), "send, state or report"),
    "tell": "report, notify, order or distinguish; asks and tells of actors are right",
}
TELL = re.compile(
    r"""
    (\.|\bdef\ |\bself\._?)tell\(        # the call of a reference to an actor, and of a file
    | `[\w.]*tell(\([^`]*\))?`           # its name in prose
    | ["']tell["']                        # its name among others
    """,
    re.VERBOSE,
)
"""Where `tell` is the word of actors: to send without waiting for an answer."""
PROGRAM = re.compile(r"\bHelm\b|\bhelm (?=install|template)|--print helm|[\"']helm[\"']|\bhelm(?=[_-]python)")
"""Where Helm is the program of that name: in prose, in its command, and among what is printed."""
PARTS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")


def replaced_words(text: str) -> Iterator[tuple[int, str]]:
    """Yield line and word, where a word of the table is a part of a name or stands by itself."""
    for number, line in enumerate(text.splitlines(), 1):
        for part in PARTS.findall(PROGRAM.sub("", TELL.sub("", line))):
            word = part.lower()
            if word in INSTEAD or word.removesuffix("s") in INSTEAD:
                yield number, word


def test_replaced_words_do_not_come_back() -> None:
    pages = sorted((ROOT / "docs").rglob("*.md"))
    files = [path for path in source_files(".py", ".pyi", ".md", *CXX, *CYTHON) if path.name != "test_words.py"]
    found = [
        f"{shown(path)}:{number}: {word}; say {INSTEAD.get(word) or INSTEAD[word.removesuffix('s')]}"
        for path in (*files, *pages, ROOT / "README.md", ROOT / "CONTRIBUTING.md")
        for number, word in (*replaced_words(path.read_text()), *replaced_words(path.name))
    ]
    assert found == []


@pytest.mark.parametrize("text", ["the helm", "class CopyDesk:", "local_crew_test", "STATIONS = 3", "open_scene("])
def test_the_check_finds_them_in_names(text: str) -> None:
    assert list(replaced_words(text))


def test_the_check_lets_longer_words_be() -> None:
    assert not list(replaced_words("a stationary obscene desktop and the screw"))


def test_the_check_finds_messages_that_talk() -> None:
    for text in ("it is told apart", "verdict_told", "kMostSayings", "heard_ns", "cannot tell why", "watchers.tell"):
        assert list(replaced_words(text)), text


def test_the_check_knows_the_program() -> None:
    assert not list(replaced_words("Helm renders it: `up --print helm`, then helm install; from helm_python.chart"))
    assert list(replaced_words("the helm is held"))


def test_the_check_knows_the_actors_word() -> None:
    assert not list(replaced_words("await reference.tell(Stop())  # `tell` and `Reference.tell` wait for no answer"))
