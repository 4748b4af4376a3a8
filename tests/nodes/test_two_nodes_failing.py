"""What goes wrong on the second node of a training over two: memory, losses and weights that are no numbers, a rank that hangs."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from two_nodes import plan_of

pytestmark = pytest.mark.slow


def facts_of(kgorch, kind: str) -> list[dict]:
    return [event["facts"] for event in kgorch.events(kind)]


def test_a_rank_of_the_second_node_that_lacks_memory_has_both_nodes_take_the_rung(kgorch):
    args = {"at": 4, "fits": 8, "epochs": 2, "where": "backward"}
    extra = '[memory]\nladder = ["microbatch/2"]'
    kgorch("start", str(plan_of(kgorch, "hungry.py", args=args, extra=extra)))
    assert kgorch.status()["state"] == "finished"
    [taken] = facts_of(kgorch, "rung_taken")
    assert (taken["step"], taken["rung"]) == (4, "microbatch/2") and "can't allocate memory" in taken["why"], taken
    logs = [(kgorch.attempt() / f"rank{rank}.log").read_text() for rank in (0, 1)]
    assert all("microbatch 8" in log for log in logs), "both ranks compute in parts"
    [session] = kgorch.history()
    assert [attempt["outcome"] for attempt in session["attempts"]] == ["out_of_memory", "finished"]
    assert "can't allocate memory" in session["attempts"][0]["cause"]


def test_a_batch_that_is_no_number_on_the_second_node_is_left_out_and_the_bits_are_those_of_a_run_without_it(kgorch):
    def train(name: str, **args: object) -> None:
        extra = '[health]\nnan = ["skip"]'
        kgorch("start", str(plan_of(kgorch, "goes_bad.py", name=name, args={"steps": 12, **args}, extra=extra)))

    train("bad", bad=[5])
    [remedied] = facts_of(kgorch, "remedied")
    assert (remedied["remedy"], remedied["change"]["step"]) == ("skip", 5), remedied
    assert facts_of(kgorch, "health_issue")[0] == {"rank": "1", "step": "5", "what": "loss is nan at step 5"}
    train("without", leave_out=[5])
    assert kgorch.export("bad") == kgorch.export("without")


def test_weights_that_go_bad_are_rolled_back_on_both_nodes(kgorch):
    def train(name: str, **args: object) -> None:
        extra = '[health]\nnan = ["rollback"]'
        plan = plan_of(kgorch, "goes_bad.py", name=name, args={"steps": 60, **args}, extra=extra, every="2s")
        kgorch("start", str(plan))

    train("spoilt", spoil=40, sleep=0.1)
    [diverged] = facts_of(kgorch, "attempt_diverged")
    assert "is no number" in diverged["cause"] or "loss" in diverged["cause"]
    shards = list(kgorch.home.glob("runs/spoilt/*/checkpoints/*/*/*.safetensors"))
    assert len(shards) >= 2, "of both nodes"
    for shard in shards:
        assert all(torch.isfinite(tensor).all() for tensor in load_file(shard).values()), shard
    assert 0 < facts_of(kgorch, "launched")[-1]["step"] <= 41, "not from the beginning"
    # Whether the loss or a save is the first to see it hangs on time. Only the loss leaves its batch out.
    change = diverged.get("change") or {}
    train("sound", leave_out=[change["step"]] if change.get("skip") else [])
    assert kgorch.export("spoilt") == kgorch.export("sound")


def test_a_rank_that_hangs_on_the_second_node_is_named_with_its_node_and_its_frame(kgorch):
    args = {"epochs": 2, "at": 6, "rank": 1, "once": str(kgorch.folder / "happened")}
    kgorch("start", str(plan_of(kgorch, "hangs.py", args=args, extra='[health]\nhang = { step = "3s" }')))
    [session] = kgorch.history()
    assert [attempt["outcome"] for attempt in session["attempts"]] == ["hung", "finished"]
    cause = session["attempts"][0]["cause"]
    assert "rank 1 on second: hangs.py:" in cause and "in loss_of" in cause, cause
    [stacks] = facts_of(kgorch, "stacks")
    assert "hangs.py" in stacks["rank0"] and "hangs.py" in stacks["rank1"]
