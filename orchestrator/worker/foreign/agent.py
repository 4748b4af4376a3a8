"""The agent: runs a foreign program as its child and speaks to the supervisor as rank 0 does.

Run as `python -m kgorch.worker.foreign.agent`, with KGORCH_LAUNCH naming the launch file. The main thread looks at the program's
output and at its processes a few times a second; the link's thread sends the status and watches the deadline, so that the
program is stopped in time also when no supervisor lives; a checkpoint is copied in a thread of its own.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from kgorch.core import program_command
from kgorch.core.codes import EventKind, RankError, RankOutcome
from kgorch.errors import UNWRITABLE, CheckpointBroken, KgorchError
from kgorch.protocol.launch_spec import LAUNCH_VARIABLE, LaunchSpec
from kgorch.protocol.messages import (
    Command,
    JournalEntry,
    Message,
)
from kgorch.protocol.snapshot_messages import SaveFailure
from kgorch.system.attempt_files import write_attempt_file
from kgorch.system.clock import boottime_s
from kgorch.worker.foreign.checkpoint_watch import CheckpointWatch
from kgorch.worker.foreign.latest_pointer import LatestPointer
from kgorch.worker.foreign.probe_record import ProbeRecord
from kgorch.worker.foreign.program import Program
from kgorch.worker.foreign.program_status import ProgramStatus
from kgorch.worker.foreign.program_stop import ProgramStop, clear_file
from kgorch.worker.ranks.consensus_board import STOP
from kgorch.worker.ranks.supervisor_link import SupervisorLink

LOOK_S = 0.2
"""Seconds between two looks at the program."""

TREE_LOOK_S = 1.0
"""Seconds between two looks at all processes of the machine, while the program's first process lives."""

LINGER_S = 10.0
"""Seconds that processes may go on after the program's first process has ended with status 0."""

BUSY_SHARE = 0.1
"""Share of a processor that they use meanwhile if the training goes on in them."""


class ProgramFailed(Exception):
    """The program ended with an error, or not as the plan expects. `code`: the kind of error."""

    def __init__(self, message: str, code: RankError = RankError.OTHER) -> None:
        super().__init__(message)
        self.code = code


class Lingering(NamedTuple):
    """What was found when the first process had ended: the instant (boottime, and Unix time), processor time of the others."""

    at_s: float
    at_ns: int
    ticks: int


class AgentLink(SupervisorLink):
    """The connection of the agent. `wall_s`: the instant of the wall, as an order to stop has named it last."""

    wall_s: float | None = None

    def _obey(self, message: Message) -> None:
        if isinstance(message, Command) and message.what == "stop" and message.wall_s is not None:
            self.wall_s = message.wall_s
        super()._obey(message)


class Requests:
    """Takes the orders of the supervisor, in the place of the ranks' board.

    Attributes:
        stop_s: the instant of the first one to stop.
        is_signal: it came as a signal, which the program may have had, too.
    """

    def __init__(self) -> None:
        self.stop, self.save = threading.Event(), threading.Event()
        self.stop_s, self.is_signal = 0.0, False

    def ask(self, request: int) -> None:
        """See RequestBoard."""
        if request & STOP:
            self.stop_s = self.stop_s or boottime_s()
            self.stop.set()
        else:
            self.save.set()


