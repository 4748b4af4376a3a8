"""kgorch doctor on real trainings, and a data cache beside them."""

from __future__ import annotations

import fcntl
import json
import os
import signal
from pathlib import Path

from harness import Kgorch, processes_of, wait_until

from kgorch.services.data_cache import cache_folder


def mounted(kgorch: Kgorch, count: int = 32):
    folder = kgorch.folder / "mounted"
    folder.mkdir()
    for number in range(count):
        (folder / f"{number:03}.bin").write_bytes(bytes([number]) * (number + 1))
    return folder


def _caching(kgorch: Kgorch):
    return processes_of(kgorch.home, "kgorch.services.data_cache_process")


def test_a_training_that_waits_for_its_data_is_told_so_with_the_change_to_make(kgorch):
    mounted(kgorch)
    plan = kgorch.plan("reads.py", ranks=1, args={"epochs": 1000, "slow": 0.05}, every="600s")
    kgorch.background("start", str(plan))

    def found():
        told = json.loads(kgorch("doctor", "--json").stdout)["run"]
        return told and [
            item
            for item in told["findings"]
            if item["cause"] == "waiting_for_data" and item["figures"]["data_wait"] > 0.5
        ]

    kgorch.wait_for_step(5)
    [finding] = wait_until(found, what="a finding")
    assert finding["change"].startswith("num_workers = ")
    assert finding["figures"]["workers"] == 0 and 0 < finding["saves"] <= 1
    text = kgorch("doctor").stdout
    assert "waiting for data" in text and "data wait   " in text and "█" in text
    kgorch("stop")


def test_a_training_goes_over_to_the_copy_at_an_epochs_end_in_its_loading_processes_too(kgorch):
    source, into = mounted(kgorch), kgorch.folder / "local"
    plan = kgorch.plan(
        "reads.py",
        ranks=2,
        args={"data": "mounted", "epochs": 1000, "workers": 2, "slow": 0.02},
        every="600s",
        extra='[data]\ncache = ["mounted"]\ninto = "local"\nreserve = "1MB"',
    )
    folder = cache_folder(str(source), into)
    folder.mkdir(parents=True, mode=0o700)
    with open(
        folder / "lock", "w"
    ) as lock:  # as another run does that copies: a quick disk would have it all before the training
        fcntl.flock(lock, fcntl.LOCK_EX)
        supervisor = kgorch.background("start", str(plan))
        kgorch.wait_for_step(1)
    read = wait_until(lambda: next(iter(kgorch.home.glob("runs/*/*/outputs/read.txt")), None))

    def lines():
        return read.read_text().splitlines()

    wait_until(lambda: sum(line.startswith(f"{into}/") for line in lines()) > 100, what="reading from the copy")
    first = next(number for number, line in enumerate(lines()) if line.startswith(f"{into}/"))
    assert first >= len(list(source.iterdir())), "not in the first epoch"
    ours = lines()[first + 64 :]  # what was fetched ahead, by the other rank too
    assert ours and all(line.startswith(f"{into}/") for line in ours)
    [event] = wait_until(lambda: kgorch.events("data_cached"))  # the ranks may see the copy before it is reported
    assert event["facts"]["files"] == "32"
    assert f"{source} has a whole copy" in kgorch.status()["notices"][0]

    os.kill(kgorch.pids()["rank1"], signal.SIGKILL)
    wait_until(lambda: len(kgorch.events("launched")) == 2, what="a second launch")
    told = json.loads((kgorch.attempt() / "launch.json").read_text())
    assert Path(told["args"]["data"]).parts[: len(into.parts)] == into.parts, "an argument that names the source"
    kgorch("stop")
    assert supervisor.wait(timeout=60) == 10
    assert not _caching(kgorch), "its process ends with the session"
