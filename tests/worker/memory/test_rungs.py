"""What a loader is given, as far as memory allows what the script asks for."""

from __future__ import annotations

import pytest
import torch

from kgorch.protocol.launch_spec import LaunchSpec
from kgorch.protocol.messages import RemedyApplied
from kgorch.worker.memory import adjustment_log
from kgorch.worker.memory.ladder import Ladder
from kgorch.worker.session import Session


@pytest.mark.parametrize(
    ("settings", "workers", "pinned"),
    [({}, 4, True), ({"workers_divided": 2, "pin_memory": False}, 2, False), ({"workers_at_most": 0}, 0, True)],
)
def test_a_loader_gets_the_workers_and_the_pinned_memory_that_rungs_have_left(settings, workers, pinned):
    launch = LaunchSpec("r", "id", "s", "1.1", "/", "e:f", ".", 1, "s", "c", "o", "h", settings=settings)
    with Session(None, 0) as session:
        options = {"num_workers": 4, "pin_memory": True, "prefetch_factor": 3}
        options = Ladder(launch, session.device, print).loader_options(options)
        data = torch.utils.data.TensorDataset(torch.ones(8, 1))
        made = session.loader(data, 4, **options)
    assert (made._inner.num_workers, made._inner.pin_memory) == (workers, pinned)


def test_what_followed_a_rung_is_forgotten_when_another_is_taken_before_it():
    schedule = [{"step": 40, "settings": {"microbatch": 2}}, {"step": 41, "skip": True}]
    launch = LaunchSpec(
        "r", "id", "s", "1.1", "/", "e:f", ".", 1, "s", "c", "o", "h", schedule=schedule, ladder=["microbatch/2"]
    )
    told = []
    ladder = Ladder(launch, torch.device("cpu"), told.append)
    ladder.begin(0, 16)
    ladder.down(30, "memory ran out", tells=True, must=True)
    assert (ladder.next_change, ladder.settings.microbatch, told[-1].step) == (None, 8, 30)


def test_a_checkpoint_tells_every_rung_and_remedy_and_rank_0_knows_those_that_another_rank_told():
    known = {"step": 3, "rung": "skip", "why": "nan", "at": "2026-11-20T10:00:00+00:00", "settings": {"skip": True}}
    known |= {"device": "", "world": 2, "up": False, "changes_result": True}
    launch = LaunchSpec(
        "r", "id", "s", "1.1", "/", "e:f", ".", 2, "s", "c", "o", "h", ladder=["microbatch/2"], device="T4", changes=[known]
    )  # fmt: skip
    told = []
    ladder = Ladder(launch, torch.device("cpu"), told.append)
    ladder.begin(0, 16)
    ladder.down(30, "memory ran out", tells=False, must=True)
    for step in range(adjustment_log.KEPT + 5):
        ladder.changes.add(RemedyApplied("1.1", "skip", "nan", {"step": step, "skip": True}), tells=False)
    rung, *remedies = ladder.changes.entries
    assert (rung.step, rung.rung, rung.device, rung.world, rung.settings["settings"]["microbatch"]) == (
        30,
        "microbatch/2",
        "T4",
        2,
        8,
    )
    assert [item.step for item in remedies] == list(range(5, adjustment_log.KEPT + 5)), (
        "a scaler's thousands do not grow a manifest"
    )
    assert not told
