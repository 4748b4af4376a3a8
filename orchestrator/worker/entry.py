"""What torchrun runs in every rank: the person's entry, with its arguments, its log and a record of how it ended.

torchrun's exit code tells nothing of the reason (1 for every failure, and after a stop in good order): the record
`rankK.status.json` does. `python -m orchestrator.worker.entry`, with KGORCH_LAUNCH naming the launch file.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import inspect
import io
import os
import runpy
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

from orchestrator import worker
from orchestrator.core.codes import RankError, RankOutcome
from orchestrator.core.training_health import Trouble
from orchestrator.errors import CannotRestore, CheckpointBroken, KgorchError, nearest
from orchestrator.protocol.launch_spec import LaunchSpec
from orchestrator.system.attempt_files import write_attempt_file
from orchestrator.system.clock import boottime_s

EXIT_S = 4.0
"""Seconds that a failed rank may take to end; a second later the shim ends it (launch/failed_attempt.py)."""


def die_with_parent() -> None:
    """A torchrun that is killed must not leave ranks that hold the GPU: they are sessions of their own, and would go on."""
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent or parent == 1:
        os._exit(1)


def log_to(path: Path) -> None:
    """Everything this rank prints, from Python and from C, into one file in the order it was printed."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def dump_stacks_to(path: Path) -> None:
    """At SIGUSR2, from C: also of a rank whose Python does not move. torchrun passes that signal on to nobody.

    Loading processes that are forked inherit it and would write to the same file; nobody sends it to them.
    """
    faulthandler.register(signal.SIGUSR2, file=open(path, "a"), all_threads=True, chain=False)


def function_of(entry: str) -> Callable[..., Any]:
    module_name, _, name = entry.partition(":")
    module = importlib.import_module(module_name)
    try:
        found: Callable[..., Any] = getattr(module, name)
    except AttributeError:
        raise KgorchError(f"entry {entry!r}: {module_name} has no {name!r}{nearest(name, vars(module))}") from None
    return found


def check_arguments(function: Callable[..., Any], args: dict[str, Any], entry: str) -> None:
    """Raises KgorchError naming the argument that `function` does not take, or that it misses."""
    parameters = inspect.signature(function).parameters
    if not any(item.kind is inspect.Parameter.VAR_KEYWORD for item in parameters.values()):
        for name in args.keys() - parameters.keys():
            raise KgorchError(
                f"entry {entry!r} takes no argument {name!r}{nearest(name, parameters)}",
                f"it takes: {', '.join(parameters)}",
            )
    try:
        inspect.signature(function).bind(**args)
    except TypeError as error:
        raise KgorchError(f"entry {entry!r}: {error}", next_step="give it in the stage's args") from None


def flags_of(args: dict[str, Any]) -> list[str]:
    """A script's arguments as flags: `{lr: 0.1, amp: true, tags: ["a", "b"]}` as `--lr 0.1 --amp --tags a b`."""
    flags: list[str] = []
    for name, value in args.items():
        if value is not False and value is not None:
            flags += [
                f"--{name}",
                *([] if value is True else [str(item) for item in (value if isinstance(value, list) else [value])]),
            ]
    return flags


def call(launch: LaunchSpec, record: Record) -> None:
    os.chdir(launch.workdir)
    sys.path.insert(0, launch.workdir)
    if launch.entry.endswith(".py"):
        script = str(Path(launch.workdir, launch.entry))
        sys.argv = [script, *flags_of(launch.args)]
        sys.path.insert(0, str(Path(script).parent))
        record.began = True
        runpy.run_path(script, run_name="__main__")
    else:
        function = function_of(launch.entry)
        check_arguments(function, launch.args, launch.entry)
        record.began = True
        function(**launch.args)


class Record:
    """How a rank ended, for whoever supervises: the outcome, and the error of one that `failed`.

    `finished`; `suspended`: stopped at a step boundary, its part saved; `unsaved`: the same, but the save failed.

    `began` is false until the person's code runs: what fails before that would fail again.
    """

    def __init__(self, launch: LaunchSpec, rank: int) -> None:
        self._launch, self._rank, self.began = launch, rank, False

    def write(self, outcome: RankOutcome, error: BaseException | None = None) -> None:
        content: dict[str, Any] = {
            "rank": self._rank,
            "outcome": outcome,
            "at": datetime.now(UTC).isoformat(),
            "at_s": boottime_s(),
            "began": self.began,
            "final_step": getattr(sys.modules.get("orchestrator.worker.session"), "final_step", None),
        }
        if error is not None:
            content["error"] = {
                "code": code_of(error),
                "type": f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins."),
                "message": str(error)[:4000],
                "memory": memory_that_ran_out(error),
                "step": getattr(error, "at_step", None),
                "place": getattr(error, "at_place", ""),
                "is_collateral": is_collateral(error),
                "line": line_of(error, self._launch.workdir),
                "traceback": "".join(traceback.format_exception(error))[-16000:],
            }
            if isinstance(trouble := getattr(error, "trouble", None), Trouble):
                content["error"]["trouble"] = trouble.as_dict()
        write_attempt_file(self._launch, f"rank{self._rank}.status.json", content)


