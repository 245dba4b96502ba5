"""What a node starts for the test of the network: its ranks' places in their team, how they end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cookbook.supervise import links_node
from cookbook.supervise.links_node import ENDED, LinksQuestion

# Stands in for a rank: notes where it was placed, then ends as the plan says.
RANK = """
import json, os, sys, time
from pathlib import Path
plan = json.loads(sys.argv[1])
names = "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "COOKBOOK_TEAM"
local = os.environ["LOCAL_RANK"]
Path(plan["folder"], local).write_text(json.dumps([os.environ[name] for name in names]))
end = plan["ends"][int(local)]
if end == "hang":
    time.sleep(60)
time.sleep(end.get("after", 0))
print(end.get("said", ""), file=sys.stderr)
sys.exit(end["status"])
"""
WELL = {"status": 0}


def said(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *ends: object,
    limit_s: float = 30,
) -> str:
    """What worker-3, the second node of the second team, says of ranks that end so."""
    (tmp_path / "stand_in_rank.py").write_text(RANK)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("SLURMD_NODENAME", "worker-3")
    monkeypatch.setattr(links_node, "_COLLECTIVES", "stand_in_rank")
    (tmp_path / "ranks").mkdir()
    links_node.main(
        LinksQuestion(
            teams=[["worker-0", "worker-1", "worker-4"], ["worker-2", "worker-3"]],
            addresses=["10.0.0.1", "10.0.0.2"],
            ports=[7001, 7002],
            ranks_per_node=len(ends),
            plan={"folder": str(tmp_path / "ranks"), "ends": ends},
            limit_s=limit_s,
        )
    )
    mark, _, answer = capsys.readouterr().out.partition(" ")
    found = json.loads(answer)
    assert (mark, found["node"]) == (ENDED, "worker-3")
    return str(found["said"])


def test_ranks_are_numbered_through_their_own_team(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said(tmp_path, monkeypatch, capsys, WELL, WELL) == ""
    placed = [json.loads((tmp_path / f"ranks/{local}").read_text()) for local in (0, 1)]
    assert placed == [
        ["2", "0", "4", "10.0.0.2", "7002", "1"],
        ["3", "1", "4", "10.0.0.2", "7002", "1"],
    ]


@pytest.mark.parametrize(
    ("end", "words"),
    [
        ({"status": 3}, "local rank 1: exit status 3"),
        ({"status": 1, "said": "a\nDistError: no route\n  at b"}, "local rank 1: DistError: no r"),
    ],
)
def test_a_rank_that_fails_is_told_although_another_hangs(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    end: dict[str, object],
    words: str,
) -> None:
    assert said(tmp_path, monkeypatch, capsys, "hang", end).startswith(words)


def test_one_that_ends_well_does_not_speak_for_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    late = {"status": 4, "after": 0.5}
    assert said(tmp_path, monkeypatch, capsys, WELL, late) == "local rank 1: exit status 4"


def test_a_rank_that_does_not_end_in_time_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said(tmp_path, monkeypatch, capsys, WELL, "hang", limit_s=1) == "no end in time"
