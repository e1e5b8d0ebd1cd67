"""FabricConfig and RailSpec: every bad value raises when it is made, naming itself and its bound."""

from __future__ import annotations

import dataclasses
from typing import Any
from urllib.parse import urlencode

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncfabric.config import FabricConfig, RailSpec

WORDS = st.text(
    st.characters(min_codepoint=33, max_codepoint=126, exclude_characters=":?&=+%;#"), min_size=1, max_size=12
)


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("local", RailSpec("local")),
        ("tcp:lo", RailSpec("tcp", "lo")),
        ("fault+local?seed=7&reorder=16", RailSpec("fault+local", "", (("seed", "7"), ("reorder", "16")))),
        ("efa:rdmap0s6-rdm?depth=2", RailSpec("efa", "rdmap0s6-rdm", (("depth", "2"),))),
    ],
)
def test_rails_are_parsed(text: str, spec: RailSpec) -> None:
    assert RailSpec.parse(text) == spec
    assert FabricConfig(rails=(text, spec)).rail_specs() == (spec, spec)


@pytest.mark.parametrize("text", ["", ":lo", "?a=b", "lo cal", "local?seed", "local?a=b&&c", " local", "local\n"])
def test_malformed_rails_are_named(text: str) -> None:
    with pytest.raises(ValueError, match="rail ") as caught:
        RailSpec.parse(text)
    assert repr(text) in str(caught.value)
    with pytest.raises(ValueError, match="rail "):
        FabricConfig(rails=("local", text))


@pytest.mark.parametrize("rail", ["shm", "shm:x?y=1", "fault+shm?seed=1"])
def test_the_shared_memory_of_libfabric_is_refused_and_local_named(rail: str) -> None:
    with pytest.raises(ValueError, match="'local', which connects the processes of one host"):
        FabricConfig(rails=(rail,))
    with pytest.raises(ValueError, match="name 'local'"):
        FabricConfig(require=("local", rail.partition(":")[0].partition("?")[0]))


@given(WORDS, st.one_of(st.just(""), WORDS), st.lists(st.tuples(WORDS, WORDS), max_size=4))
def test_rails_survive_their_text_form(provider: str, device: str, options: list[tuple[str, str]]) -> None:
    text = provider + (f":{device}" if device else "") + (f"?{urlencode(options)}" if options else "")
    assert RailSpec.parse(text) == RailSpec(provider, device, tuple(options))


@pytest.mark.slow
@given(st.text(max_size=40))
def test_any_text_is_a_rail_or_a_value_error(text: str) -> None:
    try:
        spec = RailSpec.parse(text)
    except ValueError as error:
        assert repr(text) in str(error)
    else:
        assert spec.provider


@pytest.mark.parametrize(
    ("field", "bad", "bound"),
    [
        ("rails", (), "1..32"),
        ("rails", ("local",) * 33, "1..32"),
        ("polling", "lazy", "adaptive"),
        *(
            (name, bad, "3600")
            for name in ("drain_deadline", "connect_deadline", "peer_deadline_network", "peer_deadline_host")
            for bad in (0, -1.0, 3601, float("nan"))
        ),
        ("spin_us", -1, "1e6"),
        ("spin_us", 2e6, "1e6"),
        ("max_ops", 0, "1048576"),
        ("max_ops", (1 << 20) + 1, "1048576"),
        ("stripe_bytes", -1, "0"),
        ("inline_bytes", -1, "0"),
        ("worker_cpu", -2, "-1"),
    ],
)
def test_bad_values_are_named_with_their_bound(field: str, bad: Any, bound: str) -> None:
    with pytest.raises(ValueError, match=field) as caught:
        FabricConfig(**{field: bad})
    shown = str(len(bad)) if field == "rails" else repr(bad)
    assert shown in str(caught.value) and bound in str(caught.value)


def test_rails_as_one_string_are_a_type_error() -> None:
    with pytest.raises(TypeError, match="'local'"):
        FabricConfig(rails="local")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        ("require", "tcp"),
        ("rails", None),
        ("rails", (5,)),
        ("drain_deadline", "5"),
        ("spin_us", None),
        ("max_ops", 10.5),
        ("max_ops", True),
        ("stripe_bytes", "64k"),
        ("worker_cpu", "0"),
    ],
)
def test_values_of_another_kind_are_named(field: str, bad: Any) -> None:
    shown = repr(bad[0] if isinstance(bad, tuple) else bad) if bad is not None else "NoneType"
    with pytest.raises(TypeError, match="rail" if field == "rails" else field) as caught:
        FabricConfig(**{field: bad})
    assert shown in str(caught.value)


@given(
    st.floats(min_value=1e-6, max_value=3600),
    st.integers(min_value=1, max_value=1 << 20),
    st.integers(min_value=0, max_value=1 << 40),
    st.floats(min_value=0, max_value=1e6),
)
def test_values_within_their_bounds_are_taken(seconds: float, count: int, size: int, spin: float) -> None:
    config = FabricConfig(
        drain_deadline=seconds,
        peer_deadline_host=seconds,
        max_ops=count,
        stripe_bytes=size,
        spin_us=spin,
    )
    assert dataclasses.replace(config) == config


def test_a_configuration_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        FabricConfig().max_ops = 3  # type: ignore[misc]


def test_a_requirement_that_no_rail_meets_is_reported_at_once() -> None:
    with pytest.raises(ValueError, match=r"require permits \['efa'\], but rails are of \['tcp', 'local'\]"):
        FabricConfig(rails=("tcp:lo", "local"), require=("efa",))
    assert FabricConfig(rails=("tcp", "local"), require=("efa", "tcp")).require == ("efa", "tcp")


def test_rails_are_chosen_by_default() -> None:
    assert FabricConfig().automatic
    assert FabricConfig().rail_specs() == ()
    assert not FabricConfig(rails=("local",)).automatic


@pytest.mark.parametrize("rails", [("auto", "tcp:lo"), ("tcp:lo", "auto")])
def test_rails_may_be_named_beside_those_that_are_chosen(rails: tuple[str, ...]) -> None:
    config = FabricConfig(rails=rails, require=("local", "tcp", "verbs"))
    assert config.automatic
    assert config.rail_specs() == (RailSpec("tcp", "lo"),)


def test_auto_is_named_once() -> None:
    with pytest.raises(ValueError, match="once"):
        FabricConfig(rails=("auto", "auto"))


@pytest.mark.parametrize("secret", [b"", b"fifteen bytes..", bytes(4097)])
def test_a_secret_of_a_wrong_length_is_refused_without_showing_it(secret: bytes) -> None:
    with pytest.raises(ValueError, match=r"secret must have 16\.\.4096 bytes") as caught:
        FabricConfig(secret=secret)
    assert "fifteen" not in str(caught.value)


@pytest.mark.parametrize("secret", [17, bytearray(32), ["x"]])
def test_a_secret_is_bytes_or_a_path(secret: Any) -> None:
    with pytest.raises(TypeError, match="secret must be bytes or the path of a file"):
        FabricConfig(secret=secret)


def test_a_secret_is_not_shown() -> None:
    assert "only for peers" not in repr(FabricConfig(secret=b"only for peers of ours"))
