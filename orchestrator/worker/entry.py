"""The program that torchrun runs in every rank: calls the stage's entry with its arguments, and records how it ended.

torchrun's exit code does not tell the reason (it is 1 for every failure, and after an orderly stop): the record `rankK.status.json`
does. Run as `python -m kgorch.worker.entry`, with KGORCH_LAUNCH naming the launch file.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import functools
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

from kgorch import worker
from kgorch.core.codes import RankError, RankOutcome
from kgorch.core.former_names import current_name
from kgorch.core.health.training_health import HealthIssue
from kgorch.core.program_command import flags_of, module_of
from kgorch.errors import NO_ROOM, UNWRITABLE, CannotRestore, CheckpointBroken, KgorchError, nearest
from kgorch.protocol.launch_spec import LaunchSpec
from kgorch.system import frame_stack
from kgorch.system.attempt_files import write_attempt_file
from kgorch.system.clock import boottime_s
from kgorch.worker import session_end
from kgorch.worker.integrations import import_hook

EXIT_S = 4.0
"""Seconds that a failed rank may take to exit; a second later the shim kills it (launch/failed_attempt.py)."""


def die_with_parent() -> None:
    """Die with torchrun: the ranks have sessions of their own, and would continue to hold the GPU when it is killed."""
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent or parent == 1:
        os._exit(1)


def log_to(path: Path) -> None:
    """Redirect everything that this rank prints, from Python and from C, to one file, in order."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def dump_stacks_to(path: Path) -> None:
    """Dump the stacks at SIGUSR2, from C, so that it works in a rank that holds the GIL. torchrun does not forward that signal.

    Forked loading processes inherit the handler, and would write to the same file; nobody sends them the signal.
    """
    faulthandler.register(signal.SIGUSR2, file=open(path, "a"), all_threads=True, chain=False)


def function_of(entry: str) -> Callable[..., Any]:
    """The function of an entry `module:name`. Raises: KgorchError where the module has none of that name."""
    module_name, _, name = entry.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        if error.name != "workloads":
            raise
        module = importlib.import_module(current_name(module_name))
    try:
        function: Callable[..., Any] = getattr(module, name)
    except AttributeError:
        raise KgorchError(f"entry {entry!r}: {module_name} has no {name!r}{nearest(name, vars(module))}") from None
    return function


def check_arguments(function: Callable[..., Any], args: dict[str, Any], entry: str) -> None:
    """Raises: KgorchError, which names the argument that the function does not take, or that is missing."""
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


def call(launch: LaunchSpec, record: ExitRecord) -> None:
    """Run the stage's entry: a script, a module, or a function of a module."""
    os.chdir(launch.workdir)
    sys.path.insert(0, launch.workdir)
    if launch.integration != "off":
        import_hook.install()
    words = [*launch.argv, *flags_of(launch.args, launch.flags)]
    if module := module_of(launch.entry):
        sys.argv = [module, *words]  # run_module puts the module's path in the place of its name
        record.began = True
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    elif launch.entry.endswith(".py"):
        script = str(Path(launch.workdir, launch.entry))
        sys.argv = [script, *words]
        sys.path.insert(0, str(Path(script).parent))
        record.began = True
        runpy.run_path(script, run_name="__main__")
    else:
        function = function_of(launch.entry)
        check_arguments(function, launch.args, launch.entry)
        record.began = True
        function(**launch.args)


class ExitRecord:
    """The record of how a rank ended, for the supervisor.

    Outcomes: `finished`; `suspended`, stopped at a step boundary with its part saved; `unsaved`, the same, but the save failed;
    `failed`, with the error.

    Attributes:
        began: the stage's own code has run. What fails before that would fail again.
    """

    def __init__(self, launch: LaunchSpec, rank: int) -> None:
        self._launch, self._rank, self.began = launch, rank, False

    def write(self, outcome: RankOutcome, error: BaseException | None = None) -> None:
        """Write `rankK.status.json`."""
        content: dict[str, Any] = {
            "rank": self._rank,
            "outcome": outcome,
            "at": datetime.now(UTC).isoformat(),
            "at_s": boottime_s(),
            "began": self.began,
            "final_step": session_end.final_step,
        }
        if error is not None:
            content["error"] = {
                "code": code_of(error),
                "error_code": error.error_code if isinstance(error, KgorchError) else "",
                "type": f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins."),
                "message": message_of(error)[:4000],
                "memory": memory_that_ran_out(error),
                "step": getattr(error, "at_step", None),
                "place": getattr(error, "at_place", ""),
                "is_collateral": is_collateral(error),
                "line": line_of(error, self._launch.workdir),
                "traceback": "".join(traceback.format_exception(error))[-16000:],
            }
            if isinstance(trouble := getattr(error, "trouble", None), HealthIssue):
                content["error"]["trouble"] = trouble.as_dict()
        write_attempt_file(self._launch, f"rank{self._rank}.status.json", content)


def name_package(error: BaseException) -> None:
    """Add the name of kgorch's package to the error of a script that imports it by its former name."""
    if (
        isinstance(error, ImportError)
        and (error.name or "").partition(".")[0] == "orchestrator"
        and "kgorch" not in error.msg  # the folder of a checkout says it itself
    ):
        error.msg += "; the package of kgorch is `kgorch`: from kgorch import attach"


def message_of(error: BaseException) -> str:
    """Its text; of a program that argparse has ended, with the reason, which is printed and not in the error."""
    if isinstance(error, SystemExit):
        for frame, _ in traceback.walk_tb(error.__traceback__):
            if frame.f_code.co_name == "exit" and frame.f_globals.get("__name__") == "argparse":
                return f"{error.code}: {frame.f_locals.get('message') or ''}".strip()
    return str(error)


