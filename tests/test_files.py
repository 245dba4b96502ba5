"""What is written is written whole: a reader sees the old content or the new one."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from cookbook.base.files import write_whole


def test_who_reads_while_it_is_written_sees_the_old_content(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file"
    write_whole(path, "old, and long\n")
    with path.open() as reader:
        assert reader.read(3) == "old"
        write_whole(path, b"new\n", mode=0o755)
        assert reader.read() == ", and long\n"
    assert path.read_text() == "new\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o755
    assert list(path.parent.iterdir()) == [path]


def test_what_cannot_be_written_leaves_what_was_there_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_whole(path, "old\n")
    with pytest.raises(UnicodeEncodeError):
        write_whole(path, "no text: \ud800")
    assert path.read_text() == "old\n"
    assert list(tmp_path.iterdir()) == [path]
