"""In every state of a job, every verb agrees with a real Slurm, or says what it does not know."""

import json
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from cookbook.cli.main import main
from cookbook.run.states import cell_states
from tests.slurm_cluster import SlurmCluster
from tests.slurm_installed import require_slurm
from tests.slurm_states import (
    LOG_LINE,
    PLANS,
    SETTINGS,
    States,
    one_node_cell,
    prepare,
    site_configuration,
)
from tests.submit import Answer
from tests.waiting import until

pytestmark = pytest.mark.slurm

# Whether Slurm knows the job ("known"), has forgotten it ("gone") or does not answer ("away");
# the job's state, which tests/slurm_states.py brings about, and Slurm's word for it; then what is
# said. `logs`: the line in the log, or why there is none. `logs -f` and `status --watch`: they go
# on, or end with this exit status. `cancel`: Slurm's state afterwards, that all has ended or is
# ending, or that Slurm does not answer.
TABLE = """\
when  | state                          | Slurm        | status, report               | logs               | logs -f | watch   | cancel
known | pending                        | PENDING      | queued: JobHeldUser          | JobHeldUser        | goes on | goes on | CANCELLED
known | starting                       | CONFIGURING  | queued                       | not started        | goes on | goes on | CANCELLED
known | prolog                         | RUNNING      | running                      | nothing is written | goes on | goes on | COMPLETING
known | running                        | RUNNING      | running                      | its line           | goes on | goes on | CANCELLED
known | suspended                      | SUSPENDED    | running: suspended (Slurm    | its line           | goes on | goes on | CANCELLED
known | completing, finished           | COMPLETING   | finished                     | its line           | 0       | 0       | ended
known | completing, failed             | COMPLETING   | running: Slurm: COMPLETING   | its line           | goes on | goes on | ending
known | completing, cancelled          | COMPLETING   | running: Slurm: COMPLETING   | its line           | goes on | goes on | ending
known | requeued                       | PENDING      | queued: BeginTime            | its line           | goes on | goes on | CANCELLED
known | requeued, held                 | SPECIAL_EXIT | queued: job requeued in held | its line           | goes on | goes on | CANCELLED
known | timed out                      | TIMEOUT      | failed: Slurm: TIMEOUT       | its line           | 0       | 1       | ended
known | cancelled by owner             | CANCELLED    | cancelled                    | its line           | 0       | 1       | ended
known | cancelled by administrator     | CANCELLED    | cancelled                    | its line           | 0       | 1       | ended
known | cancelled before start         | CANCELLED    | cancelled                    | not started        | 2       | 1       | ended
known | node lost                      | NODE_FAIL    | failed: Slurm: NODE_FAIL     | its line           | 0       | 1       | ended
known | node lost, requeued            | PENDING      | queued: BeginTime            | its line           | goes on | goes on | CANCELLED
known | finished                       | COMPLETED    | finished                     | its line           | 0       | 0       | ended
known | failed                         | FAILED       | failed: exit status 2        | its line           | 0       | 1       | ended
gone  | timed out                      | -            | failed: Slurm: TIMEOUT       | its line           | 0       | 1       | ended
gone  | timed out, unseen              | -            | failed: Slurm: TIMEOUT       | its line           | 0       | 1       | ended
gone  | cancelled by owner             | -            | cancelled                    | its line           | 0       | 1       | ended
gone  | cancelled, unseen              | -            | cancelled: SIGTERM           | its line           | 0       | 1       | ended
gone  | cancelled before start         | -            | cancelled                    | not started        | 2       | 1       | ended
gone  | cancelled before start, unseen | -            | failed: neither Slurm nor    | neither Slurm      | 2       | 1       | ended
gone  | node lost                      | -            | failed: Slurm: NODE_FAIL     | its line           | 0       | 1       | ended
gone  | node lost, unseen              | -            | failed: neither Slurm nor    | its line           | 0       | 1       | ended
gone  | finished                       | -            | finished                     | its line           | 0       | 0       | ended
gone  | failed, unseen                 | -            | failed: exit status 2        | its line           | 0       | 1       | ended
away  | pending, away                  | -            | queued: does not answer      | does not answer    | goes on | goes on | no answer
away  | running, away                  | -            | running: does not answer     | its line           | goes on | goes on | no answer
away  | cancelled, away                | -            | cancelled: does not answer   | its line           | goes on | goes on | no answer
away  | cancelled by owner             | -            | cancelled                    | its line           | 0       | 1       | ended
away  | finished                       | -            | finished                     | its line           | 0       | 0       | ended
"""  # noqa: E501


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    when: str
    state: str
    slurm: str
    said: str
    log: str
    follow: str
    watch: str
    cancel: str

    @property
    def word(self) -> str:
        return self.said.partition(": ")[0]

    @property
    def reason(self) -> str:
        return self.said.partition(": ")[2]


ROWS = [Row(*(part.strip() for part in line.split(" | "))) for line in TABLE.splitlines()[1:]]


Verb = Callable[..., Answer]


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> Iterator[States]:
    require_slurm()
    folder = tmp_path_factory.mktemp("s")
    settings = replace(SETTINGS, extra_conf=site_configuration(folder / "site"))
    with (
        pytest.MonkeyPatch.context() as environment,
        SlurmCluster.start(folder / "c", nodes=3, settings=settings) as cluster,
    ):
        for name in ("SLURM_CONF", "PATH"):
            environment.setenv(name, cluster.env[name])
        environment.setenv("COOKBOOK_RUNS", str(folder / "runs"))
        environment.setenv("COOKBOOK_PREFLIGHT", "nodes")
        yield prepare(cluster, one_node_cell(folder))


