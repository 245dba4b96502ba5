"""Run a job's cells, attempt after attempt until each cell has ended, and write their status."""

import contextlib
import ctypes
import errno
import os
import secrets
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import FrameType
from typing import Any, NoReturn

from cookbook.base.errors import InputError, JobError
from cookbook.base.files import write_whole
from cookbook.base.yamlfile import shown_path
from cookbook.config.cluster import cluster_from_record
from cookbook.config.facts import facts_of
from cookbook.run import own_job, slurm, status
from cookbook.run.folder import Attempt, CellFolder
from cookbook.run.own_job import log
from cookbook.run.record import CellRecord, earlier_record, read_record
from cookbook.run.states import process_job
from cookbook.run.status import FAILED, FINISHED, QUEUED, RUNNING, AttemptEnd, Cause, Status
from cookbook.supervise import exits
from cookbook.supervise.attempt import RunningAttempt, Timeouts, end_orphan_step
from cookbook.supervise.exits import GO_ON, Action, Decision
from cookbook.supervise.preflight import RequeueNeededError, head_address, preflight
from cookbook.supervise.resume_point import note_saved, prepare
from cookbook.supervise.script import cell_environment, write_script

_POLL_S = 2.0
# Seconds to wait for Slurm to end a requeued job, which it normally does at once.
_REQUEUE_S = 120.0
# Seconds to wait if the disk is full, so that attempts do not fail in quick succession.
_FULL_DISK_S = 10.0
# Slurm sends SIGUSR1 before the time limit and, if so configured, before a preemption.
_ASKS = (signal.SIGUSR1, signal.SIGUSR2)
_STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_SIGNALS = (*_STOPS, *_ASKS)
# As what a preemption with a grace time shows, if its SIGTERM ends the step.
_PREEMPTED = (Cause.DEAD_RANK, Cause.ERROR, Cause.BAD_NODES)
_PREEMPTED_S = 10.0  # seconds between two questions whether a preemption goes on
_MOST_SPAWNS = 5
_PR_SET_PDEATHSIG = 1


class SignalReceivedError(BaseException):
    """The job received a stop signal while an attempt was being prepared.

    Not an Exception: the `except Exception` for damaged checkpoints must not catch it.
    """


