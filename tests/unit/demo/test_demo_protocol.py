"""Prompts as bodies of offers, prompts of given lengths and of files."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncfabric_services.demo.pair.protocol import decode_prompt, encode_prompt
from asyncfabric_services.demo.prompts import default_lengths, jobs_of_file, jobs_of_lengths


@settings(deadline=None)
@given(tokens=st.lists(st.integers(0, 1 << 31), max_size=200))
def test_a_prompt_travels_as_the_body_of_an_offer(tokens: list[int]) -> None:
    assert decode_prompt(encode_prompt(tokens), len(tokens)) == tokens


@pytest.mark.parametrize("body", [b"", b"\xc1", b"hello", encode_prompt([1, 2])[:-1], b"\x92\xa1a\x01"])
def test_a_body_that_is_no_prompt_is_refused(body: bytes) -> None:
    with pytest.raises(ValueError, match=r"the body of the offer is no prompt"):
        decode_prompt(body, 2)


def test_a_prompt_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match=r"the offer is for 3 tokens, its prompt has 2"):
        decode_prompt(encode_prompt([1, 2]), 3)


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
