"""Page arithmetic of the demo: what is pushed and what is waited for agree for any prompt, page and chunk size."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch", reason="the runner needs torch")
pytest.importorskip("transformers", reason="the runner needs transformers")

from asyncfabric_services.demo.pair.layout import KvLayout
from asyncfabric_services.runner.runner import chunks

FIELDS: dict[str, Any] = {
    "layers": 3,
    "kv_heads": 2,
    "head_dim": 4,
    "page_tokens": 16,
    "dtype": "float32",
    "vocabulary": 256,
    "weights": "abc",
}
OTHER = {"dtype": "bfloat16", "weights": "abd", "order": "NHD"}


@settings(deadline=None)
@given(total=st.integers(1, 700), page_tokens=st.integers(1, 65), chunk=st.integers(0, 300))
def test_every_page_is_pushed_once_and_only_when_complete(total: int, page_tokens: int, chunk: int) -> None:
    layout = KvLayout(**(FIELDS | {"page_tokens": page_tokens}))
    pushed: list[int] = []
    for start, end in chunks(total, chunk or total):
        pages = layout.pages_to_push(start, end, total)
        if end < total:
            assert all((page + 1) * page_tokens <= end for page in pages)
        pushed.extend(pages)
    assert pushed == list(range(layout.pages_for(total)))
    assert layout.expected_arrivals(total) == layout.layers * len(pushed) + 1


@pytest.mark.parametrize("name", KvLayout.__struct_fields__)
def test_a_differing_field_is_named_and_changes_the_digest(name: str) -> None:
    ours = KvLayout(**FIELDS)
    theirs = msgspec.structs.replace(ours, **{name: OTHER.get(name, 77)})
    assert ours.digest() != theirs.digest()
    assert (ours.difference(theirs) or "").startswith(f"{name}: ")


def test_equal_layouts_have_no_difference() -> None:
    ours, theirs = KvLayout(**FIELDS), KvLayout(**FIELDS)
    assert ours.difference(theirs) is None
    assert ours.digest() == theirs.digest()


def test_page_bytes() -> None:
    assert KvLayout(**FIELDS).page_bytes == 2 * 2 * 16 * 4 * 4
    assert KvLayout(**(FIELDS | {"dtype": "bfloat16"})).page_bytes == 2 * 2 * 16 * 4 * 2


@pytest.mark.parametrize(
    ("field", "value"), [("layers", 0), ("kv_heads", -1), ("page_tokens", 0), ("dtype", "int8"), ("vocabulary", 0)]
)
def test_bad_layouts_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{field} must be"):
        KvLayout(**(FIELDS | {field: value}))


@pytest.mark.parametrize("span", [(0, 0, 5), (3, 2, 5), (-1, 2, 5), (0, 6, 5)])
def test_bad_spans_are_refused(span: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="0 <= start < end <= total"):
        KvLayout(**FIELDS).pages_to_push(*span)
