"""Ranks that torchrun forks from a process which has imported PyTorch: each has what a new process would have."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import psutil
import pytest
from harness import PROGRAMS, Kgorch, wait_until

from kgorch.system import process_title
from kgorch.system.process_identity import name_rank, rank_of
from kgorch.worker.elastic_agent import ForkedRank


def trained(kgorch: Kgorch, launcher: str) -> tuple[list[dict], bytes]:
    """What both ranks have told, and the weights."""
    plan = kgorch.plan("tells_of_itself.py", ranks=2)
    plan.write_text(plan.read_text().replace("ranks = 2", f'ranks = 2\nlauncher = "{launcher}"'))
    kgorch("start", str(plan))
    outputs = next(kgorch.home.glob("runs/test/1/outputs"))
    assert sorted(path.name for path in outputs.glob("exit*")) == ["exit0", "exit1"], "functions of atexit have run"
    for log in kgorch.home.glob("runs/test/1/attempts/1.1/rank?.log"):
        assert "printed by C" in log.read_text() and log.read_text().endswith("without a new line")
    return [json.loads((outputs / f"facts{rank}.json").read_text()) for rank in (0, 1)], kgorch.export()


def test_a_forked_rank_has_what_a_new_process_has_and_trains_to_the_same_bits(tmp_path):
    forked, plain = Kgorch(tmp_path / "a", tmp_path / "a" / "home"), Kgorch(tmp_path / "b", tmp_path / "b" / "home")
    forked.folder.mkdir()
    plain.folder.mkdir()
    of_forked, weights = trained(forked, "torchrun")
    of_plain, expected = trained(plain, "torchrun-cli")
    assert weights == expected
    assert [facts.pop("imported") for facts in (*of_forked, *of_plain)] == [True, True, False, False]
    draws = [facts.pop("draws") for facts in (*of_forked, *of_plain)]
    assert len({draw for pair in draws for draw in pair}) == 8, "no two processes draw the same"
    for facts in (*of_forked, *of_plain):
        assert facts["variables"].pop("TORCHELASTIC_RUN_ID")
    assert of_forked == of_plain
    assert [facts["variables"]["RANK"] for facts in of_forked] == ["0", "1"]
    assert of_forked[0]["spawned"] == [0, 1, 2]


def agent(program: str, ranks: int, **variables: str) -> subprocess.CompletedProcess[str]:
    """A program that is the agent of so many ranks, to its end."""
    words = ["--standalone", f"--nproc-per-node={ranks}", "-m", "kgorch.worker.entry"]
    return subprocess.run(
        [sys.executable, "-c", program, *words], cwd=PROGRAMS, env={**os.environ, **variables}, capture_output=True,
        text=True, timeout=60,
    )  # fmt: skip


def test_where_torchrun_has_used_cuda_a_rank_is_a_new_process():
    """No GPU here: the answer of PyTorch is the only thing that is put in its place."""
    program = (
        "import sys, torch\n"
        "torch.cuda._is_in_bad_fork = lambda: True\n"
        "from kgorch.worker import elastic_agent\n"
        "elastic_agent.main()\n"
    )
    done = agent(program, ranks=2)
    # without a launch file the program of the ranks says so and ends with 2: it was the real one that ran. torchrun may end the
    # other rank before that has come so far.
    assert "kgorch.worker.entry is started by kgorch, through torchrun" in done.stderr and done.returncode == 1
    assert "exitcode: 2" in done.stderr.replace(" : ", ": ")


def test_ranks_are_forked_before_torchrun_has_asked_cuda_or_has_threads():
    """torchrun asks CUDA where GPUs may be, after which no fork can use it; and a rank that was forked while a thread of torchrun
    looked up a name hung at its own first look-up: who held the lock was not there."""
    program = (
        "import os, socket, torch\n"
        "asked = []\n"
        "torch.cuda.is_available = lambda: asked.append(os.getpid()) or False\n"
        "real, seen = os.fork, []\n"
        "os.fork = lambda: seen.append((list(asked), len(os.listdir('/proc/self/task')))) or real()\n"
        "from kgorch.worker import elastic_agent, entry\n"
        "def rank():\n"
        "    socket.getaddrinfo('localhost', 1)\n"
        "    os.write(1, f'a rank {asked}\\n'.encode())  # one call: the ranks share the stream\n"
        "    return 0\n"
        "entry.main = rank\n"
        "try:\n"
        "    elastic_agent.main()\n"
        "finally:\n"
        "    print(seen, bool(asked), flush=True)\n"
    )
    done = agent(program, ranks=3)
    assert done.returncode == 0, done.stderr
    *ranks, agents = done.stdout.splitlines()
    assert ranks == ["a rank []"] * 3 and agents == f"{[([], 1)] * 3} True"


def test_a_rank_more_than_wait_is_a_new_process():
    program = (
        "from kgorch.worker import elastic_agent\n"
        "fork_ranks = elastic_agent.fork_ranks\n"
        "elastic_agent.fork_ranks = lambda words: fork_ranks(['--nproc-per-node=auto'])\n"
        "elastic_agent.main()\n"
    )
    done = agent(program, ranks=1)
    assert "kgorch.worker.entry is started by kgorch, through torchrun" in done.stderr and done.returncode == 1


def test_in_the_place_of_a_rank_that_was_killed_while_it_waited_comes_a_new_process():
    program = (
        "import os\n"
        "from kgorch.worker import elastic_agent\n"
        "fork_ranks = elastic_agent.fork_ranks\n"
        "def killed(words):\n"
        "    fork_ranks(words)\n"
        "    [rank] = elastic_agent._waiting\n"
        "    rank.kill()\n"
        "    os.waitid(os.P_PID, rank.pid, os.WEXITED | os.WNOWAIT)\n"
        "elastic_agent.fork_ranks = killed\n"
        "elastic_agent.main()\n"
    )
    done = agent(program, ranks=1)
    assert "kgorch.worker.entry is started by kgorch, through torchrun" in done.stderr and done.returncode == 1
    assert "BrokenPipeError" not in done.stderr


def test_a_rank_that_waits_has_a_process_group_already():
    """torchrun signals that of each rank that it has started, and stops at the first one that has none."""
    program = "import os\nfrom kgorch.worker import elastic_agent\nelastic_agent.fork_ranks(['--nproc-per-node=1'])\n"
    program += "print(elastic_agent._waiting[0].pid, flush=True)\ninput()"
    with subprocess.Popen(
        [sys.executable, "-c", program], cwd=PROGRAMS, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        pid = int(process.stdout.readline())
        wait_until(lambda: os.getpgid(pid) == pid, what="a group of its own")
        process.communicate(b"\n", timeout=20)


def test_what_pytorch_logs_into_a_file_comes_into_no_other_file_of_a_rank(tmp_path):
    """PyTorch opens it when it is imported, and a forked process closes what it has inherited."""
    program = (
        "import logging, os\n"
        "from kgorch.worker import elastic_agent, entry\n"
        "def rank():\n"
        f"    own = [open(f'{tmp_path}/own{{number}}', 'w') for number in range(100)]\n"
        "    logging.getLogger('torch.distributed').error('told by a rank')\n"
        "    os._exit(sum(os.path.getsize(file.name) for file in own) > 0)\n"
        "entry.main = rank\n"
        "elastic_agent.main()\n"
    )
    log = tmp_path / "torch.log"
    done = agent(program, ranks=1, TORCH_LOGS_OUT=str(log))
    assert done.returncode == 0, done.stderr
    assert "told by a rank" in log.read_text()


@pytest.mark.parametrize("is_safe", [False, True])
def test_a_forked_agent_finds_modules_where_a_new_process_does(tmp_path, is_safe):
    program = (
        "import os, sys\n"
        "from kgorch.worker import elastic_agent\n"
        "elastic_agent.main = lambda: print(sys.path[:2], flush=True)\n"
        "command = [sys.executable, '-m', elastic_agent.__name__]\n"
        f"agent = elastic_agent.fork(command, env={{}}, cwd={str(tmp_path)!r}, stdout=sys.stdout, preexec_fn=lambda: None)\n"
        "os.waitpid(agent.pid, 0)\n"
    )
    environ = {**os.environ, **process_title.room(), "PYTHONPATH": "/first"} | (
        {"PYTHONSAFEPATH": "1"} if is_safe else {}
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=PROGRAMS, env=environ, capture_output=True, text=True, timeout=60
    )
    first, second = json.loads(done.stdout.replace("'", '"'))
    assert (first == "/first") if is_safe else (first, second) == (str(tmp_path), "/first"), done.stderr


def test_ranks_that_wait_end_with_an_agent_that_starts_none():
    program = "import os\nfrom kgorch.worker import elastic_agent\nelastic_agent.fork_ranks(['--nproc-per-node=2'])\n"
    program += "print(*[rank.pid for rank in elastic_agent._waiting], flush=True)\nos.kill(os.getpid(), 9)"
    done = subprocess.run([sys.executable, "-c", program], cwd=PROGRAMS, capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGKILL
    wait_until(lambda: not any(psutil.pid_exists(int(pid)) for pid in done.stdout.split()), what="they end")


def started(code: str) -> ForkedRank:
    """A child that is what the agent takes for a rank, and executes `code` in its place."""
    rank = object.__new__(ForkedRank)
    process = subprocess.Popen([sys.executable, "-c", code])
    rank.args, rank.returncode, rank.pid = ["rank"], None, process.pid
    process.returncode = 0  # it is waited for here
    return rank


def test_what_torchrun_does_for_many_nodes_is_left_out_and_its_names_are_the_same(tmp_path):
    program = tmp_path / "agent.py"
    program.write_text(
        "import inspect, time\n"
        "from torch.distributed.elastic.rendezvous import dynamic_rendezvous as them\n"
        "from kgorch.worker import elastic_agent\n"
        "def outer(): return inner()\n"
        "def inner(): return them.get_method_name(), them.get_method_name(depth=1)\n"
        "before = outer()\n"
        "elastic_agent.adapt_torchrun()\n"
        "inspect.stack = None\n"
        "assert outer() == before == ('outer', 'inner'), (outer(), before)\n"
        "slept = []\n"
        "time.sleep = slept.append\n"
        "them._delay(seconds=(0.2, 0.3))\n"
        "them._delay(seconds=1)\n"
        "assert slept == [1], slept\n"
    )
    done = subprocess.run([sys.executable, str(program)], cwd=PROGRAMS, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_the_end_of_a_rank_is_told_as_popen_tells_it():
    assert started("raise SystemExit(7)").wait(timeout=20) == 7
    sleeps = started("import time; time.sleep(60)")
    assert sleeps.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        sleeps.wait(timeout=0.1)
    sleeps.terminate()
    assert sleeps.wait() == -signal.SIGTERM
    sleeps.kill()  # of one that is over: nothing
    assert sleeps.poll() == -signal.SIGTERM


def test_a_rank_is_known_by_its_name_and_else_by_its_environment():
    named = subprocess.Popen([sys.executable, "-c", f"{_NAMED}; name_rank(3); print(1, flush=True); input()"],
                             stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip
    other = subprocess.Popen([sys.executable, "-c", "print(1, flush=True); input()"], env={"RANK": "5"},
                             stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip
    for process in (named, other):
        process.stdout.readline()
    assert (rank_of(named.pid), rank_of(other.pid)) == (3, 5)
    for process in (named, other):
        process.communicate(b"\n", timeout=20)
    assert rank_of(named.pid) is None


_NAMED = f"from {name_rank.__module__} import name_rank"
