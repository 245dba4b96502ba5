"""Wrong text files are refused with their place."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from cookbook.base.errors import InputError
from cookbook.base.text_files import check_sources, find_sources


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"text": \n', "a.jsonl:2: is no line of JSON"),
        ("a.jsonl", b'{"content": "x"}\n', "a.jsonl:1: has no key 'text', found: content"),
        ("a.jsonl", b'["x"]\n', "a.jsonl:1: has no key 'text', found: list"),
        ("a.jsonl", b'{"text": 5}\n', "a.jsonl:1: text holds no text, found int"),
        ("a.jsonl", b"", "a.jsonl is empty"),
        ("a.jsonl", b"\n\n", "has no documents"),
        ("a.jsonl.gz", b"no gzip", "a.jsonl.gz: cannot be read"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "x"}\n' * 999, mtime=0)[:-9], "cannot be read"),
        ("a.parquet", b"no parquet", "is no Parquet file"),
        ("a.txt", b"x", "a.txt, allowed: .jsonl"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_broken_file_is_named_with_its_line(
    name: str, content: bytes, says: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError) as caught:
        check_sources([str(tmp_path / name)], "text")
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("patterns", "says"),
    [
        (["nothing/*.jsonl"], "'nothing/*.jsonl' matches no file"),
        ([], "is empty"),
        (["0.5:{}", "{}"], "has no weight and others have one"),
        (["0:{}", "1:{}"], "has weight 0"),
    ],
)
def test_wrong_patterns_are_refused(patterns: list[str], says: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "x"}\n')
    with pytest.raises(InputError) as caught:
        find_sources([pattern.format(path) for pattern in patterns])
    assert says in str(caught.value)


def test_a_folder_names_its_text_files(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.json.gz", "README.md"):
        (tmp_path / name).write_text('{"text": "x"}\n')
    (source,) = find_sources([str(tmp_path)])
    assert [file.name for file in source.files] == ["a.json.gz", "b.jsonl"]
