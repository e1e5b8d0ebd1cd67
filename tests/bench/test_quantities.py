"""Sizes and durations with units, and what the command does with wrong ones."""

from __future__ import annotations

import pytest

from asyncfabric_services.quantities import format_size, parse_duration, parse_size


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("64KiB", 65536),
        ("1.5MiB", 1572864),
        ("1MB", 1_000_000),
        ("64K", 65536),
        ("2GiB", 2 << 30),
        ("17", 17),
        ("8 B", 8),
    ],
)
def test_sizes(text: str, value: int) -> None:
    assert parse_size(text) == value


@pytest.mark.parametrize("text", ["", "KiB", "-1", "64XiB", "1.5", "1e3", "64KiB1"])
def test_wrong_sizes_are_refused_with_their_text(text: str) -> None:
    with pytest.raises(ValueError, match="not a"):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "value"), [("30s", 30.0), ("250ms", 0.25), ("2m", 120.0), ("1.5h", 5400.0), ("5", 5.0)]
)
def test_durations(text: str, value: float) -> None:
    assert parse_duration(text) == pytest.approx(value)


@pytest.mark.parametrize("text", ["", "s", "-3s", "3 weeks"])
def test_wrong_durations_are_refused_with_their_text(text: str) -> None:
    with pytest.raises(ValueError, match="is not a duration"):
        parse_duration(text)


def test_sizes_are_shown_exactly() -> None:
    assert [format_size(value) for value in (17, 4096, 65536, 3 << 20, 1 << 30, 4097)] == [
        "17 B",
        "4 KiB",
        "64 KiB",
        "3 MiB",
        "1 GiB",
        "4097 B",
    ]
