"""YAML texts, right and wrong: values with their lines, or one message that says where."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cookbook.base.errors import InputError
from cookbook.base.yamlfile import parse_yaml, read_yaml, shown_path


def _read(text: str, name: str = "some.yaml") -> Any:
    return parse_yaml(text, Path(name)).content


@pytest.mark.parametrize(
    ("text", "value"),
    [
        # YAML 1.2, so that nothing surprises: 1.1 reads some of these otherwise.
        ("1e-4", 1e-4),
        ("1e-8", 1e-8),
        ("1E5", 1e5),
        ("1.5e3", 1500.0),
        (".5", 0.5),
        ("1.", 1.0),
        ("-1", -1),
        ("+3", 3),
        ("0", 0),
        ("1_000", 1000),
        ("12:00:00", "12:00:00"),
        ("2026-02-01", "2026-02-01"),
        ("on", "on"),
        ("No", "No"),
        ("yes", "yes"),
        ("007", "007"),
        ("0x1F", "0x1F"),
        ("true", True),
        ("FALSE", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("'1'", "1"),
        ('"true"', "true"),
        ("-", [None]),
        ("a b", "a b"),
        (".inf", ".inf"),
        ("[1, a, {b: 2}]", [1, "a", {"b": 2}]),
    ],
)
def test_scalars(text: str, value: Any) -> None:
    read = _read(f"key: {text}" if not text.startswith("-\n") and text != "-" else f"key:\n {text}")
    assert read["key"] == value
    assert type(read["key"]) is type(value)


def test_every_key_knows_its_line() -> None:
    file = parse_yaml("a: 1\n\nb:\n  c:\n    d: 2\n", Path("some.yaml"))
    assert file.place("a") == "some.yaml:1: a"
    assert file.place("b", "c", "d") == "some.yaml:5: b.c.d"
    assert file.place("missing") == "some.yaml: missing"
    assert file.place() == "some.yaml"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1, 2", "some.yaml:2:1: YAML syntax: while parsing a flow sequence"),
        ("a: 'x", "some.yaml:1:"),
        ("a:\n\t- b", "some.yaml:2:1: YAML syntax: while scanning"),
        ("a: b: c", "some.yaml:1:5: YAML syntax: mapping values are not allowed"),
        ("a: 1\na: 2", "some.yaml:2: a: stands twice, first in line 1"),
        ("s:\n  a: 1\n  a: 2", "some.yaml:3: s.a: stands twice, first in line 2"),
        ("- a", "some.yaml: found a list at the top, allowed: a mapping"),
        ("just text", "some.yaml: found the text 'just text' at the top"),
        ("5", "some.yaml: found the number 5 at the top"),
        ("a: 1\n---\nb: 2", "some.yaml:2: a second document starts; keep one"),
        ("a: !thing x", "some.yaml:1: YAML tag '!thing' is not allowed; write the plain value"),
        ("a: !python/name [x]", "some.yaml:1: YAML tag '!python/name' is not allowed"),
        ("a: !!python/object/apply:os.system [x]", "some.yaml:1: YAML tag '!!python/object/ap"),
        # They would turn `yes` into false, and a path into nothing.
        ("a: !!bool yes", "some.yaml:1: YAML tag '!!bool' is not allowed; write the plain value"),
        ("a: !!null /data", "some.yaml:1: YAML tag '!!null' is not allowed"),
        ("a: !!int four", "some.yaml:1: YAML tag '!!int' is not allowed"),
        ("a: !!str 5", "some.yaml:1: YAML tag '!!str' is not allowed"),
        ("!!str a: 5", "some.yaml:1: keys must be plain names"),
        ("a: " + "9" * 5000, "some.yaml:1: found '9999999"),
        ("a: &x [*x]", "some.yaml:1: alias *x has no complete value above it"),
        ("a: *x", "some.yaml:1: alias *x has no complete value above it"),
        ("a: \x00", "some.yaml: YAML syntax: "),
        ('a: "x\\0y"', "some.yaml:1: the character U+0000 is not allowed"),
        ('a: "\\e[31m"', "some.yaml:1: the character U+001B is not allowed"),
        ('"a\\0": 1', "some.yaml:1: keys must be plain names"),
        ("[1]: 2", "some.yaml:1: keys must be plain names"),
        ("a: &x {b: 1}\n<<: *x", "some.yaml:2: keys must be plain names"),
        ("{a: 1", "YAML syntax"),
        ("%YAML 3.0\n---\na: 1", "YAML syntax"),
        ("a: " + "[" * 5000, "some.yaml:1: nested more than 20 levels deep"),
        ("a: " + "[" * 100_000, "some.yaml:1: nested more than 20 levels deep"),
        ("a: " + "{b: " * 5000, "some.yaml:1: nested more than 20 levels deep"),
        ("\n".join(" " * n + "a:" for n in range(3000)), "nested more than 20 levels deep"),
    ],
)
def test_what_is_no_yaml_for_us_is_one_line_with_its_place(text: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        _read(text)
    assert message in str(caught.value)
    assert str(caught.value).startswith("some.yaml")
    assert "\n" not in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "latin.yaml").write_bytes("a: \xe9".encode("latin-1"))
    for path, message in [
        (tmp_path / "missing.yaml", "No such file"),
        (tmp_path, "Is a directory"),
        (tmp_path / "latin.yaml", "is not UTF-8 text"),
    ]:
        with pytest.raises(InputError, match=message) as caught:
            read_yaml(path)
        assert str(caught.value).startswith(str(path))


def test_an_empty_file_is_an_empty_mapping() -> None:
    assert _read("") == {}
    assert _read("# nothing\n") == {}


def test_a_path_is_shown_as_a_user_would_type_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert shown_path(tmp_path / "here" / "a.yaml") == "a.yaml"
    assert shown_path(tmp_path / "a.yaml") == str(tmp_path / "a.yaml")


def test_aliases_that_multiply_are_refused_at_once() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    for level in range(1, 30):
        items = ", ".join([f"*a{level - 1}"] * 9)
        lines.append(f"a{level}: &a{level} [{items}]")
    # Expanded, they would fill any memory.
    with pytest.raises(InputError, match="more than 10,000 values, aliases included"):
        _read("\n".join(lines))


def test_an_alias_stands_for_the_value_above() -> None:
    file = parse_yaml("a: &x {b: [1, 2]}\nc: *x\nd: &y 5\ne: *y\n", Path("some.yaml"))
    assert file.content == {"a": {"b": [1, 2]}, "c": {"b": [1, 2]}, "d": 5, "e": 5}
    # What an alias stands for has no line of its own: that of its key is the nearest.
    assert file.place("c", "b") == "some.yaml:2: c.b"


def test_what_was_typed_is_kept() -> None:
    file = parse_yaml("a: {b: 3.10, c: 1_000, d: '1.10', e: true}\n", Path("some.yaml"))
    assert file.content["a"] == {"b": 3.1, "c": 1000, "d": "1.10", "e": True}
    assert [file.texts.get(("a", key)) for key in "bcde"] == ["3.10", "1_000", None, "true"]


@pytest.mark.parametrize("text", ["\u0665", "\u00b2", "\uff11", "1\u0665"])
def test_digits_of_other_scripts_are_texts(text: str) -> None:
    assert _read(f"a: {text}") == {"a": text}