class Supervisor:
    """Run the cells in order.

    A requeued job starts from the top: it skips finished cells, and runs the next attempt of cells
    that failed or were interrupted.
    """

    timeouts = Timeouts()
    # Seconds that saving and exiting may take after Slurm's warning; 0 means no limit.
    late_s = 0.0

    def __init__(self, cells: Sequence[CellFolder]) -> None:
        # Resolve links: `runs` may be a link, but a container mounts only the cell's real folder.
        self.cells = [CellFolder(cell.path.resolve()) for cell in cells]
        self.running: RunningAttempt | None = None
        self.signal_number = 0
        self.is_time_over = self._is_preparing = False
        records = filter(None, map(earlier_record, self.cells))
        schedulers = (str(record.profile.get("scheduler", "local")) for record in records)
        os.environ[own_job.SCHEDULER_VARIABLE] = next(schedulers, "local")
        # Each cell has its own environment, which starts from the job's.
        self._job = dict(os.environ)

    def __setstate__(self, state: dict[str, Any]) -> NoReturn:
        # An earlier version of the cookbook pickled this object, for jobs that may still wait.
        log("this run was submitted by an earlier version: python submit.py run --resume RUN")
        sys.exit(2)

    def __call__(self) -> NoReturn:
        """Run the cells; exit with 0, a failed cell's status, or 128 plus the signal's number."""
        if own_job.slurm_job():
            run_with_respawn(self._run)
        sys.exit(self._run())

    def _run(self) -> int:
        for number in _STOPS:
            signal.signal(number, self._stop)
        for number in _ASKS:
            signal.signal(number, self._ask_to_stop)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        return self.supervise()

    def supervise(self) -> int:
        cells, codes = self.cells, dict[str, int]()
        job_id, began, in_slurm = own_job.job_id(), time.time(), own_job.slurm_job() is not None
        for cell in cells:
            # Record this job if the submitter was killed before it did so.
            if not cell.job.exists():
                status.write_job(cell, job_id if in_slurm else process_job(int(job_id)))
        for cell in cells:
            if status.read_status(cell).state in (FINISHED, status.REFUSED):
                continue
            job = status.read_job(cell)
            if job and in_slurm and job.job_id != job_id:
                # Another job is recorded: the cell was submitted again before this job began.
                log(f"{cell.path}: job {job.job_id} trains here, so this one leaves it alone")
                codes[cell.name] = 1
            elif self.signal_number:
                state, why = own_job.stop_reason(self._signal_name, began)
                reason = f"the allocation ended before its turn ({why})"
                reason = "cancelled before it started" if state == status.CANCELLED else reason
                # If Slurm requeues this job, the cell stays queued: the job will run it then.
                if state != QUEUED:
                    now = replace(status.read_status(cell), state=status.CANCELLED, reason=reason)
                    now = replace(now, exit_code=None, restarts=own_job.restarts())
                    status.write_status(cell, now)
            else:
                try:
                    codes[cell.name] = self._run_cell(cell)
                except FileNotFoundError:
                    if cell.record.exists():
                        raise
                    log(f"{cell.path} was deleted, so its end is not recorded")
                    self.running, codes[cell.name] = None, 1
        if self.signal_number:
            return 128 + self.signal_number
        failed = {name: code for name, code in codes.items() if code}
        if failed:
            log(f"failed: {', '.join(failed)}")
        return next(iter(failed.values()), 0)

    @property
    def _signal_name(self) -> str:
        return signal.Signals(self.signal_number).name

    def _run_cell(self, cell: CellFolder) -> int:
        try:
            record = read_record(cell.record)
            if record.command is None:
                remedy = "python submit.py run --resume RUN, or render the script again"
                found = "was written by an earlier version of the cookbook"
                raise InputError(shown_path(cell.record), found, remedy)
            environment = cell_environment(record, self._job)
        except InputError as error:
            log(str(error))
            now = Status(FAILED, 0, str(error), 2, restarts=own_job.restarts())
            status.write_status(cell, now)
            return 2
        os.environ.clear()
        os.environ.update(environment)
        if own_job.slurm_job():
            self.late_s = float(cluster_from_record(record).late_seconds)
        end_orphan_step(cell)
        exits.note_killed_attempt(cell)
        ends = exits.job_ends(cell)
        while True:
            end, decision = self._attempt(cell, record, ends)
            if end.cause in _PREEMPTED and self._is_preempted():
                end = replace(end, cause=Cause.STOPPED, reason="Slurm: PREEMPTED")
                if not self.signal_number:
                    ends.append(end)
                    self._write(cell, end, RUNNING, None)
                    continue
            if self.signal_number:
                end, state = exits.stopped_end(end, self._signal_name)
                self._write(cell, end, state, end.reason)
                return 0
            if end.cause is Cause.FINISHED:
                self._write(cell, end, FINISHED, None)
                return 0
            if decision is None:
                lost = self._lost_nodes()
                decision = exits.decide([*ends, end], record.max_restarts, lost, self.is_time_over)
            if decision.action is Action.REQUEUE:
                decision = self._requeue(cell, end, decision)
            end = replace(end, decision=decision.words)
            log(f"attempt {end.attempt} ended: {end.cause}: {end.reason}; {decision.words}")
            if decision.action is Action.REQUEUE:
                return 0
            if end.cause is Cause.TOO_LATE:
                continue
            ends.append(end)
            if decision.action is Action.STOP:
                self._write(cell, end, FAILED, f"{end.reason}; {decision.words}")
                code = end.exit_code or 1
                return code if code > 0 else 128 - code
            self._write(cell, end, RUNNING, None)

    def _attempt(
        self, cell: CellFolder, record: CellRecord, ends: Sequence[AttemptEnd]
    ) -> tuple[AttemptEnd, Decision | None]:
        if self.running is None:
            attempt = cell.next_attempt()
            now = Status(RUNNING, attempt.number, started=time.time(), restarts=own_job.restarts())
            status.write_status(cell, now)
            try:
                environment = self._prepare(cell, attempt, record)
            except SignalReceivedError:
                return replace(exits.refused_end(attempt, ""), exit_code=None), None
            except JobError as error:
                decision = error.decision if isinstance(error, RequeueNeededError) else None
                return exits.refused_end(attempt, f"preflight: {error}"), decision
            except (InputError, OSError) as error:
                if isinstance(error, OSError):
                    if error.errno not in status.DISK_FULL:
                        raise
                    self._pause(_FULL_DISK_S)
                return exits.refused_end(attempt, str(error)), None
            earlier = [cell.attempt(end.attempt) for end in ends]
            self.running = RunningAttempt(
                cell, attempt, record, environment, self.timeouts, earlier
            )
            if self.is_time_over:
                self._ask_to_stop(signal.SIGUSR1, None)
            if self.signal_number:
                self._stop(self.signal_number, None)
        end = self.running.wait()
        if end.cause is not Cause.TOO_LATE:
            self.running = None
        return end, None

    def _prepare(self, cell: CellFolder, attempt: Attempt, record: CellRecord) -> dict[str, str]:
        # W&B ignores steps below its newest, so those trained again need a new W&B run.
        is_rolled_back = facts_of(record).load_step != -1 or any(
            end.cause is Cause.NAN_LOSS for end in status.read_history(cell.attempts()[-1:])
        )
        more, nodes, head = dict[str, str](), list[str](), ""
        self._is_preparing = True
        try:
            loads = prepare(cell, attempt, record)
            if "WANDB_RUN_ID" not in os.environ:
                if is_rolled_back or not cell.wandb_id.exists():
                    write_whole(cell.wandb_id, secrets.token_hex(6))
                more = {"WANDB_RUN_ID": cell.wandb_id.read_text(), "WANDB_RESUME": "allow"}
            if own_job.slurm_job():
                nodes = preflight(cell, attempt, record)
                head = head_address(nodes[0])
            return write_script(cell, attempt, record, self._job, loads, nodes, head, more)
        finally:
            self._is_preparing = False

    def _write(self, cell: CellFolder, end: AttemptEnd, state: str, reason: str | None) -> None:
        if not cell.record.exists():
            # The cell was deleted. Training may have recreated its folder, but not its record.
            raise FileNotFoundError(errno.ENOENT, "its folder was deleted", str(cell.path))
        # An attempt that was refused before it wrote a file has no folder.
        if (attempt := cell.attempt(end.attempt)).path.is_dir():
            status.write_attempt_end(attempt, end)
            note_saved(cell, attempt)
        now = Status(state, end.attempt, reason, started=end.started, restarts=own_job.restarts())
        if state != RUNNING:
            now = replace(now, exit_code=end.exit_code, ended=end.ended)
        status.write_status(cell, now)

    def _is_preempted(self) -> bool:
        """Whether Slurm preempts this job; if so, wait until it ends the job, or thinks better."""
        job, found = own_job.slurm_job(), False
        while job and not self.signal_number and (now := slurm.is_preempted(job)) is not False:
            if now and not found:
                log("Slurm preempts this job: waiting for its end")
            found |= now is True
            self._pause(_PREEMPTED_S)
        return found

    def _lost_nodes(self) -> list[str]:
        nodes = os.environ.get("SLURM_JOB_NODELIST") if own_job.slurm_job() else None
        is_logged = False
        while nodes and not self.signal_number:
            try:
                return slurm.lost_nodes(nodes)
            except JobError as error:
                if not is_logged:
                    log(f"waiting for Slurm: {error}")
                is_logged = True
                time.sleep(_POLL_S)
        return []

    def _requeue(self, cell: CellFolder, end: AttemptEnd, wanted: Decision) -> Decision:
        """Requeue this job, which ends this process; return a STOP decision if Slurm refuses."""
        job_id = own_job.slurm_job()
        if job_id is None:
            return Decision(Action.STOP, f"stopped; to go on: {GO_ON}")
        before = status.read_status(cell)
        self._write(cell, replace(end, decision=wanted.words), QUEUED, wanted.words)
        # Slurm signals this job in the middle of `requeue`, so block signals until that is done.
        # If a signal has already arrived, the job may have been cancelled: do not requeue it.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            if not self.signal_number:
                slurm.requeue(job_id, wanted.exclude, wanted.begin)
        except JobError as error:
            status.write_status(cell, before)
            why = f"stopped: could not be {wanted.words} ({error}); to go on: {GO_ON}"
            return Decision(Action.STOP, why)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self._pause(_REQUEUE_S)
        if self.signal_number:
            stopped, state = exits.stopped_end(end, self._signal_name)
            if state != QUEUED:
                self._write(cell, end, state, stopped.reason)
        return wanted

    def _pause(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self.signal_number and time.monotonic() < deadline:
            time.sleep(0.2)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self.signal_number = number
        if self.running is not None:
            self.running.send(signal.SIGTERM if number == signal.SIGHUP else number)
        elif self._is_preparing:
            self._is_preparing = False
            raise SignalReceivedError

    def _ask_to_stop(self, number: int, frame: FrameType | None) -> None:
        self.is_time_over = True
        if self.running is not None:
            self.running.ask_to_stop(self.late_s)


def run_with_respawn(work: Callable[[], int]) -> NoReturn:
    """Run `work` in a child process, and rerun it if it is killed; exit with its status.

    The out-of-memory killer may choose any process, and Slurm never restarts a job whose batch
    process was killed. The parent only waits, so the killer is unlikely to choose it. If the parent
    is killed, Slurm ends the job, so the child stops too.
    """
    child = 0

    def hand_on(number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)

    spawns = 0
    while True:
        spawns += 1
        # Block signals in both processes until each is ready to handle them.
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        child = os.fork()
        if not child:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
            try:
                os._exit(work())
            except BaseException:
                with contextlib.suppress(OSError):
                    traceback.print_exc()
                os._exit(1)
        for one in _SIGNALS:
            signal.signal(one, hand_on)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code != -signal.SIGKILL or spawns == _MOST_SPAWNS:
            os._exit(code if code >= 0 else 128 - code)
        log(f"the supervisor was killed; start {spawns + 1}")