def code_of(error: BaseException) -> RankError:
    """PyTorch is not loaded for it: there may be no room."""
    if isinstance(error, CheckpointBroken | CannotRestore):
        return RankError.CHECKPOINT
    if isinstance(error, KgorchError | ImportError | SyntaxError):
        return RankError.USAGE
    if "torch" in sys.modules:
        from orchestrator.worker import oom

        if isinstance(error, oom.LadderEnds):
            return RankError.LADDER_EXHAUSTED
    text = str(error).lower()  # PyTorch has no type for it
    if "dataloader worker" in text and ("killed by signal: killed" in text or "exited unexpectedly" in text):
        return RankError.LOADER_KILLED
    return RankError.OTHER


def memory_that_ran_out(error: BaseException) -> str:
    """Which one, if that is what the error says; empty else. PyTorch is not loaded for it: there may be no room."""
    if "torch" not in sys.modules:
        return "device" if isinstance(error, MemoryError) else ""
    from orchestrator.worker import oom

    return oom.ran_out(error)


def line_of(error: BaseException, workdir: str) -> str:
    """The innermost line of the person's own code below `workdir` that the exception came through; empty where there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    root = str(Path(workdir).resolve())
    own = [frame for frame in frames if Path(frame.filename).resolve().is_relative_to(root) and not _is_library(frame)]
    return f"{Path(own[-1].filename).name}:{own[-1].lineno}" if own else ""


def _is_library(frame: traceback.FrameSummary) -> bool:
    return "site-packages" in Path(frame.filename).parts


def is_collateral(error: BaseException) -> bool:
    """Whether another rank's end is the cause. PyTorch is not loaded for it: without it there are no peers to lose."""
    if "torch.distributed" not in sys.modules:
        return False
    from orchestrator.worker import peers

    return peers.is_collateral(error)


def leave(status: int = 0) -> NoReturn:
    """End this process without unloading PyTorch, which takes 1.1 s of processor time: a wall is near.

    What Python's own end does for a script is done first: its threads, what it registered with atexit (loading processes,
    loggers), and files that it left open. Destructors of what else still lives are not run: on CUDA they may wait for a device that
    never comes to an end, as when a peer has gone that an all-reduce waits for.
    """
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        for found in gc.get_objects():
            if issubclass(type(found), (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)):
                with contextlib.suppress(ValueError, OSError):  # closed, or only read
                    found.flush()
    finally:
        os._exit(status)


def fail(status: int = 1) -> NoReturn:
    """The same after a failure, within EXIT_S: the timer is a thread of C, which needs no Python to end the process."""
    faulthandler.dump_traceback_later(EXIT_S, exit=True)
    leave(status)


def main() -> int:
    die_with_parent()
    launch = worker.launch()
    if launch is None:
        print("orchestrator.worker.entry is started by kgorch, through torchrun", file=sys.stderr)
        return 2
    rank = int(os.environ.get("RANK", 0))
    record = Record(launch, rank)
    log_to(Path(launch.folder) / f"rank{rank}.log")
    dump_stacks_to(Path(launch.folder) / f"rank{rank}.stacks")
    try:
        call(launch, record)
    except SystemExit as ending:
        over = sys.modules.get("orchestrator.worker.session")
        if over and isinstance(ending, over.SessionOver):
            record.write(RankOutcome.SUSPENDED if ending.saved else RankOutcome.UNSAVED)
            leave()
        elif ending.code in (None, 0):
            record.write(RankOutcome.FINISHED)
        else:
            record.write(RankOutcome.FAILED, ending)
            if not isinstance(ending.code, int):
                print(ending.code, file=sys.stderr)
            fail(ending.code & 0xFF or 1 if isinstance(ending.code, int) else 1)
    except BaseException as error:
        record.write(RankOutcome.FAILED, error)
        traceback.print_exc()
        fail()
    else:
        record.write(RankOutcome.FINISHED)
    return 0


if __name__ == "__main__":
    sys.exit(main())
