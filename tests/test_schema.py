"""Dataclasses filled from YAML: what each type takes, and how a wrong key or value is named."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from cookbook.base.errors import InputError
from cookbook.base.schema import Unchecked, Words, fill, key_named
from cookbook.base.yamlfile import parse_yaml


@dataclass(frozen=True)
class Inner:
    image: str
    mounts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outer:
    name: str
    known: str
    count: int = 3
    size: float | None = None
    on: bool = False
    kind: Literal["slurm", "local"] = "local"
    texts: tuple[str, ...] = ()
    mapping: Unchecked = field(default_factory=Unchecked)
    words: Words = field(default_factory=Words)
    numbers: dict[str, float] = field(default_factory=dict)
    mappings: tuple[Unchecked, ...] = ()
    inner: Inner | None = None
    renamed: str | None = key_named("other", default=None)


def _fill(text: str, **given: Any) -> Outer:
    file = parse_yaml(text, Path("some.yaml"))
    return fill(Outer, file, beside=("section",), known="given", **given)


def test_absent_keys_get_their_defaults() -> None:
    assert _fill("name: a\ncount:\n") == Outer("a", "given")


def test_every_type_is_read() -> None:
    filled = _fill(
        "name: a\ncount: 4\nsize: 5\non: true\nkind: slurm\ntexts: [b, c]\nmapping: {d: [1]}\n"
        "words: {e: 3.10, f: 1_000, g: true, h: on, i: '7'}\nnumbers: {j: 1}\nmappings: [{k: 2}]\n"
        "inner: {image: x, mounts: [y]}\nother: z\nsection.key: 1\n"
    )
    assert filled == Outer(
        name="a",
        known="given",
        count=4,
        size=5.0,
        on=True,
        kind="slurm",
        texts=("b", "c"),
        mapping=Unchecked({"d": [1]}),
        # What a shell gets is what was typed: 3.1 is another version than 3.10.
        words=Words({"e": "3.10", "f": "1_000", "g": True, "h": "on", "i": "7"}),
        numbers={"j": 1},
        mappings=(Unchecked({"k": 2}),),
        inner=Inner("x", ("y",)),
        renamed="z",
    )
    assert isinstance(filled.size, float)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("count: 1", "some.yaml: name: is missing; set it to a text"),
        ("nmae: a", "some.yaml:1: nmae: unknown key 'nmae'; allowed: count, inner, kind, mapping"),
        ("nmae: a", "did you mean 'name'?"),
        ("name: a\nknown: b", "some.yaml:2: known: unknown key 'known'"),
        ("name: a\nrenamed: b", "some.yaml:2: renamed: unknown key 'renamed'"),
        ("name: a\nsections.key: 1", "unknown key 'sections.key'"),
        ("name: 16", "some.yaml:1: name: found the number 16, allowed: a text; put it in quotes"),
        ("name: true", "name: found true, allowed: a text; put it in quotes"),
        ("name: ''", "name: found the text '', allowed: a text"),
        ("name: [a]", "name: found a list, allowed: a text"),
        ("name: a\ncount: 0", "count: found the number 0, allowed: a whole number above 0"),
        ("name: a\ncount: true", "count: found true, allowed: a whole number above 0"),
        ("name: a\ncount: '4'", "count: found the text '4', allowed: a whole number above 0"),
        ("name: a\nsize: -1", "size: found the number -1, allowed: a number"),
        ("name: a\nsize: true", "size: found true, allowed: a number"),
        ("name: a\non: 1", "on: found the number 1, allowed: true or false"),
        ("name: a\nkind: slrum", "unknown value 'slrum'; allowed: local, slurm; did you mean"),
        ("name: a\nkind: [slurm]", "unknown value"),
        ("name: a\ntexts: a", "texts: found the text 'a', allowed: a list of texts"),
        ("name: a\ntexts: [1]", "texts: found a list, allowed: a list of texts"),
        ("name: a\ntexts: ['']", "texts: found a list, allowed: a list of texts"),
        ("name: a\nmapping: a", "mapping: found the text 'a', allowed: a mapping"),
        ("name: a\nwords: {a: [1]}", "allowed: a mapping of names to texts or numbers"),
        ("name: a\nwords: {a: null}", "allowed: a mapping of names to texts or numbers"),
        ("name: a\nnumbers: {a: b}", "allowed: a mapping of names to numbers"),
        ("name: a\nnumbers: {a: true}", "allowed: a mapping of names to numbers"),
        ("name: a\nmappings: [1]", "allowed: a list of mappings"),
        ("name: a\ninner: x", "inner: found the text 'x', allowed: a mapping"),
        ("name: a\ninner: {}", "inner.image: is missing; set it to a text"),
        ("name: a\ninner: {imag: x}", "some.yaml:2: inner.imag: unknown key 'imag'; allowed: imag"),
    ],
)
def test_a_wrong_key_or_value_is_named_with_what_is_allowed(text: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        _fill(text)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
