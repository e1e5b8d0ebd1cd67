"""Messages between decode and prefill survive being cut and shuffled; prompts are what they say."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncfabric_services.demo.pair.protocol import FRAGMENT_BYTES, Assembler, Lease, Refusal, fragments
from asyncfabric_services.demo.prompts import default_lengths, jobs_of_file, jobs_of_lengths


def make_lease(number: int, tokens: int) -> Lease:
    chance = random.Random(tokens)
    prompt = [chance.randrange(128000) for _ in range(tokens)]
    return Lease(number, prompt, [3, 1, 2], 9, b"key", b"context", 17, b"{}", "digest", 1.5)


@settings(deadline=None)
@given(lengths=st.lists(st.integers(0, 5000), min_size=1, max_size=4), seed=st.integers())
def test_fragments_of_several_messages_may_come_in_any_order(lengths: list[int], seed: int) -> None:
    leases = [make_lease(number, length) for number, length in enumerate(lengths)]
    payloads = [payload for lease in leases for payload in fragments(lease)]
    assert all(len(payload) <= FRAGMENT_BYTES + 64 for payload in payloads)
    random.Random(seed).shuffle(payloads)
    assembler = Assembler()
    whole = [message for payload in payloads if (message := assembler.add(payload)) is not None]
    assert sorted(whole, key=lambda message: message.id) == leases


def test_a_refusal_is_one_payload() -> None:
    (payload,) = fragments(Refusal(4, "no"))
    assert Assembler().add(payload) == Refusal(4, "no")


@pytest.mark.parametrize("junk", [b"", b"\xc1", b"hello", b"\x94\x00\x00\x01"])
def test_junk_is_refused(junk: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        Assembler().add(junk)


@pytest.mark.parametrize("page_tokens", [1, 7, 16, 64, 300])
def test_one_default_prompt_ends_on_a_page_boundary_and_one_has_one_token(page_tokens: int) -> None:
    lengths = default_lengths(page_tokens)
    assert 1 in lengths
    assert lengths[3] % page_tokens == 0
    assert max(lengths) >= 1500
    for job in jobs_of_lengths(lengths):
        assert len(job.text) > job.tokens


def test_prompt_files_are_split_at_dashes(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("one\nmore\n---\n\ntwo\n---\n")
    assert [job.text for job in jobs_of_file(path)] == ["one\nmore", "two"]
    path.write_text("---\n \n")
    with pytest.raises(ValueError, match="holds no prompt"):
        jobs_of_file(path)
