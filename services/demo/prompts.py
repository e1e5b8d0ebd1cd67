"""The prompts of the demo: pieces of Python's own help topics, real English text that is on every machine.

Lengths are chosen for the edges: one token, less than a page, an exact page boundary, several chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics

from asyncfabric_services.demo.settings import Job

TOPICS = ("execmodel", "naming", "exceptions", "objects", "specialnames", "strings")
SEPARATOR = "---"
CHARACTERS_PER_TOKEN = 16  # more than any tokenizer makes of English, so that a cut prompt is long enough


def default_lengths(page_tokens: int) -> tuple[int, ...]:
    """Return the lengths in tokens; one of them ends exactly on a page boundary for any page size."""
    boundary = max(1, 256 // page_tokens) * page_tokens
    return 1, 7, 100, boundary, 700, 1500


def jobs_of_lengths(lengths: Sequence[int]) -> list[Job]:
    """Return one prompt for each length in tokens, each from another topic."""
    return [
        Job(index, _text(TOPICS[index % len(TOPICS)], length * CHARACTERS_PER_TOKEN), length)
        for index, length in enumerate(lengths)
    ]


def jobs_of_file(path: Path) -> list[Job]:
    """Return the prompts of a text file, separated by lines `---`; raises ValueError when there is none."""
    prompts: list[list[str]] = [[]]
    for line in path.read_text().splitlines(keepends=True):
        if line.strip() == SEPARATOR:
            prompts.append([])
        else:
            prompts[-1].append(line)
    texts = ["".join(lines).strip() for lines in prompts]
    jobs = [Job(index, text) for index, text in enumerate(text for text in texts if text)]
    if not jobs:
        raise ValueError(f"{path} holds no prompt")
    return jobs


def _text(topic: str, characters: int) -> str:
    """Return text of `characters` characters that starts with one help topic and goes on with the others."""
    order = (topic, *(name for name in sorted(topics) if name != topic))
    text = ""
    for name in order:
        text += topics[name]
        if len(text) >= characters:
            break
    return text[:characters]
