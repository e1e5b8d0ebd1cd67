"""Texts of other processes on the way to a terminal or a log: none of their characters steers it. Pure.

Names, reasons and addresses come from nodes that need not be ours. A control character of one would move the cursor,
set a title or begin a line; a mark of direction would put text in another order than it has.
"""

from __future__ import annotations


def plain(text: str) -> str:
    """Return the text with each character that prints nothing of its own written out."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)