class Agent:
    """Of one attempt of a foreign stage."""

    def __init__(self, launch: LaunchSpec) -> None:
        assert launch.foreign is not None
        self._launch, self._foreign = launch, launch.foreign
        self._log_path = Path(launch.folder, "rank0.log")
        self._status = ProgramStatus(launch, launch.foreign, self._log_path)
        self._requests = Requests()
        self._link = AgentLink(launch, self._requests, self._status.hello, self._status.messages)
        self._link.wall_s = launch.wall_s
        self._program: Program | None = None
        self._probe = ProbeRecord(launch) if launch.probe is not None else None
        pattern = self._foreign["checkpoint"]
        self._watch = CheckpointWatch(launch, pattern, self._link.send, self._status.position) if pattern else None
        self._status.watch = self._watch
        latest = self._foreign.get("latest")  # absent in a launch file of an earlier version
        self._latest = LatestPointer(Path(launch.workdir), pattern, latest) if pattern and latest else None

    def ask_stop(self) -> None:
        """Have the program stopped: the handler of a signal."""
        self._requests.is_signal |= not self._requests.stop_s
        self._requests.ask(STOP)

    def run(self) -> None:
        """Until the program is over; leaves the record of how it ended."""
        self._link.start()
        final_step, began = None, False
        try:
            self._program = self._start()
            began = self._status.is_ready = True
            self._link.send_hello()
            outcome, why = self._until_end(self._program)
            if outcome is RankOutcome.FINISHED and self._watch and not self._probe:
                final_step = self._watch.finalize()
            self._record(outcome, began=began, final_step=final_step, error=why and ProgramFailed(why))
        except Exception as error:  # also a bug of ours: without a record the attempt would count as killed
            if isinstance(error, ProgramFailed | KgorchError):
                print(f"kgorch: {error}", file=sys.stderr, flush=True)
            else:
                traceback.print_exc()
            self._record(RankOutcome.FAILED, began=began, error=error)
        finally:
            if self._program:
                self._end_processes(self._program)
            if self._watch:
                self._watch.close()
            self._status.close()
            self._link.close()

    # The program

    def _start(self) -> Program:
        """Raises: KgorchError, OSError, ProgramFailed."""
        launch, foreign = self._launch, self._foreign
        clear_file(Path(launch.workdir), foreign["stop"])
        handed = self._watch.begin(Path(foreign["claims"])) if self._watch else ""
        if self._latest and (what := self._latest.set(handed)):
            self._link.send(JournalEntry(launch.attempt, EventKind.FOREIGN_NOTE, {"what": what}))
            print(f"kgorch: {what}", flush=True)
        added = [word.replace("{checkpoint}", handed) for word in foreign["again"]] if handed else foreign["first"]
        on_gpu = launch.device not in ("", "cpu", "unknown")
        command = [
            *program_command.launch_command(
                launch.launcher, launch.entry, foreign["processes"], python=sys.executable, on_gpu=on_gpu
            ),
            *launch.argv,
            *program_command.flags_of(launch.args, launch.flags),
            *added,
        ]
        if not launch.entry.endswith(".py") and Path(launch.workdir, launch.entry).is_file():
            # Popen looks for a plain name on PATH only; the plan's folder comes first, as for scripts
            place = str(Path(launch.workdir, launch.entry))
            command = [place if word == launch.entry else word for word in command]
        print(f"kgorch: starts {' '.join(command)}", flush=True)
        try:
            # What `accelerate launch --cpu` sets: without it each rank of an Accelerator without a GPU believes that it is alone.
            on_cpu = {"ACCELERATE_USE_CPU": "true"} if launch.launcher == "accelerate" and not on_gpu else {}
            return Program(command, cwd=launch.workdir, env={**os.environ, **on_cpu}, log=self._log_path)
        except OSError as error:
            raise ProgramFailed(f"{launch.entry!r} cannot be started: {error.strerror}", RankError.USAGE) from None

    def _until_end(self, program: Program) -> tuple[RankOutcome, str]:
        """Returns: how it ended, and why where a person should know. Raises: ProgramFailed."""
        stop = ProgramStop(program, Path(self._launch.workdir), self._foreign["stop"])
        next_s = 0.0
        lingering: Lingering | None = None
        while True:
            program.reap()
            if program.status is not None and not program.processes():
                break
            if boottime_s() >= next_s:
                next_s = boottime_s() + TREE_LOOK_S
                self._status.note_processor_time(sum(process.ticks for process in program.processes().values()))
            self._status.read(self._link.send)
            if self._probe and self._probe.is_enough(self._watch):
                self._requests.ask(STOP)
            if self._requests.stop.is_set():
                if self._watch and not stop.asked_s and not self._requests.is_signal:
                    self._watch.see()
                stop.drive(self._kill_at_s(stop))
            elif program.status is not None:
                lingering = self._linger(program, lingering)
            if self._watch:
                self._watch.look()
            if self._requests.save.is_set():
                self._requests.save.clear()
                self._refuse_save()
            self._status.rest(LOOK_S)
        return self._end_of(program, stop)

    def _linger(self, program: Program, since: Lingering | None) -> Lingering:
        """Processes go on though the first one has ended: they get a moment, and end with it.

        Raises: ProgramFailed where it is the training that goes on in them.
        """
        processes = program.processes()
        used = sum(process.ticks for process in processes.values())
        if since is None:
            since = Lingering(boottime_s(), time.time_ns(), used)
        lasted_s = boottime_s() - since.at_s
        if program.status != 0:
            program.kill()
        elif lasted_s >= LINGER_S:
            program.kill()
            share = (used - since.ticks) / os.sysconf("SC_CLK_TCK") / lasted_s
            # The last checkpoint may be taken only now: what counts is when it was written.
            has_saved = self._watch is not None and self._watch.written_ns > since.at_ns + int(LOOK_S * 1e9)
            if share >= BUSY_SHARE or has_saved:
                raise ProgramFailed(
                    f"{self._launch.entry} ended with status 0 while {len(processes)} processes that it had started went on"
                    " to train; expected a command that ends with its training: let it wait for them (in a shell: `wait`)",
                    RankError.USAGE,
                )
        return since

    def _end_of(self, program: Program, stop: ProgramStop) -> tuple[RankOutcome, str]:
        """Raises: ProgramFailed."""
        # Slurm and a shutdown send SIGTERM to all processes: the program may have saved or ended of it before it was asked here.
        if self._requests.is_signal or not stop.asked_s:
            stop.asked_s = self._requests.stop_s
        self._status.read(self._link.send, is_last=True)
        clear_file(Path(self._launch.workdir), self._foreign["stop"])
        status, is_clean = program.status, program.status == 0 and not program.was_killed
        skipped = self._watch.finish(is_clean=is_clean, was_stopped=stop.asked_s > 0) if self._watch else ""
        if self._probe:
            self._probe.write(stop, self._watch, self._status, self._latest)
        if stop.asked_s:
            return (RankOutcome.FINISHED, "") if self._probe else self._end_of_stop(stop)
        if status != 0:
            how = (
                f"was ended by {signal.Signals(-status).name}"
                if status and status < 0
                else f"ended with status {status}"
            )
            raise ProgramFailed(f"{how}; its last words: {self._status.last_words}")
        if skipped:  # an earlier one is not the result of the training
            left = "; processes that it had left behind were killed: let it wait for them" if program.was_killed else ""
            errno = self._watch.skipped_errno if self._watch else 0
            code = RankError.DISK_FULL if errno in UNWRITABLE else RankError.OTHER if errno else RankError.USAGE
            raise ProgramFailed(
                f"{self._launch.entry} ended with status 0, and its last checkpoint {skipped}{left}",
                code,
            )
        if self._watch and self._watch.newest is None:
            raise ProgramFailed(
                f"{self._launch.entry} ended with status 0 and left no complete checkpoint: expected one at"
                f" {self._foreign['checkpoint']}, {self._watch.describe()}; correct stage.foreign.checkpoint, or leave it out"
                f" for a program that saves nothing; its last words: {self._status.last_words}",
                RankError.USAGE,
            )
        return RankOutcome.FINISHED, ""

    def _end_of_stop(self, stop: ProgramStop) -> tuple[RankOutcome, str]:
        took_s = boottime_s() - stop.asked_s
        has_saved = self._watch is not None and self._watch.has_saved_since(stop.asked_s)
        facts = {
            "stage": self._launch.stage,
            "took_s": f"{took_s:.3f}",
            "by": stop.means,
            "killed": "yes" if stop.was_killed else "no",
            "saved": "yes" if has_saved else "no",
        }
        if self._watch:
            facts["had_checkpoint"] = "yes" if any(item.at_s < stop.asked_s for item in self._watch.taken) else "no"
        self._link.send(JournalEntry(self._launch.attempt, EventKind.FOREIGN_STOPPED, facts))
        if has_saved or self._status.is_saved:
            return RankOutcome.SUSPENDED, ""
        if self._foreign["stop"].get("kill"):
            how = "was killed, as stage.foreign.stop says,"
        else:
            how = f"was killed {took_s:.0f} s after {stop.means}" if stop.was_killed else f"ended after {stop.means}"
        return RankOutcome.UNSAVED, f"{self._launch.entry} {how} without a new checkpoint"

    def _kill_at_s(self, stop: ProgramStop) -> float:
        """When a program that goes on is killed: after its grace time, and in time for a copy before the wall."""
        now_s, wall_s = boottime_s(), self._link.wall_s
        asked_s = stop.asked_s or now_s
        at_s = asked_s + float(self._foreign["stop"].get("grace_s", 0.0))
        if wall_s is None:
            return at_s
        copy_s = 1.0 + 2 * (self._watch.copy_s if self._watch else 0.0)
        return min(at_s, max(wall_s - copy_s, asked_s + 0.5 * (wall_s - asked_s)))

    def _end_processes(self, program: Program) -> None:
        """Nothing of it outlives the agent; the shim looks, too."""
        until_s = time.monotonic() + 5.0
        while program.processes() and time.monotonic() < until_s:
            program.kill()
            program.reap()
            time.sleep(0.02)

    def _refuse_save(self) -> None:
        """`kgorch save`: what is complete on disk is taken now; more cannot be asked for."""
        if self._watch:
            self._watch.look(now=True)
        why = "the program saves by itself and takes no requests: its next checkpoint is copied when it is complete"
        self._link.send(SaveFailure(self._launch.attempt, -1, self._status.known_step, why))

    def _record(
        self,
        outcome: RankOutcome,
        *,
        began: bool,
        final_step: int | None = None,
        error: BaseException | str | None = None,
    ) -> None:
        """Write rank0.status.json, as worker/entry.py does."""
        content: dict[str, Any] = {
            "rank": 0,
            "outcome": outcome,
            "at": datetime.now(UTC).isoformat(),
            "at_s": boottime_s(),
            "began": began,
            "final_step": final_step,
        }
        if error:
            code = (
                RankError.CHECKPOINT if isinstance(error, CheckpointBroken) else getattr(error, "code", RankError.OTHER)
            )
            if not isinstance(code, RankError):
                code = RankError.USAGE
            content["error"] = {
                "code": code,
                "error_code": getattr(error, "error_code", ""),
                "type": self._launch.entry,
                "message": str(error)[:4000],
                "memory": "",
                "step": self._status.step,
                "place": "",
                "is_collateral": False,
                "line": "",
                "traceback": "\n".join(self._status.last_lines)[-16000:],
            }
        write_attempt_file(self._launch, "rank0.status.json", content)


def main() -> int:
    """Run the attempt of the launch file to its end."""
    path = os.environ.get(LAUNCH_VARIABLE)
    launch = LaunchSpec.read(path) if path else None
    if launch is None or launch.foreign is None:
        print("kgorch.worker.foreign.agent is started by kgorch", file=sys.stderr)
        return 2
    agent = Agent(launch)
    # SIGTERM means that the time limit has come nearer
    signal.signal(signal.SIGTERM, lambda *_: agent.ask_stop())
    agent.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
