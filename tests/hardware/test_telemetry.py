"""Telemetry with the real pynvml, which loads a driver of the tests' own (tests/driver), and in a real supervised training."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from datetime import datetime, timedelta

import pytest
from driver import MIB, build
from harness import wait_until

from kgorch.core import cuda_visible
from kgorch.db import runs, samples, sessions
from kgorch.db.engine import open_database
from kgorch.db.samples import MINUTE, SECOND
from kgorch.hardware import nvml

HOUR = timedelta(hours=1)
ASK = """
import json, queue, sys, time
from kgorch.hardware import gpu_monitor
notes = queue.SimpleQueue()
asker = gpu_monitor.GpuMonitor(lambda kind, facts: notes.put((kind, facts)), hang_s=2.0, again_s=0.5)
for line in sys.stdin:
    told = []
    asker.check()
    while not notes.empty():
        told.append(notes.get())
    print(json.dumps([asker.values(), told, len(asker._hung_threads)]), flush=True)
"""


class Asked:
    """`Gpus` in a process of its own, looked after whenever the test looks."""

    def __init__(self, env: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", ASK],
            env={**os.environ, **env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.told: list[tuple[str, dict]] = []
        self.hanging = 0

    def look(self) -> dict[str, float]:
        print("", file=self.process.stdin, flush=True)
        values, told, self.hanging = json.loads(self.process.stdout.readline())
        self.told += [(kind, facts) for kind, facts in told]
        return values

    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.told]


@pytest.fixture
def asked():
    made: list[Asked] = []

    def begin(env: dict[str, str]) -> Asked:
        made.append(Asked(env))
        return made[-1]

    yield begin
    for item in made:
        item.process.kill()
        item.process.communicate()


def test_what_the_driver_tells_of_each_gpu(tmp_path, asked):
    driver = build(tmp_path)
    driver.set(1, mem_used=12000 * MIB, util=87, temp_c=71, power_mw=64_500, throttle=36, ecc=2, processes=3)
    ask = asked(driver.env)
    values = wait_until(ask.look)
    assert {key: value for key, value in values.items() if key.startswith("gpu1.")} == {
        "gpu1.mem_used": 12000 * MIB,
        "gpu1.mem_total": 15360 * MIB,
        "gpu1.util": 87,
        "gpu1.temp_c": 71,
        "gpu1.power_w": 64.5,
        "gpu1.power_limit_w": 70,
        "gpu1.sm_mhz": 1590,
        "gpu1.mem_mhz": 5000,
        "gpu1.throttle": 36,
        "gpu1.ecc": 2,
        "gpu1.processes": 3,
    }
    assert values["gpu0.mem_used"] == 3 * MIB
    driver.set(0, mem_used=9000 * MIB)
    wait_until(lambda: ask.look()["gpu0.mem_used"] == 9000 * MIB)
    assert ask.told == []


def test_what_a_driver_does_not_tell_is_absent_and_an_older_name_of_a_function_is_known(tmp_path, asked):
    driver = build(tmp_path, absent=["nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetTotalEccErrors"])
    driver.fail("nvmlDeviceGetPowerUsage", "not_supported")
    driver.fail("nvmlDeviceGetClockInfo", "function_not_found")
    driver.fail("nvmlEventSetCreate", "not_supported")
    ask = asked(driver.env)
    values = wait_until(ask.look)
    assert {key for key in values if key.startswith("gpu0.")} == {
        f"gpu0.{name}" for name in ("mem_used", "mem_total", "util", "temp_c", "power_limit_w", "throttle", "processes")
    }
    assert ask.told == []


def test_a_call_that_hangs_is_left_behind_told_once_and_the_driver_tried_again(tmp_path, asked):
    driver = build(tmp_path)
    ask = asked(driver.env)
    wait_until(ask.look)
    driver.fail("nvmlDeviceGetUtilizationRates", "hang")
    wait_until(lambda: ask.look() is not None and ask.told)
    [(kind, facts)] = ask.told
    assert kind == "telemetry_lost" and facts["why"].startswith("nvmlDeviceGetUtilizationRates has not returned")
    assert ask.look() == {}
    wait_until(lambda: ask.look() is not None and ask.hanging >= 2, what="a second try")
    driver.heal()
    assert wait_until(ask.look)["gpu0.util"] == 0
    wait_until(lambda: ask.look() is not None and ask.kinds() == ["telemetry_lost", "telemetry_back"])
    wait_until(lambda: ask.look() is not None and ask.hanging == 0, what="those left behind have ended")


def test_a_gpu_that_is_lost_and_an_xid_are_told_once_each_and_the_other_gpu_goes_on(tmp_path, asked):
    driver = build(tmp_path)
    ask = asked(driver.env)
    wait_until(lambda: "gpu0.util" in ask.look())
    driver.set(0, lost=1)
    driver.set(1, xid=79)
    wait_until(lambda: ask.look() is not None and len(ask.told) == 2)
    assert sorted(ask.told) == [("gpu_lost", {"gpu": 0}), ("gpu_xid", {"gpu": 1, "xid": 79})]
    values = wait_until(lambda: (found := ask.look()) and "gpu0.util" not in found and found)
    assert "gpu1.util" in values
    driver.heal()
    wait_until(lambda: "gpu0.util" in ask.look())
    assert len(ask.told) == 2


@pytest.mark.parametrize(
    ("fault", "visible", "told"),
    [
        ("lost", None, [("gpu_lost", {"gpu": 0})]),
        ("lost", "1", []),
        ("forbidden", None, []),
        ("forbidden", "0,1", []),
    ],
)
def test_a_gpu_without_a_handle_from_the_start_costs_the_others_nothing(tmp_path, asked, fault, visible, told):
    driver = build(tmp_path)
    driver.set(0, **{fault: 1})
    ask = asked(driver.env | ({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}))
    values = wait_until(ask.look)
    assert "gpu1.util" in values and "gpu0.util" not in values
    assert ask.told == told
    if visible != "1":
        driver.heal()
        wait_until(lambda: "gpu0.util" in ask.look())


def test_without_a_driver_or_with_one_that_is_not_loaded_nothing_is_said(tmp_path, asked):
    driver = build(tmp_path)
    driver.fail("nvmlInitWithFlags", "not_loaded")
    ask = asked(driver.env)
    until = time.monotonic() + 1.5
    while time.monotonic() < until:
        assert ask.look() == {} and ask.told == []
        time.sleep(0.1)


@pytest.mark.parametrize("fault", ["the driver", "all GPUs"])
def test_a_driver_that_fails_otherwise_is_told_once_and_tried_again(tmp_path, asked, fault):
    driver = build(tmp_path)
    if fault == "the driver":
        driver.fail("nvmlDeviceGetCount_v2", "unknown")
    else:
        for gpu in (0, 1):
            driver.set(gpu, forbidden=1)
    ask = asked(driver.env)
    wait_until(lambda: ask.look() is not None and ask.told)
    driver.heal()
    assert wait_until(ask.look)
    wait_until(lambda: ask.look() and len(ask.told) > 1)
    assert ask.kinds() == ["telemetry_lost", "telemetry_back"]


@pytest.mark.parametrize(
    ("visible", "expected"),
    [(None, [0, 1]), ("", []), ("-1", []), ("1", [1]), ("1, 0", [0, 1]), ("GPU-b", [1]), ("MIG-x", [0, 1]), ("7", [])],
)
def test_the_gpus_that_cuda_would_see(visible, expected):
    assert cuda_visible.indices([0, 1], {0: "GPU-a1", 1: "GPU-b2"}, visible) == expected


def test_a_driver_may_take_its_time_for_the_first_answer_alone(monkeypatch):
    """On a machine with several GPUs that nobody uses it initializes one after another."""
    monkeypatch.setattr(nvml, "_has_answered", False)
    monkeypatch.setattr(nvml, "_hung_call", None)

    def slow() -> str:
        time.sleep(0.4)
        return "two GPUs"

    assert nvml.query(slow, timeout_s=0.1) == "two GPUs"
    with pytest.raises(nvml.DriverUnresponsive, match=r"within 0\.1 s"):
        nvml.query(slow, timeout_s=0.1)
    time.sleep(0.5)  # the call that was left behind ends


def test_memory_asked_for_just_now_waits_for_no_driver_that_hangs(tmp_path):
    driver = build(tmp_path)
    driver.set(1, mem_used=77 * MIB)
    program = (
        "import sys, time; from kgorch.hardware import nvml\n"
        "from kgorch.hardware.devices import used_memory, visible_gpu_count\n"
        "print(used_memory({}), used_memory({'CUDA_VISIBLE_DEVICES': '7'}), visible_gpu_count({}), flush=True)\n"
        "sys.stdin.readline()\n"
        "nvml.query.__kwdefaults__['timeout_s'] = 0.3\n"
        "began = time.monotonic(); print(used_memory({'CUDA_VISIBLE_DEVICES': '1'}), time.monotonic() - began >= 0.3)\n"
        "nvml.query.__kwdefaults__['timeout_s'] = 1000\n"
        "print(used_memory({}))\n"
        "try: visible_gpu_count({})\n"
        "except nvml.DriverUnresponsive as error: print(error)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        env={**os.environ, **driver.env},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == f"[{3 * MIB}, {77 * MIB}] None 2\n"
    driver.fail("nvmlDeviceGetMemoryInfo", "hang")
    assert process.communicate("\n", timeout=100)[0] == "None True\nNone\nthe driver hangs in an earlier call\n"


def test_a_training_shows_its_gpus_its_host_and_its_ranks_and_a_driver_that_hangs_holds_nothing_up(kgorch, tmp_path):
    driver = build(tmp_path)
    kgorch.extra_env |= driver.env
    driver.set(0, mem_used=12391 * MIB, util=87, temp_c=71, power_mw=64_000)
    plan = kgorch.plan(ranks=2, args={"epochs": 10_000, "sleep": 0.05, "workers": 1})
    kgorch.background("start", str(plan))
    kgorch.wait_for_step(3)

    def whole() -> dict[str, float] | None:
        values = (kgorch.status()["telemetry"] or {"values": {}})["values"]
        return values if {"rank0.data_wait", "rank1.data_wait", "rank0.loaders", "gpu1.util"} <= values.keys() else None

    values = wait_until(whole, what=lambda: f"a whole sample: {kgorch.status()['telemetry']}")
    assert values["gpu0.mem_used"] == 12391 * MIB
    assert 0 < values["rank1.data_wait"] < 1 and 0 < values["rank0.step_s"] < 60 and values["rank0.rss"] > 50 * MIB
    assert 0 < values["host.mem_used"] < values["host.mem_total"] and values["host.disk_free"] > 0
    assert "rank0.alloc" not in values, "no CUDA, so no figure"
    shown = kgorch("status").stdout
    assert "gpu 0       87% util, 12.1 of 15.0 GiB, 71 °C, 64 of 70 W" in shown
    assert "waiting for data" in shown and "host        cpu" in shown

    driver.fail("nvmlDeviceGetMemoryInfo", "hang")
    [lost] = wait_until(lambda: kgorch.events("telemetry_lost"))
    assert "nvmlDeviceGetMemoryInfo has not returned" in lost["facts"]["why"]
    at_loss = kgorch.status()

    def went_on() -> bool:
        now = kgorch.status()
        values = now["telemetry"]["values"]
        return now["step"] > at_loss["step"] and "gpu0.util" not in values and "rank0.step_s" in values

    wait_until(went_on)
    driver.heal()
    [back] = wait_until(lambda: kgorch.events("telemetry_back"))
    kgorch("stop", "test")

    over = kgorch.status()
    assert over["telemetry"]["span_s"] == SECOND and "host.cpu" in over["telemetry"]["values"]
    engine = open_database(kgorch.home)
    [session] = {row.session_id for row in sessions.attempts(engine, runs.newest(engine, "test").id)}
    meanwhile = samples.series(engine, session, datetime.fromisoformat(lost["at"]), SECOND)
    rows = [row for row in meanwhile if row.at < datetime.fromisoformat(back["at"])]
    assert rows and all("host.cpu" in row.values for row in rows)
    assert samples.series(engine, session, datetime.fromisoformat(over["session"]["started_at"]) - HOUR, MINUTE)
    engine.dispose()