def explain_empty_epoch(error: BaseException) -> None:
    """Add the cause to an error after an epoch of `session.steps` or Accelerate whose steps were done before this session."""
    # An AttributeError: `total = 0` before the epoch, `total.item()` after it.
    of_no_step = NameError | AttributeError | ZeroDivisionError | StopIteration
    if session_end.empty_epoch is None or not isinstance(error, of_no_step):
        return
    if isinstance(error, StopIteration):
        advice = "take the batches by a `for` loop in each epoch, because one by next() finds none"
    else:
        advice = "give what is used after the loop a value before it, of the type that it has then"
    error.args = (
        f"{error}; this session continues after the last step of epoch {session_end.empty_epoch + 1}, so there was no step left"
        f" in it: {advice} (docs/your-training.md)",
    )


def code_of(error: BaseException) -> RankError:
    """The kind of error. Does not load PyTorch: there may be no memory for it."""
    if isinstance(error, CheckpointBroken | CannotRestore):
        return RankError.CHECKPOINT
    if isinstance(error, OSError) and error.errno in NO_ROOM:
        return RankError.DISK_FULL
    if isinstance(error, session_end.SaveLost) and error.errno in UNWRITABLE:
        return RankError.DISK_FULL
    if isinstance(error, KgorchError | ImportError | SyntaxError):
        return RankError.USAGE
    if "torch" in sys.modules:
        from kgorch.worker.memory import oom

        if isinstance(error, oom.LadderEnds):
            return RankError.LADDER_EXHAUSTED
    text = str(error).lower()  # PyTorch has no type for it
    if "dataloader worker" in text and ("killed by signal: killed" in text or "exited unexpectedly" in text):
        return RankError.LOADER_KILLED
    return RankError.OTHER


def memory_that_ran_out(error: BaseException) -> str:
    """The memory that ran out (memory/oom.py); empty for any other error. Does not load PyTorch: there may be no memory for it."""
    if "torch" not in sys.modules:
        return "device" if isinstance(error, MemoryError) else ""
    from kgorch.worker.memory import oom

    return oom.ran_out(error)


def line_of(error: BaseException, workdir: str) -> str:
    """The innermost line of the script's own code (below `workdir`) in the traceback, as `train.py:42`; empty where there is
    none."""
    frames = traceback.extract_tb(error.__traceback__)
    root = str(Path(workdir).resolve())
    own = [frame for frame in frames if Path(frame.filename).resolve().is_relative_to(root) and not _is_library(frame)]
    return f"{Path(own[-1].filename).name}:{own[-1].lineno}" if own else ""


def _is_library(frame: traceback.FrameSummary) -> bool:
    return "site-packages" in Path(frame.filename).parts


def is_collateral(error: BaseException) -> bool:
    """Whether another rank's end is the cause. Does not load PyTorch: without it there are no peers."""
    if "torch.distributed" not in sys.modules:
        return False
    from kgorch.worker.ranks import peer_errors

    return peer_errors.is_collateral(error)


def leave(status: int = 0) -> NoReturn:
    """Exit without unloading PyTorch, which takes 1.1 s of CPU time, because the time limit may be near.

    What a normal exit does for a script is done first: its threads are joined, its atexit functions run (loading processes,
    loggers), and files that it left open are flushed. Destructors of other objects do not run: on CUDA they may wait for a device
    that hangs, as in an all-reduce with a peer that is gone; and those of a process group that the script has not destroyed end
    the process with SIGABRT now and then (https://github.com/pytorch/pytorch/issues/190489).
    """
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        for item in gc.get_objects():
            if issubclass(type(item), (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)):
                with contextlib.suppress(ValueError, OSError):  # closed, or opened for reading
                    item.flush()
        for stream in (sys.stdout, sys.stderr):  # of a forked rank they are older than what the collector lists
            with contextlib.suppress(ValueError, OSError):
                stream.flush()
        ctypes.CDLL(None).fflush(None)  # what was printed from C
    finally:
        os._exit(status)


def fail(status: int = 1) -> NoReturn:
    """`leave` after a failure, within EXIT_S: the timer is a C thread, which does not need the GIL to end the process."""
    faulthandler.dump_traceback_later(EXIT_S, exit=True)
    leave(status)


def main() -> int:
    die_with_parent()
    launch = worker.launch()
    if launch is None:
        print("kgorch.worker.entry is started by kgorch, through torchrun", file=sys.stderr)
        return 2
    rank = int(os.environ.get("RANK", 0))
    record = ExitRecord(launch, rank)
    log_to(Path(launch.folder) / f"rank{rank}.log")
    dump_stacks_to(Path(launch.folder) / f"rank{rank}.stacks")
    try:
        try:
            frame_stack.call_with_room(functools.partial(call, launch, record))
        except BaseException as error:
            session_end.end(error)
            raise
        session_end.end(None)  # of a script that has attached without a `with` block
    except SystemExit as system_exit:
        if isinstance(system_exit, session_end.SessionOver):
            record.write(RankOutcome.SUSPENDED if system_exit.is_saved else RankOutcome.UNSAVED)
            leave()
        elif system_exit.code in (None, 0):
            record.write(RankOutcome.FINISHED)
            leave()
        else:
            record.write(RankOutcome.FAILED, system_exit)
            if not isinstance(system_exit.code, int):
                print(system_exit.code, file=sys.stderr)
            fail(system_exit.code & 0xFF or 1 if isinstance(system_exit.code, int) else 1)
    except BaseException as error:
        name_package(error)
        explain_empty_epoch(error)
        record.write(RankOutcome.FAILED, error)
        traceback.print_exc()
        fail()
    record.write(RankOutcome.FINISHED)
    leave()


if __name__ == "__main__":
    sys.exit(main())
