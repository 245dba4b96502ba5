"""In: YAML texts, right and wrong. Out: values with their lines, or one message that says where."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cookbook.base.errors import InputError
from cookbook.base.yamlfile import Key, parse_yaml, read_keys, read_yaml, shown_path


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
        ("!!str 5", "5"),
        ("!!int '5'", 5),
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
        ("a: 1\n---\nb: 2", "some.yaml:2:1: YAML syntax: expected a single document"),
        ("a: !thing x", "some.yaml:1: YAML tag '!thing' is not allowed here"),
        ("a: !python/name [x]", "some.yaml:1: YAML tag '!python/name' is not allowed here"),
        ("a: !!python/object/apply:os.system [x]", "some.yaml:1: YAML tag 'tag:yaml.org,2002:pyt"),
        ("a: !!int four", "some.yaml:1: found 'four', allowed: a number"),
        ("a: " + "9" * 5000, "some.yaml:1: found '9999999"),
        ("a: &x [*x]", "an alias holds itself"),
        ("a: *x", "some.yaml:1:4: YAML syntax: "),
        ("a: \x00", "some.yaml: YAML syntax: "),
        ("[1]: 2", "some.yaml:1: keys must be plain names"),
        ("a: &x {b: 1}\n<<: *x", "some.yaml:2: keys must be plain names"),
        ("{a: 1", "YAML syntax"),
        ("%YAML 3.0\n---\na: 1", "YAML syntax"),
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


SCHEMA = {
    "name": Key(required=True),
    "count": Key("int", default=3),
    "size": Key("number"),
    "on": Key("bool", default=False),
    "kind": Key(choices=("slurm", "local")),
    "texts": Key("texts", default=[]),
    "mapping": Key("mapping"),
    "scalars": Key("scalars"),
    "numbers": Key("numbers"),
    "mappings": Key("mappings"),
}


def test_absent_keys_get_their_defaults() -> None:
    read = read_keys(parse_yaml("name: a\ncount:\n", Path("some.yaml")), SCHEMA)
    assert read["name"] == "a"
    assert (read["count"], read["on"], read["texts"], read["size"]) == (3, False, [], None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("count: 1", "some.yaml: name: is missing; set it to a text"),
        ("nmae: a", "some.yaml:1: nmae: unknown key 'nmae'; allowed: "),
        ("nmae: a", "did you mean 'name'?"),
        ("name: 16", "some.yaml:1: name: found the number 16, allowed: a text; put it in quotes"),
        ("name: true", "name: found true, allowed: a text; put it in quotes"),
        ("name: ''", "name: found the text '', allowed: a text"),
        ("name: [a]", "name: found a list, allowed: a text"),
        ("name: a\ncount: 0", "count: found the number 0, allowed: a whole number above 0"),
        ("name: a\ncount: true", "count: found true, allowed: a whole number above 0"),
        ("name: a\ncount: '4'", "count: found the text '4', allowed: a whole number above 0"),
        ("name: a\nsize: -1", "size: found the number -1, allowed: a number"),
        ("name: a\non: 1", "on: found the number 1, allowed: true or false"),
        ("name: a\nkind: slrum", "unknown value 'slrum'; allowed: local, slurm; did you mean"),
        ("name: a\ntexts: a", "texts: found the text 'a', allowed: a list of texts"),
        ("name: a\ntexts: [1]", "texts: found a list, allowed: a list of texts"),
        ("name: a\nmapping: a", "mapping: found the text 'a', allowed: a mapping"),
        ("name: a\nscalars: {a: [1]}", "allowed: a mapping of names to texts or numbers"),
        ("name: a\nnumbers: {a: b}", "allowed: a mapping of names to numbers"),
        ("name: a\nnumbers: {a: true}", "allowed: a mapping of names to numbers"),
        ("name: a\nmappings: [1]", "allowed: a list of mappings"),
    ],
)
def test_a_wrong_key_or_value_is_named_with_what_is_allowed(text: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        read_keys(parse_yaml(text, Path("some.yaml")), SCHEMA)
    assert message in str(caught.value)
