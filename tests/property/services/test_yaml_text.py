"""Whatever JSON holds is written as YAML that PyYAML reads back, text that looks like something else too."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

yaml = pytest.importorskip("yaml", reason="PyYAML is the reader to compare with")

from asyncfabric_services.launch.kubernetes.yaml_text import Template, yaml_documents, yaml_text  # noqa: E402

TEXT = st.text(st.characters(exclude_categories=["Cs"])) | st.sampled_from(
    ["no", "On", "~", "1e3", "0x1f", "a: b", "- a"]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)


@given(VALUES)
@example({"a": [], "b": {}, "c": [[], [{"d": [1]}]], "y": "n"})
@example({"a": 1e-7, "b": 1e22})
def test_what_is_written_is_read_back(value: Any) -> None:
    assert yaml.safe_load(yaml_text(value)) == value


@given(st.lists(st.dictionaries(TEXT, VALUES, min_size=1, max_size=3), min_size=1, max_size=3))
def test_documents_are_read_back_in_order(values: list[Any]) -> None:
    assert list(yaml.safe_load_all(yaml_documents(values))) == values


def test_templates_are_written_as_they_are_and_all_else_is_quoted() -> None:
    value = {"count": Template("{{ .Values.count }}"), "text": "{{ plain }}"}
    text = yaml_text(value, quoted=lambda text: text.replace("{{", "<<"))
    assert text == 'count: {{ .Values.count }}\ntext: "<< plain }}"\n'
