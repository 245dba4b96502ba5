"""The list of nodes to leave out: read, edited by people, written by several jobs at once."""

from __future__ import annotations

import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

from cookbook.base.errors import InputError
from cookbook.base.paths import ROOT
from cookbook.run.excluded import Choice, Excluded, choose, exclude_nodes, read_excluded


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COOKBOOK_RUNS", str(tmp_path / "runs"))
    return tmp_path / "runs"


def _write(runs: Path, text: str) -> Path:
    runs.mkdir(exist_ok=True)
    path = runs / "excluded.yaml"
    path.write_text(text)
    return path


def _names() -> list[str]:
    return [one.node for one in read_excluded()]


def test_a_node_is_left_out_with_its_reason_and_an_expiry(runs: Path) -> None:
    assert read_excluded() == []
    before = time.time()
    exclude_nodes({"worker-7": "GPU 3: 2 uncorrectable ECC errors"}, hours=24)
    (found,) = read_excluded()
    assert (found.node, found.reason) == ("worker-7", "GPU 3: 2 uncorrectable ECC errors")
    assert before + 24 * 3600 - 60 <= found.until <= time.time() + 24 * 3600
    text = (runs / "excluded.yaml").read_text()
    day = datetime.fromtimestamp(found.until, UTC).strftime("%Y-%m-%d %H:%M")
    assert f"worker-7:\n  until: {day}\n" in text
    assert text.startswith("#") and "delete its entry" in text


def test_an_expired_entry_counts_no_more_and_goes_at_the_next_writing(runs: Path) -> None:
    path = _write(runs, "worker-1:\n  until: 2020-01-01 00:00\n  reason: old\n")
    assert read_excluded() == []
    exclude_nodes({"worker-2": "new"}, hours=1)
    assert _names() == ["worker-2"]
    assert "worker-1" not in path.read_text()


def test_what_people_write_stays(runs: Path) -> None:
    path = _write(
        runs,
        "# ours\nworker-1:\n  until: 2020-01-01\n  reason: old\n\n"
        "# the second rack is moved\nworker-2:\n  until: 2999-01-01   # for ever\n",
    )
    exclude_nodes({"worker-3": "gone: # 'a' \"b\" \\ \x07\nsecond line"}, hours=1)
    text = path.read_text()
    assert text.startswith("# ours\n\n# the second rack is moved\nworker-2:\n  until: 2999-01-01 ")
    found = {one.node: one.reason for one in read_excluded()}
    assert found["worker-3"] == "gone: # 'a' \"b\" \\   second line"
    assert found["worker-2"] == "no reason"
    # An entry that somebody deletes is gone.
    path.write_text(text.replace("worker-2:\n  until: 2999-01-01   # for ever\n", ""))
    assert _names() == ["worker-3"]


def test_a_node_is_never_left_out_for_a_shorter_time_than_before(runs: Path) -> None:
    exclude_nodes({"worker-1": "ECC"}, hours=24)
    exclude_nodes({"worker-1": "full disk"}, hours=1)
    (found,) = read_excluded()
    assert found.reason == "ECC" and found.until > time.time() + 23 * 3600
    exclude_nodes({"worker-1": "again"}, hours=48)
    (found,) = read_excluded()
    assert found.reason == "again"


def test_a_link_to_a_shared_list_stays_a_link(runs: Path, tmp_path: Path) -> None:
    runs.mkdir()
    (tmp_path / "shared").mkdir()
    (runs / "excluded.yaml").symlink_to(tmp_path / "shared/excluded.yaml")
    exclude_nodes({"worker-1": "ECC"}, hours=1)
    assert (runs / "excluded.yaml").is_symlink()
    assert "worker-1" in (tmp_path / "shared/excluded.yaml").read_text()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("worker-1: until tomorrow\n", r"excluded.yaml:1: worker-1: found the text"),
        ("worker-1:\n  until: tomorrow\n", r"excluded.yaml:2: worker-1.until: .* 2027-01-31 18:00"),
        ("worker-1:\n  reason: no time\n", r"worker-1.until: found nothing"),
        ("worker-1: [\n", "YAML syntax"),
    ],
)
def test_a_mistake_is_named_and_the_file_is_not_overwritten(
    runs: Path, text: str, message: str
) -> None:
    path = _write(runs, text)
    with pytest.raises(InputError, match=message):
        read_excluded()
    with pytest.raises(InputError, match=message):
        exclude_nodes({"worker-2": "ECC"}, hours=1)
    assert path.read_text() == text


def test_writers_at_the_same_time_lose_nothing(runs: Path) -> None:
    code = (
        "import sys\nfrom cookbook.run.excluded import exclude_nodes\n"
        "for k in range(8):\n    exclude_nodes({f'worker-{sys.argv[1]}-{k}': 'ECC'}, hours=1)\n"
    )
    writers = [
        subprocess.Popen([sys.executable, "-c", code, str(number)], cwd=ROOT) for number in range(4)
    ]
    assert [writer.wait() for writer in writers] == [0] * 4
    assert len(_names()) == 32


def test_a_writer_that_was_killed_stops_no_other(runs: Path) -> None:
    runs.mkdir()
    (runs / ".excluded.yaml.lock").touch()
    exclude_nodes({"worker-1": "ECC"}, hours=1)
    assert _names() == ["worker-1"]
    assert not (runs / ".excluded.yaml.lock").exists()


def test_the_choice_leaves_out_what_slurm_knows() -> None:
    nodes = [f"worker-{number}" for number in range(4)]
    listed = [Excluded("worker-1", 50.0, "a"), Excluded("worker-3", 20.0, "b")]
    assert choose(2, nodes, [*listed, Excluded("elsewhere", 9.0, "c")]) == Choice(
        ("worker-3", "worker-1")
    )
    # Too few: the one that is back first is not left out, and the job begins then.
    assert choose(3, nodes, listed) == Choice(("worker-1",), 20.0, 1)
    assert choose(4, nodes, listed) == Choice((), 50.0, 2)
    # The partition never had as many: that is for sbatch to say.
    assert choose(5, nodes, listed) == Choice(("worker-3", "worker-1"))
