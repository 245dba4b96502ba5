"""Scripts that are started by hand on a real Slurm: told to stop, failing, submitted again."""

import json
import re
import sys
import time
from pathlib import Path

import pytest

from tests.programs import PYTHON, write_program
from tests.saved import save
from tests.slurm_cluster import Settings, SlurmCluster
from tests.waiting import until

pytestmark = pytest.mark.slurm

CELL = "16b-bf16-standard"
OPTIONS = ("--parallelism.expert_parallel_degree=8", "--checkpoint.enable")
# Stands for torchrun: says what it does in DOES, by attempt, and makes "steps" of 0.2 s.
TORCHRUN = """#!/bin/bash
attempt="${COOKBOOK_ATTEMPT_DIR##*-}"
read -ra does <<<"${DOES}"
what="${does[attempt]:-end}"
echo "attempt ${attempt}: ${what}"
echo "{\\"step\\": $((attempt + 1)), \\"loss\\": 7.0}" >"${COOKBOOK_ATTEMPT_DIR}/metrics.jsonl"
[[ "${what}" == end ]] && exit 0
for i in {1..600}; do
  sleep 0.2
  if [[ "${what}" == stop && -e "${COOKBOOK_ATTEMPT_DIR}/stop" ]]; then
    echo "${SLURM_JOB_ID} ${i}" >"${COOKBOOK_ATTEMPT_DIR}/stopped"
    saved="${COOKBOOK_ATTEMPT_DIR%/*}/checkpoint/step-$((attempt + 1))"
    mkdir -p "${saved%/*}" && cp -r "${VENV}/saved" "${saved}"
    exit 0
  fi
done
"""


NODES = 2
# Slurm's own way to preempt: SIGTERM to the steps alone, and the end after a grace time.
SLURM_SETTINGS = Settings(
    extra_conf="PreemptType=preempt/partition_prio\nPreemptMode=REQUEUE\n"
    "PartitionName=DEFAULT Nodes=ALL GraceTime=20\n"
    "PartitionName=urgent PriorityTier=10 PreemptMode=OFF\n"
    "PartitionName=poor PreemptMode=CANCEL"
)


class ByHand:
    """`sbatch train_16b.sh` with a stand-in for torchrun, in a folder of runs of its own."""

    def __init__(self, slurm: SlurmCluster, checkout: Path, folder: Path) -> None:
        self.slurm, self.checkout, self.folder = slurm, checkout, folder
        binaries = folder / "venv" / "bin"
        write_program(binaries / "torchrun", TORCHRUN)
        write_program(binaries / "python", PYTHON)
        save(folder, 0, readers=8).rename(binaries.parent / "saved")

    @property
    def cell(self) -> Path:
        return self.folder / "runs" / "16b" / CELL

    def submit(self, does: str, *options: str, script: Path | None = None, **more: str) -> str:
        return self.slurm.submit(
            script or self.checkout / "train_16b.sh",
            *OPTIONS,
            options=["--nodes=1", *options],
            cwd=self.folder,
            env={
                "VENV": str(self.folder / "venv"),
                "COOKBOOK_RUNS": str(self.folder / "runs"),
                "DOES": does,
                "COOKBOOK_ROOT": str(self.checkout) if script else "",
                **more,
            },
        )

    def preempt(self) -> None:
        urgent = self.folder / "urgent.sh"
        urgent.write_text("#!/bin/bash\nsleep 2\n")
        options = ["--partition=urgent", f"--nodes={NODES}", "--exclusive", "--output=/dev/null"]
        self.slurm.submit(urgent, options=options, cwd=self.folder)

    def attempts(self) -> list[str]:
        """What each attempt did, in order."""
        logs = sorted(self.cell.glob("attempt-*/train.log"))
        said = "".join(log.read_text() for log in logs)
        return re.findall(r"attempt \d+: (\S+)", said)

    def until_attempts(self, did: list[str]) -> None:
        until(lambda: self.attempts() == did, log=self.log)

    def log(self) -> str:
        return "\n".join(path.read_text() for path in self.folder.glob("16b-*.log"))

    def status(self) -> str:
        return self.slurm.run(
            sys.executable,
            str(self.checkout / "submit.py"),
            "status",
            env={"COOKBOOK_RUNS": str(self.folder / "runs"), "VENV": sys.prefix},
        ).stdout


@pytest.fixture
def by_hand(small: SlurmCluster, checkout: Path, tmp_path: Path) -> ByHand:
    return ByHand(small, checkout, tmp_path)


@pytest.mark.parametrize(
    ("saved", "state", "attempts"),
    [
        pytest.param("step-1/.metadata", "COMPLETED", ["train", "end"], id="checkpoint"),
        pytest.param("step-1/__0_0.distcp", "RUNNING", ["train"], id="half-written"),
    ],
)
def test_a_step_that_takes_too_long_is_requeued_where_a_checkpoint_is(
    by_hand: ByHand, saved: str, state: str, attempts: list[str]
) -> None:
    script, text = by_hand.folder / "late.sh", (by_hand.checkout / "train_16b.sh").read_text()
    script.write_text(
        text.replace("    scheduler: slurm\n", "    scheduler: slurm\n    time: 00:00:08\n")
    )
    job = by_hand.submit("train end", script=script)
    by_hand.until_attempts(["train"])
    file = by_hand.cell / "checkpoint" / saved
    file.parent.mkdir(parents=True)
    file.touch()
    by_hand.slurm.run("scancel", "--batch", "--signal=USR1", job)
    # What must not be requeued has had the time for it.
    time.sleep(5)
    assert by_hand.slurm.wait(job, {state}) == state, by_hand.log()
    assert by_hand.attempts() == attempts


