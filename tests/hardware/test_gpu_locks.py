"""GPUs belong to one session at a time: locks that the kernel keeps, over the tests' driver with two T4s."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from driver import build
from harness import wait_until

from kgorch.hardware import gpu_locks

HOLD = """
import json, os, sys
from pathlib import Path
from kgorch.db.rows import RunInfo
from kgorch.hardware import gpu_locks
home, name, ranks, share = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]), json.loads(sys.argv[4])
run = RunInfo(name, name, 1, "", "", "", "", [], "", "active", "", None, None)
try:
    claim = gpu_locks.acquire(home, run, {"ranks": ranks, "share": share})
except gpu_locks.GpusUnavailable as error:
    print(json.dumps(["held", str(error)]), flush=True)
    sys.exit()
free_and_shared = list(gpu_locks.count_free_and_shared(home, gpu_locks.visible_gpus({})))
print(json.dumps(["has", claim.environ.get("CUDA_VISIBLE_DEVICES"), free_and_shared]), flush=True)
for line in sys.stdin:
    child = os.fork()
    if child == 0:  # as the shim is, with the locks open
        os.setsid()
        while True: __import__("time").sleep(60)
    print(child, flush=True)
"""

ADOPT = """
import json, sys
from pathlib import Path
from kgorch.hardware import gpu_locks
locks = gpu_locks.reacquire(Path(sys.argv[1]), sys.argv[2], share=False)
print(flush=True)
for line in sys.stdin:
    try:
        print(getattr(locks, line.strip())(), flush=True)
    except gpu_locks.GpusUnavailable as error:
        print(error.what, flush=True)
