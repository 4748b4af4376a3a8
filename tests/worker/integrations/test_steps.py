"""A step inside a Trainer: divided when memory runs out, dropped when its loss is no number; on real ranks."""

from __future__ import annotations

import importlib.util
import json

import harness
import pytest
import ranks
import torch

from kgorch.checkpoint.folder import readable_checkpoints
from kgorch.core.memory.memory_ladder import Settings

PROGRAMS = {"transformers": "with_transformers.py", "lightning": "with_lightning.py"}
LADDER = ["microbatch/2"]


def train(monkeypatch, folder, library: str, trouble: dict | None = None, *, accumulate: int = 2, **launched):
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    monkeypatch.setenv("TROUBLE", json.dumps(trouble or {}))
    args = {"epochs": 1, "accumulate": accumulate, "out": str(folder / "out")}
    attempt = ranks.run(folder, PROGRAMS[library], 2, args, ladder=LADDER, **launched)
    assert attempt.codes == [0, 0], attempt.said()
    return attempt


CASES = [
    ("transformers", 2),
    ("lightning", 2),
    pytest.param("transformers", 1, marks=pytest.mark.soak),
    pytest.param("lightning", 1, marks=pytest.mark.soak),
]


@pytest.mark.slow
@pytest.mark.parametrize(("library", "accumulate"), CASES)
def test_a_step_that_runs_out_of_memory_on_one_rank_is_done_again_in_parts(tmp_path, monkeypatch, library, accumulate):
    trouble = {"oom": {"at": 3, "fits": 4, "rank": 1}}
    fell = train(monkeypatch, tmp_path / "fell", library, trouble, accumulate=accumulate)
    smaller = [{"step": 3, "settings": Settings(microbatch=4).as_dict()}]
    as_planned = train(monkeypatch, tmp_path / "planned", library, accumulate=accumulate, schedule=smaller)
    assert fell.weights == as_planned.weights


@pytest.mark.slow
@pytest.mark.parametrize("library", PROGRAMS)
def test_a_batch_whose_loss_is_no_number_on_one_rank_is_dropped_by_all(tmp_path, monkeypatch, library):
    trouble = {"nan": {"at": 3, "rank": 1}}
    trained = train(monkeypatch, tmp_path / "it", library, trouble, accumulate=1, health={"nan": ["skip"]})
    [[_, described]] = readable_checkpoints(trained.folder / "checkpoints" / "train")
    assert [(change.step, change.rung) for change in described.changes] == [(3, "skip")]
    values = [torch.frombuffer(bytearray(raw), dtype=torch.float32) for raw in trained.weights.values() if len(raw) > 8]
    assert values and all(torch.isfinite(value).all() for value in values)


MOST_CALLS = {"transformers": 115, "lightning": 140}
"""Functions of kgorch's that a step calls. Each takes 1 to 2 µs, for a step leaves the processor's caches cold."""


@pytest.mark.slow
@pytest.mark.parametrize("library", PROGRAMS)
def test_a_step_calls_few_functions_of_kgorchs(tmp_path, monkeypatch, library):
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    monkeypatch.setenv("COUNTED", str(harness.PROGRAMS / PROGRAMS[library]))
    args = {"epochs": 1, "accumulate": 1, "out": str(tmp_path / "out")}
    attempt = ranks.run(tmp_path, "counted_calls.py", 1, args, ladder=LADDER, health={"nan": ["skip"]})
    assert attempt.codes == [0], attempt.said()
    [line] = attempt.lines(starting="calls ")
    assert 50 < int(line.split()[1]) <= MOST_CALLS[library]