def test_a_job_that_cannot_be_requeued_says_how_to_go_on(by_hand: ByHand) -> None:
    job = by_hand.submit("stop end", "--no-requeue")
    by_hand.until_attempts(["stop"])
    by_hand.slurm.run("scancel", "--batch", "--signal=USR1", job)
    assert by_hand.slurm.wait(job, {"COMPLETED", "FAILED"}) == "FAILED"
    assert "stopped: could not be requeued" in by_hand.log()
    assert re.search(r"failed .*saved step \d+ and ended; stopped", by_hand.status())
    again = by_hand.submit("stop end")
    assert by_hand.slurm.wait(again) == "COMPLETED", by_hand.log()
    assert by_hand.attempts() == ["stop", "end"]


def test_two_jobs_do_not_train_in_one_folder(by_hand: ByHand) -> None:
    first = by_hand.submit("train")
    by_hand.until_attempts(["train"])
    second = by_hand.submit("train")
    assert by_hand.slurm.wait(second, {"FAILED", "COMPLETED"}) == "FAILED"
    assert f"job {first} trains here (running); wait for its end, or scancel" in by_hand.log()
    assert by_hand.attempts() == ["train"]
    assert "running" in by_hand.status()


def test_an_element_of_an_array_touches_no_other(by_hand: ByHand) -> None:
    script, text = by_hand.folder / "array.sh", (by_hand.checkout / "train_16b.sh").read_text()
    # The last element has the array's own number.
    own = f'export CELL_DIR="{by_hand.folder}/runs/a/${{SLURM_ARRAY_TASK_ID}}"'
    script.write_text(text.replace("set -euo pipefail\n", f"set -euo pipefail\n{own}\n", 1))
    job = by_hand.submit("stop end", "--array=0-1", script=script)
    first, last = by_hand.folder / "runs/a/0", by_hand.folder / "runs/a/1"

    def began(cell: Path) -> list[str]:
        logs = sorted(cell.glob("attempt-*/train.log"))
        return re.findall(r"attempt \d+: (\S+)", "".join(log.read_text() for log in logs))

    until(lambda: [began(first), began(last)] == [["stop"], ["stop"]], log=by_hand.log)
    by_hand.slurm.run("scancel", "--batch", "--signal=USR1", f"{job}_1")
    until(lambda: began(last) == ["stop", "end"], by_hand.log)
    assert began(first) == ["stop"]
    assert f"running  job {job}_0" in " ".join(by_hand.status().split(" ")).replace("   ", "  ")
    by_hand.slurm.run("scancel", "--batch", "--signal=USR1", f"{job}_0")
    until(lambda: began(first) == ["stop", "end"], by_hand.log)


@pytest.mark.parametrize(
    ("does", "partition", "said"),
    [
        ("stop", "main", ("saved", "asked to stop")),
        ("stop", "poor", ("saved", "asked to stop")),
        ("train", "main", ("stopped", "Slurm: PREEMPTED")),
    ],
)
def test_a_preemption_saves_in_the_grace_time_and_is_no_failure(
    by_hand: ByHand, does: str, partition: str, said: tuple[str, str]
) -> None:
    job = by_hand.submit(f"{does} end", f"--partition={partition}")
    by_hand.until_attempts([does])
    by_hand.preempt()
    assert by_hand.slurm.wait(job, {"COMPLETED", "FAILED"}, 150) == "COMPLETED", by_hand.log()
    # Nothing was trained in between, and nothing was counted.
    assert by_hand.attempts() == [does, "end"]
    assert by_hand.slurm.job_field(job, "Restarts") == "1"
    end = json.loads((by_hand.cell / "attempt-0/end.json").read_text())
    assert (end["cause"], end["reason"][: len(said[1])]) == said, by_hand.log()
    assert "(1 of " not in by_hand.log()


def test_a_preemption_while_nodes_are_checked_is_no_fault_of_theirs(by_hand: ByHand) -> None:
    began = by_hand.folder / "began"
    slow = f'[[ "$*" == *node_report* && ! -e {began} ]] && touch {began} && exec sleep 25\n'
    write_program(by_hand.folder / "venv/bin/python", PYTHON.replace("sh\n", f"bash\n{slow}"))
    job = by_hand.submit("end", COOKBOOK_PREFLIGHT="nodes")
    until(began.exists, by_hand.log)
    by_hand.preempt()
    until(lambda: by_hand.slurm.job_field(job, "Restarts") == "1", by_hand.log)
    # Slurm counts the restart before the job's last word.
    until((by_hand.cell / "attempt-0/end.json").exists, by_hand.log)
    end = json.loads((by_hand.cell / "attempt-0/end.json").read_text())
    assert (end["cause"], end["reason"]) == ("stopped", "Slurm: PREEMPTED"), by_hand.log()
    assert not (by_hand.folder / "runs/excluded.yaml").exists(), by_hand.log()
    by_hand.slurm.run("scancel", job)


def test_sigterm_to_a_step_without_a_preemption_restarts_it(by_hand: ByHand) -> None:
    job = by_hand.submit("train end")
    by_hand.until_attempts(["train"])
    by_hand.slurm.run("scancel", "--signal=TERM", job)
    assert by_hand.slurm.wait(job) == "COMPLETED", by_hand.log()
    assert "dead rank: a node got SIGTERM, and no preemption; restarted (1 of 10)" in by_hand.log()


def test_the_time_limit_is_no_end(by_hand: ByHand) -> None:
    # Slurm looks every 30 s and may signal 30 s early: at 60 not before the supervisor listens.
    job = by_hand.submit("stop end", "--time=00:02:00", "--signal=B:USR1@60")
    assert by_hand.slurm.wait(job, {"COMPLETED", "FAILED", "TIMEOUT"}, 250) == "COMPLETED"
    assert by_hand.attempts() == ["stop", "end"]
