"""torchrun in a process that forks its ranks: they begin with PyTorch and the SDK imported, instead of importing them again each.

Run as `python -m kgorch.worker.elastic_agent` with torchrun's own words after it. Everything is torchrun's own but the start
of a rank's process: the rendezvous, the variables of the ranks, their supervision and the report of what failed.

The ranks are forked before torchrun begins, and wait until it starts them. Later it has threads, and a fork keeps the locks that
these hold: a rank that was forked while one looked up a name waited for ever at its own first look-up. Nor has torchrun used CUDA
by then, which no fork could use after it.

A rank gets what a new process would have: its own session, default signal handlers, only the standard streams, its own random
numbers, and nothing of the agent's threads and sockets. Where the agent's process has used CUDA all the same, torchrun binds ranks
to NUMA nodes, or more ranks are started than wait, a rank is a new process.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, BinaryIO, NoReturn

import torch._dynamo  # a DDP and an optimizer import it at their first use, in each rank for a second
import torch.distributed.run
import torch.nn.parallel
import torch.optim
import torch.utils.data
from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler
from torch.distributed.elastic.rendezvous import dynamic_rendezvous

import kgorch.worker.session  # noqa: F401
from kgorch.system import files, process_title
from kgorch.system.process_identity import name_rank
from kgorch.worker import entry

POLL_S = 0.02
"""Seconds between two looks at a rank whose end is waited for."""


class ForkedRank:
    """A forked process that waits to become a rank, with what torchrun uses of subprocess.Popen.

    Attributes:
        returncode: exit status, negative for a signal; None while it runs.
    """

    def __init__(self) -> None:
        self.args: Sequence[str] = ()
        self.returncode: int | None = None
        self._order, theirs = socket.socketpair()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            _wait_for_order(theirs)
        theirs.close()

    def begin(self, command: Sequence[str], env: Mapping[str, str], stdout: Any, stderr: Any) -> None:
        """Be what `command` would start. The streams have a file number each, or are None for the agent's own.

        Raises: OSError when the process has ended while it waited.
        """
        streams = {number: stream.fileno() for number, stream in ((1, stdout), (2, stderr)) if stream}
        order = json.dumps([list(command), dict(env), list(streams)]).encode()
        with self._order:
            socket.send_fds(self._order, [len(order).to_bytes(8, "big")], list(streams.values()))
            self._order.sendall(order)
        self.args = command

    def poll(self) -> int | None:
        """The exit status, None while it runs."""
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # somebody else has waited for it
                self.returncode = 1
            else:
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Raises: subprocess.TimeoutExpired."""
        until_s = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if until_s is not None and time.monotonic() >= until_s:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            time.sleep(POLL_S)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _wait_for_order(orders: socket.socket) -> NoReturn:
    """In the child: wait for what `begin` sends, leave the agent behind, and be a rank. It ends with an agent that starts none."""
    try:
        os.setsid()  # before the order: torchrun signals the process group of each rank that it has started
        _close_files(keep=[orders.fileno()])
        head, streams, _, _ = socket.recv_fds(orders, 8, 2)
        if not head:
            os._exit(0)
        with orders.makefile("rb") as file:
            command, env, numbers = json.loads(file.read(int.from_bytes(head, "big")))
        for number, stream in zip(numbers, streams, strict=True):
            os.dup2(stream, number)
        _reset_signals()
        os.environ.clear()
        os.environ.update(env)
        _close_files()
        if torch.cuda._is_in_bad_fork():
            os.execve(command[0], command, env)
        name_rank(int(env["RANK"]))
        _draw_anew()
        entry.leave(entry.main())
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _close_files(keep: Container[int] = ()) -> None:
    """All but the standard streams. Log files (TORCH_LOGS_OUT) are opened again under another number by what logs next."""
    logging.shutdown()
    files.close_inherited(keep)


