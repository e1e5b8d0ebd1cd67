"""What fuzzing found, as small inputs; and the fuzzer itself: it finds a planted bug, and a seed repeats itself."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from decoders import DECODERS, Decoder  # beside this file, as for `make fuzz`
from mutation import changed
from run import FindingError, bounded, inputs_of, read_once

from asyncfabric.weights.plan.parts import StoredColumn, loaded

NESTED = b"\x81\xa1a" + b"\x91" * 100_000
FINDINGS = {
    "text that is no UTF-8, of an update": ("weights.message", b"\x81\xa4type\xa1\xff"),
    "deep nesting, of an update": ("weights.message", NESTED),
    "deep nesting, of a KvCache stream": ("kv.message", NESTED),
    "text that is no UTF-8, in a card": ("moe.card", b"\x81\xa3moe\xa4\xff\xff\xff\xff"),
    "deep nesting, in a card": ("moe.card", NESTED),
    "text that is no UTF-8, in a plan": ("weights.plan", b"\x9d\x01\x01\x01\x91\xa1\xff" + b"\x90" * 8),
    "half a surrogate pair in metadata": ("nixl.text", b"\xff"),
    "a size beyond all numbers": ("services.quantity", b"9" * 400),
    "deep nesting in settings": ("services.settings", b"a = " + b"[" * 10_000),
    "a number of 5000 digits in settings": ("services.settings", b"a = " + b"9" * 5000),
    "deep nesting in a prompt": ("services.prompt", b"\x91" * 100_000),
    "text that is no UTF-8, in a recording": ("observe.recording", b'{"name":"\xff"}'),
    "half a surrogate pair in a field": ("services.body", b'{"model":"open","prompt":"a","guided":"\\ud800"}'),
    "a long number in a field": ("services.body", b'{"model":"open","prompt":"a","guided":' + b"9" * 40 + b"}"),
}


@pytest.fixture(autouse=True)
def bounds() -> Iterator[None]:
    """An input that takes too long fails its test, and not the process."""
    with bounded():
        yield


@pytest.mark.parametrize("finding", FINDINGS)
def test_what_was_found_is_refused(finding: str) -> None:
    name, data = FINDINGS[finding]
    read_once(name, DECODERS[name], data)


def test_a_column_with_a_huge_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="does not have shape"):
        loaded(StoredColumn((1 << 63,), "<i8", bytes(8)))


@pytest.mark.parametrize("name", DECODERS)
def test_first_inputs_are_taken(name: str) -> None:
    assert all(read_once(name, DECODERS[name], data) for data in DECODERS[name].seeds())
    assert inputs_of(name, DECODERS[name])


def _planted(data: bytes) -> None:
    if data[:1] == b"A" and len(data) > 20:
        raise KeyError(data)


def test_a_planted_bug_is_found_and_a_seed_repeats_itself() -> None:
    decoder = Decoder(_planted, lambda: [b"B" * 8, b"CC"], (ValueError,))

    def first_finding() -> bytes:
        random, kept = Random(5), decoder.seeds()
        with pytest.raises(FindingError) as found:
            for _ in range(100_000):
                read_once("planted", decoder, changed(random, random.choice(kept), kept))
        return found.value.data

    assert first_finding() == first_finding()


def test_no_timer_is_left_behind() -> None:
    read_once("kv.message", DECODERS["kv.message"], b"")
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)