@pytest.fixture
def verb(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], states: States
) -> Verb:
    """Calls a verb as a user does, who leaves one that goes on after a few looks: Ctrl-C."""
    sleep = time.sleep
    waits = 0

    def wait(seconds: float) -> None:
        nonlocal waits
        # subprocess sleeps as well.
        if seconds < 1:
            sleep(seconds)
            return
        waits += 1
        if waits > 2:
            raise KeyboardInterrupt

    def call(*words: str) -> Answer:
        nonlocal waits
        waits = 0
        capsys.readouterr()
        with monkeypatch.context() as patched:
            patched.setattr(time, "sleep", wait)
            status = main(words)
        shown = capsys.readouterr()
        return Answer(status, shown.out, shown.err)

    return call


def test_the_table_holds_every_state() -> None:
    assert {row.state for row in ROWS} == set(PLANS)
    assert {row.when for row in ROWS} == {"known", "gone", "away"}


@pytest.mark.parametrize("asked", ["status", "logs", "follow", "report", "watch", "cancel"])
@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.when}-{row.state}")
def test_a_verb_says_what_is_so(
    states: States, verb: Verb, row: Row, asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    states.bring(row.when)
    is_patient = asked in ("follow", "watch")
    if row.when == "away" and is_patient:
        monkeypatch.setenv("SLURM_CONF", str(_impatient(states.cluster.conf)))
    assert states.slurm_says(row.state) == row.slurm
    before = time.monotonic()
    _CELLS[asked](states, verb, row)
    # Slurm's own commands try for 9 s and more, each; a busy machine needs some time too.
    assert row.when != "away" or is_patient or time.monotonic() - before < 6


def _impatient(conf: Path) -> Path:
    """A client's configuration: Slurm's commands wait for slurmctld as long as a message may."""
    path = conf.with_name("impatient.conf")
    path.write_text(conf.read_text() + "MessageTimeout=1\n")
    return path


def _status(states: States, verb: Verb, row: Row) -> None:
    run = states.runs[row.state]
    for log in filter(None, [run.cells[0].newest_log()]):
        log.touch()  # else, on a busy machine, it may be silent for over a minute
    said = verb("status", run.name)
    line = next(
        line for line in said.stdout.splitlines() if line.startswith(f"{run.cells[0].name} ")
    )
    pattern = rf"\S+ +{row.word} +job {states.job(row.state)}(?: +step 3/\d+)?(?:  +(.+))?"
    found = re.fullmatch(pattern, line.rstrip())
    assert found and said.status == 0, said
    _agrees(found[1], row)


def _report(states: States, verb: Verb, row: Row) -> None:
    said = verb("report", states.runs[row.state].name, "--format", "json")
    assert said.status == 0, said
    (cell,) = json.loads(said.stdout)["cells"]
    assert cell["status"] == row.word
    _agrees(cell["reason"], row)


def _agrees(reason: str | None, row: Row) -> None:
    assert row.reason in (reason or "") and bool(reason) == bool(row.reason), reason


def _logs(states: States, verb: Verb, row: Row) -> None:
    said = verb("logs", states.runs[row.state].name)
    if row.log == "its line":
        assert (said.status, said.stdout.strip()) == (0, LOG_LINE)
    else:
        assert said.status == 2 and f"has no log: {row.word}, " in said.stderr
        assert row.log in said.stderr and "Traceback" not in said.stderr


def _follow(states: States, verb: Verb, row: Row) -> None:
    said = verb("logs", states.runs[row.state].name, "-f")
    assert said.status == _end(row.follow), said
    assert said.stdout.strip() == (LOG_LINE if row.log == "its line" else "")


def _watch(states: States, verb: Verb, row: Row) -> None:
    run = states.runs[row.state]
    said = verb("status", run.name, "--watch")
    assert said.status == _end(row.watch), said
    first, *_ = said.stdout.splitlines()
    assert first.startswith(f"{run.cells[0].name}: {row.word}")
    assert ("unconfirmed" in first) == ("does not answer" in row.reason)
    # The report comes when all has ended, and not before.
    assert (f"# {run.name}" in said.stdout) == (row.watch != "goes on")


def _end(told: str) -> int:
    # That of Ctrl-C.
    return 130 if told == "goes on" else int(told)


def _cancel(states: States, verb: Verb, row: Row) -> None:
    run = states.runs[row.state]
    said = verb("cancel", run.name)
    if row.cancel == "ended":
        assert (said.status, said.stdout) == (0, f"{run.name}: all cells have ended already\n")
        assert states.slurm_says(row.state) == row.slurm
    elif row.cancel == "ending":
        words = "ended already, and Slurm is still clearing up"
        assert (said.status, said.stdout) == (0, f"{words}: {run.cells[0].name}\n")
        assert states.slurm_says(row.state) == "COMPLETING"
    elif row.cancel == "no answer":
        assert said.status == 1 and "nothing was cancelled: " in said.stderr
        assert not said.stdout
    else:
        assert (said.status, said.stdout) == (0, f"cancelled: {run.cells[0].name}\n")
        until(lambda: states.slurm_says(row.state) == row.cancel)
        (state,) = cell_states(run)
        assert (state.state == "cancelled") == (row.cancel == "CANCELLED")


_CELLS: dict[str, Callable[[States, Verb, Row], None]] = {
    "status": _status,
    "logs": _logs,
    "follow": _follow,
    "report": _report,
    "watch": _watch,
    "cancel": _cancel,
}
