"""Memory that fills up takes a rung before it runs out, and long room undoes it. Driver and allocator are the tests' own."""

from __future__ import annotations

import json
import signal

import pytest
from driver import MIB, build
from harness import wait_until


@pytest.mark.slow
def test_memory_that_fills_up_takes_a_rung_and_room_undoes_it_until_it_was_in_vain_twice(kgorch, tmp_path):
    driver = build(tmp_path)
    kgorch.extra_env |= driver.env
    driver.set(0, mem_used=5000 * MIB)
    needed = tmp_path / "needed"

    def need(share: float) -> None:
        (tmp_path / "new").write_text(str(share))
        (tmp_path / "new").rename(needed)

    need(0.6)
    extra = '[memory]\nmicrobatch = 16\nladder = ["microbatch/2"]\nclimb = "3s"'
    plan = kgorch.plan(
        "hungry.py", ranks=2, args={"epochs": 100_000, "pause": 0.02, "allocator": str(needed)}, extra=extra
    )
    session = kgorch.background("start", str(plan))
    kgorch.wait_for_step(3)

    def taken() -> list[tuple[str, bool]]:
        return [(item["facts"]["rung"], item["facts"]["up"]) for item in kgorch.events("rung_taken")]

    down, up = ("microbatch/2", False), ("one rung up", True)
    for number in range(2):
        need(0.98)
        wait_until(lambda: taken() == [down, up] * number + [down], within_s=90, what="down")  # noqa: B023
        need(0.2)
        if number == 0:
            wait_until(lambda: taken() == [down, up], within_s=90, what="up")
    status = kgorch.status()
    assert status["memory"]["microbatch"] == 8
    assert [item["facts"]["order"] for item in kgorch.events("memory_watch")] == ["down", "up", "down"]
    said = [rung["why"] for rung in status["memory"]["rungs"]]
    assert said == ["memory is nearly full", "there has been room for long", "memory is nearly full"]

    session.send_signal(signal.SIGINT)
    session.wait(60)
    manifest = json.loads((kgorch.checkpoints()[-1] / "manifest.json").read_text())
    assert manifest["versions"]["microbatch"] == "8"
    kgorch.background("start", str(plan))  # what worked is in force from the first step
    wait_until(lambda: kgorch.status()["step"] > manifest["position"]["step"] + 3)
    assert (kgorch.attempt() / "rank0.log").read_text().splitlines()[0].split()[3] == "8"
