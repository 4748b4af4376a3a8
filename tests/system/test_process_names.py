"""The kernel cuts the name of a process at 15 bytes, also within a letter: what /proc shows need not be UTF-8."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys

import pytest

from kgorch.hardware import inventory
from kgorch.launch import attempt_processes, shim, stack_dumps
from kgorch.system import process_identity, process_title
from kgorch.worker.foreign import program
from kgorch.worker.telemetry import rank_metrics

NAME = "tải_dữ_liệu_ảnh".encode()
CATCHES = (
    "import signal; signal.signal(signal.SIGTERM, print)"  # SIGINT is ignored where the tests run in the background
)
SLEEPS = f"{CATCHES}; import ctypes, time; ctypes.CDLL(None).prctl(15, {NAME!r}); print(flush=True); time.sleep(1000)"


@pytest.fixture
def named():
    """A child process of that name, with the environment of rank 3."""
    process = subprocess.Popen([sys.executable, "-c", SLEEPS], stdout=subprocess.PIPE, env=os.environ | {"RANK": "3"})
    process.stdout.readline()
    yield process
    process.kill()
    process.communicate()


@pytest.fixture
def own_name():
    """This thread, of which /proc/self tells where it is the main one, has that name for a while."""
    libc, before = ctypes.CDLL(None), ctypes.create_string_buffer(16)
    libc.prctl(16, before)
    libc.prctl(process_identity.PR_SET_NAME, NAME)
    yield
    libc.prctl(process_identity.PR_SET_NAME, before)


def test_another_process_of_such_a_name(named):
    assert process_identity.start_ticks(named.pid)
    assert process_identity.rank_of(named.pid) == 3
    assert named.pid in shim._children()
    assert named.pid in {info.pid for info in program._all_processes()}
    assert str(named.pid) in rank_metrics._children_s()
    assert stack_dumps._catches(named.pid, signal.SIGTERM) and not stack_dumps._catches(named.pid, signal.SIGUSR2)


def test_this_process_under_such_a_name(own_name):
    assert list(attempt_processes._ancestors())[:2] == [os.getpid(), os.getppid()]
    assert rank_metrics.peak_resident_bytes() > 1 << 20
    assert process_title.fits({"A": "b"})
    assert inventory._may_trace() is not None