"""


class Holders:
    def __init__(self, home, env: dict[str, str]) -> None:
        self.home, self.env, self.made = home, {**os.environ, **env}, []
        self.env.pop("CUDA_VISIBLE_DEVICES", None)

    def hold(self, name: str, ranks: int | None = 1, *, share: bool = False, **env: str):
        words = [sys.executable, "-c", HOLD, str(self.home), name, json.dumps(ranks), json.dumps(share)]
        process = subprocess.Popen(words, env=self.env | env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.made.append(process)
        return process, json.loads(process.stdout.readline())

    def adopt(self, visible: str):
        """A supervisor that has adopted a training on these GPUs; the function calls a method of its locks."""
        words = [sys.executable, "-c", ADOPT, str(self.home), visible]
        process = subprocess.Popen(words, env=self.env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.made.append(process)
        process.stdout.readline()

        def call(method: str) -> str:
            print(method, file=process.stdin, flush=True)
            return process.stdout.readline().strip()

        return call


@pytest.fixture
def driver(tmp_path):
    return build(tmp_path)


@pytest.fixture
def holders(tmp_path, driver):
    made = Holders(tmp_path / "home", driver.env)
    yield made
    for process in made.made:
        process.kill()
        process.communicate()


def test_two_runs_get_a_gpu_each_and_a_third_is_told_who_has_them(holders):
    (first, got_first), (_, got_second) = holders.hold("a"), holders.hold("b")
    assert (got_first[1], got_second[1]) == ("0", "1")
    _, (word, said) = holders.hold("c")
    assert word == "held"
    assert "GPU 0 is locked by a" in said and "GPU 1 is locked by b" in said and "kgorch queue add c" in said
    first.kill()
    first.wait()
    assert holders.hold("c")[1][1] == "0"


def test_a_run_of_two_gpus_needs_both(holders):
    first, _ = holders.hold("a")
    assert holders.hold("two", 2)[1][0] == "held"
    first.kill()
    first.wait()
    assert holders.hold("two", 2)[1] == ["has", None, [0, 0]], "all that are visible: nothing is hidden"
    assert holders.hold("auto", None)[1][0] == "held"


def test_the_gpus_that_were_visible_before_are_all_there_is(holders):
    assert holders.hold("a", 1, CUDA_VISIBLE_DEVICES="1")[1][1] == "1"
    assert holders.hold("b", 1, CUDA_VISIBLE_DEVICES="GPU-00000001-0000")[1][0] == "held", "the same by another name"
    assert holders.hold("c", None, CUDA_VISIBLE_DEVICES="")[1] == ["has", "", [1, 0]], "no GPU is wanted"


def test_runs_that_share_use_one_gpu_beside_one_another_and_no_other_run_does(holders):
    holders.hold("alone")
    assert [holders.hold(name, share=True)[1][1] for name in ("b", "c")] == ["1", "1"]
    _, (word, said) = holders.hold("d")
    assert word == "held" and "is locked by" in said and "(shared)" in said


def test_training_holds_its_gpus_after_its_supervisor_was_killed(holders):
    first, _ = holders.hold("a", 2)
    print("", file=first.stdin, flush=True)
    training = int(first.stdout.readline())
    try:
        first.kill()
        first.wait()
        assert holders.hold("b")[1][0] == "held"
    finally:
        os.kill(training, 9)
    wait_until(lambda: holders.hold("b")[1][0] == "has")


def test_while_the_driver_is_silent_no_run_takes_gpus_that_may_be_anothers(holders, driver):
    holders.hold("a", 2)
    driver.fail("nvmlDeviceGetCount_v2", "unknown")
    _, (word, said) = holders.hold("b")
    assert word == "held" and "next: run nvidia-smi to see what is wrong; then kgorch resume b" in said


def test_who_adopts_while_the_driver_is_silent_launches_nothing_without_locks(holders, driver):
    driver.fail("nvmlDeviceGetCount_v2", "unknown")
    call = holders.adopt("1")
    assert call("check") == "the GPUs of this machine cannot be listed: the driver does not answer"
    driver.heal()
    other, _ = holders.hold("a", CUDA_VISIBLE_DEVICES="1")
    assert call("check") == "another session has locked the GPUs of this session"
    other.kill()
    other.wait()
    assert call("check") == "None"
    assert holders.hold("b", CUDA_VISIBLE_DEVICES="1")[1][0] == "held"
    assert holders.hold("c")[1][1] == "0"


def test_who_adopts_while_the_driver_is_silent_has_the_locks_once_it_answers(holders, driver):
    driver.fail("nvmlDeviceGetCount_v2", "unknown")
    call = holders.adopt("0,1")
    assert call("refresh") == "None"
    driver.heal()
    assert call("refresh") == "None"
    driver.fail("nvmlDeviceGetCount_v2", "unknown")
    assert call("check") == "None", "it waits for the locks, and nothing is asked again"
    driver.heal()
    assert holders.hold("a")[1][0] == "held"


@pytest.mark.parametrize("fault", ["lost", "forbidden"])
def test_a_gpu_that_does_not_answer_is_nobodys_and_the_others_go_by_their_uuid(holders, driver, fault):
    """CUDA counts without it."""
    first, _ = holders.hold("a", 2)
    driver.set(0, **{fault: 1})
    assert holders.hold("b")[1][0] == "held"
    first.kill()
    first.wait()
    second, got = holders.hold("b", 2)
    assert got[0] == "has" and got[1].startswith("GPU-00000001-") and got[2] == [0, 0]
    assert holders.hold("c")[1][0] == "held"
    second.kill()
    second.wait()
    assert holders.hold("c", CUDA_VISIBLE_DEVICES="0,1")[1] == got


def test_without_a_driver_nothing_is_claimed(tmp_path, holders):
    for variable in ("LD_LIBRARY_PATH", "KGORCH_TEST_DRIVER"):
        holders.env.pop(variable)
    assert holders.hold("a", 2)[1][0] == holders.hold("b", 2)[1][0] == "has"
    assert not (holders.home / "devices").exists()


T4S = [gpu_locks.LockableGpu(f"GPU-{index}", str(index)) for index in range(2)]


@pytest.mark.parametrize("order", [None, "FASTEST_FIRST"])
@pytest.mark.parametrize(("devices", "visible"), [(T4S, None), (T4S[1:], "1")])
def test_cuda_counts_as_nvml_does_whatever_a_person_has_set(order, devices, visible):
    environ = {} if order is None else {"CUDA_DEVICE_ORDER": order}
    environ |= gpu_locks.cuda_variables(devices, T4S, environ)
    assert environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert environ.get("CUDA_VISIBLE_DEVICES") == visible


def test_entries_are_handed_on_as_they_were_read(holders):
    assert (
        holders.hold("a", 2, CUDA_VISIBLE_DEVICES=" GPU-00000001 , GPU-00000000,")[1][1] == "GPU-00000001,GPU-00000000"
    )


def test_a_gpu_that_cuda_would_not_see_is_not_claimed(holders):
    assert holders.hold("a", None, CUDA_VISIBLE_DEVICES="1,7,0")[1] == ["has", "1", [1, 0]]
    assert holders.hold("b", 1, CUDA_VISIBLE_DEVICES="0")[1][0] == "has"
