"""YAML files are read as YAML 1.2, each value with its line; what is wrong is one message."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cookbook.base.errors import InputError
from cookbook.base.yamlfile import parse_yaml


def _read(text: str) -> dict[str, Any]:
    return dict(parse_yaml(text, Path("some.yaml")).content)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("1_000", 1000),
        ("12:00:00", "12:00:00"),
        ("2026-02-01", "2026-02-01"),
        ("007", "007"),
        ("0x1F", "0x1F"),
        ("FALSE", False),
        ("", None),
        ("\u0665", "\u0665"),
        ("[1, a, {b: 2}]", [1, "a", {"b": 2}]),
    ],
)
def test_scalars(text: str, value: Any) -> None:
    read = _read(f"key: {text}")["key"]
    assert read == value and type(read) is type(value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1, 2", "some.yaml:2:1: YAML syntax: while parsing a flow sequence"),
        ("a: b: c", "some.yaml:1:5: YAML syntax: mapping values are not allowed"),
        ("a: 1\na: 2", "some.yaml:2: a: stands twice, first in line 1"),
        ("- a", "some.yaml: found a list at the top, allowed: a mapping"),
        ("a: 1\n---\nb: 2", "some.yaml:2:1: YAML syntax: expected a single document"),
        ("a: !thing x", "some.yaml:1:4: YAML syntax: could not determine a constructor"),
        ("[1]: 2", "some.yaml:1: keys must be plain names"),
    ],
)
def test_a_broken_file_is_one_message_with_its_place(text: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        _read(text)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_keys_know_their_lines_and_numbers_what_was_typed() -> None:
    text = "a: &x {b: 3.10, c: '1.10', d: true}\n\ne:\n  f:\n    g: 2\nh: *x\n"
    file = parse_yaml(text, Path("some.yaml"))
    assert file.place("e", "f", "g") == "some.yaml:5: e.f.g"
    assert file.place("missing") == "some.yaml: missing"
    assert file.place() == "some.yaml"
    assert file.content["h"] == {"b": 3.1, "c": "1.10", "d": True}
    assert [file.texts.get(("a", key)) for key in "bcd"] == ["3.10", None, "true"]
    assert _read("# nothing\n") == {}