def _reset_signals() -> None:
    """As exec does: what has a handler gets its default again, what is ignored stays ignored."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _draw_anew() -> None:
    """Generators that are seeded when they are imported would draw the same in every rank. Python's own sees to it itself."""
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()


_waiting: list[ForkedRank] = []


def _start(handler: SubprocessHandler, args: tuple[str, ...], env: dict[str, str]) -> Any:
    """In the place of SubprocessHandler._popen."""
    while _waiting and args[0] == sys.executable and args[-2:] == ("-m", "kgorch.worker.entry"):
        rank = _waiting.pop(0)
        with contextlib.suppress(OSError):  # it was killed while it waited
            rank.begin(args, env, handler._stdout, handler._stderr)
            return rank
        rank.wait()
    return _popen(handler, args, env)  # with words in front of it, as numactl's


_popen = SubprocessHandler._popen


def _method_name(depth: int = 2) -> str:
    """In the place of torchrun's, which reads the source of every frame of the stack for it: 0.2 s until the ranks are started."""
    return sys._getframe(depth).f_code.co_name


def _delay(seconds: float | tuple[float, float]) -> None:
    """In the place of torchrun's, whose first one is of up to 0.3 s, so that not all nodes join at once: here is one."""
    if not isinstance(seconds, tuple):
        time.sleep(seconds)


def adapt_torchrun() -> None:
    """Replace the start of a rank, and what torchrun does for the rendezvous of many nodes.

    On several nodes kgorch has another rendezvous (launch/shim.py).
    """
    for name, ours in (("get_method_name", _method_name), ("_delay", _delay)):
        if hasattr(dynamic_rendezvous, name):
            setattr(dynamic_rendezvous, name, ours)
    SubprocessHandler._popen = _start  # type: ignore[assignment,method-assign]


class ForkedAgent:
    """An agent that is forked from a process which has imported this module; see `fork`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid


def fork(
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: str,
    stdout: BinaryIO,
    preexec_fn: Callable[[], object],
    **options: Any,
) -> ForkedAgent | subprocess.Popen[bytes]:
    """subprocess.Popen, but where the command runs this module it is forked from this process, which has imported it.

    Args:
        stdout: takes both outputs of a forked one.
        options: further ones of Popen. A forked one has a session of its own and nothing to read.
    """
    if list(command[:3]) != [sys.executable, "-m", __spec__.name] or not process_title.fits(env):
        return subprocess.Popen(command, env=env, cwd=cwd, stdout=stdout, preexec_fn=preexec_fn, **options)
    pid = os.fork()
    if pid == 0:
        _become_agent(command, env, cwd, stdout, preexec_fn)
    return ForkedAgent(pid)


def _become_agent(
    command: Sequence[str], env: Mapping[str, str], cwd: str, output: BinaryIO, prepare: Callable[[], object]
) -> NoReturn:
    """In the child: be what `command` would start."""
    status = 1
    try:
        os.setsid()
        prepare()
        for number in (1, 2):
            os.dup2(output.fileno(), number)
        _close_files()
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.chdir(cwd)
        if not sys.flags.safe_path:
            sys.path[0] = cwd  # as `python -m` does
        process_title.replace(command, env)
        sys.argv = list(command[2:])
        main()
        status = 0
    except SystemExit as system_exit:
        status = system_exit.code if isinstance(system_exit.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        entry.leave(status)


def share_memory() -> None:
    """What forked processes share is not copied because a collection has marked it."""
    gc.collect()
    gc.freeze()


def fork_ranks(words: Sequence[str]) -> None:
    """Fork as many ranks as torchrun's words ask for."""
    counts = [word.partition("=")[2] for word in words if word.startswith("--nproc-per-node=")]
    _waiting[:] = [ForkedRank() for _ in range(int(counts[0]) if counts and counts[0].isdecimal() else 0)]


def main() -> None:
    share_memory()
    fork_ranks(sys.argv[1:])
    adapt_torchrun()
    torch.distributed.run.main(sys.argv[1:])


if __name__ == "__main__":
    main()
