"""Commands that the harness forks are what it would have started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import forked_cli
import forked_ranks
import psutil
import pytest
from forked_cli import ForkedCommand
from harness import Kgorch, processes_of, wait_until


def test_a_forked_command_is_a_process_like_a_new_one(kgorch: Kgorch):
    """Its words, environment, folder and session; nothing of the server's but what it has imported."""
    plan = kgorch.plan(args={"epochs": 10_000, "sleep": 0.05})
    environ = kgorch.env() | {"SOME": "thing"}
    process = forked_cli.popen(
        kgorch.command("start", str(plan)), env=environ, cwd=kgorch.folder, stdout=subprocess.PIPE
    )
    kgorch.started.append(process)
    assert type(process) is ForkedCommand
    seen = psutil.Process(process.pid)
    kgorch.wait_for_step(1)
    assert seen.cmdline()[: len(kgorch.command("start", str(plan)))] == kgorch.command("start", str(plan))
    assert {name: value for name, value in seen.environ().items() if name in environ} == environ
    assert seen.cwd() == str(kgorch.folder) and os.getsid(process.pid) == process.pid
    opened = {str(Path(f"/proc/{process.pid}/fd/{number}").readlink()) for number in range(3)}
    assert len(opened) == 3, "its own three streams"
    assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    assert process.wait(timeout=20) == -signal.SIGKILL == process.poll()
    wait_until(lambda: not psutil.pid_exists(process.pid), what="the server has waited for it")


@pytest.mark.parametrize(("words", "code"), [(["version"], 0), (["nothing"], 2), (["status"], 2)])
def test_what_it_prints_and_its_exit_status_are_those_of_a_new_process(kgorch: Kgorch, words, code):
    options = {"cwd": kgorch.folder, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with forked_cli.popen(kgorch.command(*words), env=kgorch.env(), **options) as forked:
        texts = forked.communicate(timeout=60)
    new = subprocess.run(kgorch.command(*words), env=kgorch.env(), text=True, timeout=60, **options)
    assert (forked.returncode, *texts) == (new.returncode, new.stdout, new.stderr) and new.returncode == code


def test_where_python_would_start_otherwise_a_command_is_a_new_process(kgorch: Kgorch):
    with forked_cli.popen(
        kgorch.command("version"), env=kgorch.env() | {"TZ": "Asia/Tokyo"}, stdout=subprocess.PIPE
    ) as new:
        assert type(new) is subprocess.Popen and sys.version.split()[0] in new.communicate(timeout=60)[0]


def test_the_server_belongs_to_no_state_folder(monkeypatch, tmp_path):
    """Else the first test that starts it ends it with its own processes, and no later command can be forked."""
    monkeypatch.setenv("KGORCH_HOME", str(tmp_path))
    made = forked_cli.Server()
    try:
        assert not processes_of(tmp_path)
    finally:
        made.close()


def test_ranks_without_a_supervisor_are_forked_unless_pytorch_would_start_otherwise():
    usual = {**os.environ, **forked_ranks.THREADS}
    with contextlib.closing(
        forked_ranks.server.__wrapped__()
    ) as server:  # no test before has changed the environment since
        assert server.can_fork(usual)
        assert not server.can_fork(usual | {"OMP_NUM_THREADS": "2"})
        assert not server.can_fork(usual | {"CUDA_VISIBLE_DEVICES": "1"})
