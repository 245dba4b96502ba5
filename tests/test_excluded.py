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
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The list, in a folder of runs of the test's own."""
    monkeypatch.setenv("COOKBOOK_RUNS", str(tmp_path))
    return tmp_path / "excluded.yaml"


def test_a_node_is_left_out_until_its_entry_expires(path: Path) -> None:
    assert read_excluded() == []
    path.write_text(
        "worker-1:\n  until: 2020-01-01\n  reason: old\n"
        "worker-2:\n  until: 2999-01-01   # for ever\n"
    )
    exclude_nodes({"worker-7": "GPU 3: # 'a' \"b\" \\ \x07\nsecond line"}, hours=24)
    found = {one.node: one for one in read_excluded()}
    assert {node: one.reason for node, one in found.items()} == {
        "worker-2": "no reason",
        "worker-7": "GPU 3: # 'a' \"b\" \\   second line",
    }
    assert abs(found["worker-7"].until - time.time() - 24 * 3600) <= 60
    text = path.read_text()
    day = datetime.fromtimestamp(found["worker-7"].until, UTC).strftime("%Y-%m-%d %H:%M")
    assert f"worker-7:\n  until: {day}\n" in text and "worker-1" not in text
    assert text.startswith("#") and "delete its entry" in text


def test_a_node_is_never_left_out_for_a_shorter_time_than_before(path: Path) -> None:
    for reason, hours, expected in (("ECC", 24, "ECC"), ("disk", 1, "ECC"), ("new", 48, "new")):
        exclude_nodes({"worker-1": reason}, hours=hours)
        assert [one.reason for one in read_excluded()] == [expected]


def test_a_link_to_a_shared_list_stays_a_link(path: Path, tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    path.symlink_to(tmp_path / "shared/excluded.yaml")
    exclude_nodes({"worker-1": "ECC"}, hours=1)
    assert path.is_symlink() and "worker-1" in (tmp_path / "shared/excluded.yaml").read_text()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("worker-1: until tomorrow\n", r"excluded.yaml:1: worker-1: found the text"),
        ("worker-1:\n  until: tomorrow\n", r"excluded.yaml:2: worker-1.until: .* 2027-01-31 18:00"),
        ("worker-1:\n  reason: no time\n", r"worker-1.until: found nothing"),
        ("worker-1: [\n", "YAML syntax"),
    ],
)
def test_a_broken_list_is_not_overwritten(path: Path, text: str, message: str) -> None:
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        read_excluded()
    with pytest.raises(InputError, match=message):
        exclude_nodes({"worker-2": "ECC"}, hours=1)
    assert path.read_text() == text


def test_writers_at_the_same_time_lose_nothing(path: Path) -> None:
    code = (
        "import sys\nfrom cookbook.run.excluded import exclude_nodes\n"
        "for k in range(8):\n    exclude_nodes({f'worker-{sys.argv[1]}-{k}': 'ECC'}, hours=1)\n"
    )
    writers = [
        subprocess.Popen([sys.executable, "-c", code, str(number)], cwd=ROOT) for number in range(4)
    ]
    assert [writer.wait() for writer in writers] == [0] * 4
    assert len(read_excluded()) == 32


def test_the_choice_leaves_out_what_slurm_knows() -> None:
    nodes = [f"worker-{number}" for number in range(4)]
    listed = [Excluded("worker-1", 50.0, "a"), Excluded("worker-3", 20.0, "b")]
    elsewhere = Excluded("elsewhere", 9.0, "c")
    assert choose(2, nodes, [*listed, elsewhere]) == Choice(("worker-3", "worker-1"))
    # Too few: the one that is back first is not left out, and the job begins then.
    assert choose(3, nodes, listed) == Choice(("worker-1",), 20.0, 1)
    assert choose(4, nodes, listed) == Choice((), 50.0, 2)
    # The partition never had as many: sbatch will refuse that.
    assert choose(5, nodes, listed) == Choice(("worker-3", "worker-1"))
