"""A stand-in for torchrun: makes steps as fast as a test allows, and writes what training writes.

A checkpoint holds the number of steps that were made. The folder LIFE has the test's wishes: how
far to train (`pace`), faults of a node (`fault-NODE`), steps that a node does not see
(`stale-NODE`). What is not allowed goes into `wrong` there.
"""

import json
import os
import shutil
import sys
import time
from pathlib import Path

LIFE, NODE = Path(os.environ["LIFE"]), os.environ.get("SLURMD_NODENAME", "")
PARENT = os.getppid()
CELL, ATTEMPT = Path(os.environ["CELL_DIR"]), Path(os.environ["COOKBOOK_ATTEMPT_DIR"])
INTERVAL, KEPT = 3, 2
_ENDS = {"rank": "failed (exitcode: -9) local_rank: 0 (pid: 7) of binary"}
_ENDS["disk"] = (
    "[rank0]:Traceback (most recent call last):\n[rank0]:OSError: [Errno 28] No space left"
)
_ENDS["disk"] += " on device\n" + _ENDS["rank"].replace("-9", "1")


def said(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def wrong(words: str) -> None:
    with (LIFE / "wrong").open("a") as file:
        print(f"{ATTEMPT}: {words}", file=file)


def steps_in(folder: Path) -> list[int]:
    named = (one.parent.name[5:] for one in folder.glob("step-*/.metadata"))
    return sorted(int(name) for name in named if name.isdecimal())


def save(folder: Path, step: int) -> None:
    path = folder / f"step-{step}"
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(LIFE / "template", path, ignore=shutil.ignore_patterns(".metadata"))
    (path / "made").write_text(str(step))
    while said(LIFE / "fault-save") == "slow":
        time.sleep(0.02)
        if os.getppid() != PARENT:
            sys.exit(1)
    shutil.copy(LIFE / "template/.metadata", path)
    print("[rank0]:Finished saving the checkpoint (or staging)in 0.01 seconds.", flush=True)
    for old in steps_in(folder)[:-KEPT]:
        shutil.rmtree(folder / f"step-{old}")


def main() -> int:
    own = dict(word[2:].partition("=")[::2] for word in sys.argv if word.startswith("--"))
    folder, last = Path(own["checkpoint.folder"]), int(own["training.steps"])
    nodes = os.environ["TRAIN_NODES"].split(",")
    seen = [one for one in steps_in(folder) if str(one) not in said(LIFE / f"stale-{NODE}").split()]
    step = int(own.get("checkpoint.load_step", -1))
    step = max(seen, default=0) if step == -1 else step
    if step and said(folder / f"step-{step}" / "made") != str(step):
        wrong(f"loads step {step}, which is not whole")
    (ATTEMPT / f".{NODE}").write_text(str(step))
    (ATTEMPT / f".{NODE}").rename(ATTEMPT / f"loads-{NODE}")
    while len([*ATTEMPT.glob("loads-*")]) < len(nodes) and os.getppid() == PARENT:
        time.sleep(0.02)
    owner = f"{os.environ['SLURM_JOB_ID']} {os.environ.get('SLURM_RESTART_COUNT')}"
    if nodes[0] == NODE:
        known, _, other = said(CELL / "trains").rpartition(" ")
        if said(Path(f"/proc/{other or 0}/stat")).rpartition(")")[2][1:2] not in ("", "Z", "X"):
            wrong(f"job {owner} trains beside {known}")
        (CELL / "trains").write_text(f"{owner} {os.getpid()}")
    is_met = False  # ranks meet before the first step
    while os.getppid() == PARENT and not (ATTEMPT / "done").exists():
        time.sleep(0.02)
        fault = said(LIFE / f"fault-{NODE}")
        if fault in _ENDS:
            (LIFE / f"fault-{NODE}").unlink()
            if fault == "disk":
                half = folder / f"step-{step + 1}"
                shutil.copytree(LIFE / "template", half, ignore=shutil.ignore_patterns(".metadata"))
            print(_ENDS[fault], flush=True)
            return 1
        if nodes[0] != NODE or "hang" in [said(LIFE / f"fault-{node}") for node in nodes]:
            continue
        is_met = is_met or all((ATTEMPT / f"loads-{node}").exists() for node in nodes)
        if not is_met:
            continue
        if (ATTEMPT / "stop").exists() and (ATTEMPT / "metrics.jsonl").exists():
            save(folder, step)
            while said(LIFE / "fault-save") and os.getppid() == PARENT:
                time.sleep(0.02)
            (ATTEMPT / "stopped").write_text(f"{os.environ['SLURM_JOB_ID']} {step}\n")
            (ATTEMPT / "done").touch()
        elif step >= last:
            save(folder, step)
            (ATTEMPT / "done").touch()
        elif step < int(said(LIFE / "pace") or 0):
            step += 1
            loss = "nan" if fault == "nan" else float(step)
            line = {"step": step, "loss": loss, "grad_norm": 1.0, "time": time.time()}
            with (ATTEMPT / "metrics.jsonl").open("a") as file:
                print(json.dumps(line), file=file)
            if step % INTERVAL == 0 and fault != "nan":
                save(folder, step)
    return 0 if (ATTEMPT / "done").exists() else 1


if __name__ == "__main__":
    sys.exit(main())
