"""What a rank tells of itself."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest
import torch
from harness import wait_until

from kgorch.protocol.codec import decode, encode
from kgorch.protocol.messages import RankMetrics
from kgorch.worker.telemetry.rank_metrics import ResourceMeter


def test_the_share_of_time_spent_waiting_for_data_is_of_the_time_since_it_was_read_last():
    gauges = ResourceMeter(torch.device("cpu"))
    assert "data_wait" not in gauges.read(0.0), "nothing was fetched yet"

    def batches(wait_s):
        for number in range(5):
            time.sleep(wait_s)
            yield number

    assert list(gauges.timed(batches(0.04))) == [0, 1, 2, 3, 4]
    waiting = gauges.read(0.1)
    for _ in gauges.timed(batches(0.0)):
        time.sleep(0.04)
    working = gauges.read(0.1)
    assert 0 <= working["data_wait"] < waiting["data_wait"] <= 1


def test_a_wait_that_has_no_end_yet_counts():
    gauges, come, fetched = ResourceMeter(torch.device("cpu")), threading.Event(), []
    thread = threading.Thread(target=lambda: fetched.extend(gauges.timed(come.wait() for _ in range(1))))
    thread.start()
    wait_until(lambda: gauges.read(0.0).get("data_wait", 0.0) > 0.0)
    come.set()
    thread.join()
    assert fetched == [True]


def test_an_error_of_the_loader_comes_through():
    def broken():
        yield 1
        raise OSError("the disk")

    fetched = ResourceMeter(torch.device("cpu")).timed(broken())
    assert next(fetched) == 1
    with pytest.raises(OSError, match="the disk"):
        next(fetched)


def test_a_process_that_computes_and_its_children_are_seen_and_cuda_is_not_begun():
    gauges = ResourceMeter(torch.device("cuda"))
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        until_s = time.process_time() + 0.2
        while time.process_time() < until_s:
            pass
        found = wait_until(lambda: (told := gauges.read(0.5)).get("loaders") and told)
    finally:
        child.kill()
        child.wait()
    assert found["rss"] > 1 << 20 and found["cpu"] >= 0 and found["step_s"] == 0.5
    assert "alloc" not in found and not torch.cuda.is_initialized()
    sent = RankMetrics("1.1", 0, found)
    assert decode(encode(sent).strip()) == sent
