"""What reading bytes from outside raises when they are not what they should be; one tuple for all decoders.

msgspec's own errors are not all: it lets a UnicodeDecodeError out for text that is no UTF-8 and a RecursionError for
deep nesting; json and tomllib raise ValueError also for numbers of thousands of digits, numpy OverflowError for shapes.
A decoder that catches less than this ends whoever serves a peer, instead of refusing the peer's bytes.
"""

from __future__ import annotations

from typing import Final

import msgspec

UNREADABLE: Final = (msgspec.MsgspecError, ValueError, RecursionError, OverflowError)
"""ValueError holds UnicodeDecodeError, JSONDecodeError, TOMLDecodeError and binascii.Error."""
