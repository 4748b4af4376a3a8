"""Losses and weights that are no numbers, in real trainings of two ranks: what is dropped, what is done again, what ends."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from kgorch.checkpoint.folder import readable_checkpoints
from kgorch.system.sockets import control_socket


def _train(kgorch, name="test", nan='["skip"]', code=0, ranks=2, every="600s", **args):
    plan = kgorch.plan("goes_bad.py", name=name, args=args, ranks=ranks, every=every, extra=f"[health]\nnan = {nan}")
    return kgorch("start", str(plan), code=code)


def _losses(kgorch):
    """The lines of the newest attempt's first rank, by step."""
    lines = [line.split() for line in (kgorch.attempt() / "rank0.log").read_text().splitlines() if "step " in line]
    return {int(words[1]): dict(zip(words[2::2], words[3::2], strict=True)) for words in lines}


def _remedied(kgorch):
    return [event["facts"] for event in kgorch.events("remedied")]


def test_a_batch_that_is_no_number_on_one_rank_is_dropped_by_all_and_the_bits_are_those_of_a_run_without_it(kgorch):
    _train(kgorch, "bad", bad=[5], steps=12)
    [remedied] = _remedied(kgorch)
    assert remedied["change"] == {"step": 5, "skip": True} and remedied["remedy"] == "skip"
    [unwell] = kgorch.events("health_issue")
    assert unwell["facts"] == {"rank": "1", "step": "5", "what": "loss is nan at step 5"}
    assert len(kgorch.events("launched")) == 1, "nothing was launched again"
    assert any("1 batch" in notice for notice in kgorch.status("bad")["notices"])
    [[folder, described]] = readable_checkpoints(kgorch.home / "runs/bad/1/checkpoints/train")
    assert [(item.step, item.rung) for item in described.changes] == [(5, "skip")], (
        f"{folder} tells it without a database"
    )
    _train(kgorch, "without", leave_out=[5], steps=12)
    assert kgorch.export("bad") == kgorch.export("without")


def test_a_loss_that_overflows_in_half_precision_is_skipped_by_the_scaler_then_bfloat16_takes_it(kgorch):
    _train(kgorch, nan='["amp=bf16"]', half=True, bad=[5, 8], value=6e4, steps=12)
    [remedied] = _remedied(kgorch)
    assert remedied["change"] == {"step": 5, "skip": True, "amp": "bf16"}
    losses = _losses(kgorch)
    assert losses[5]["loss"] == "nan" and float(losses[8]["loss"]) < float("inf"), "its loss has room in bfloat16"
    assert float(losses[5]["scale"]) == float(losses[4]["scale"]) / 2, "the scaler saw it"


@pytest.mark.soak
def test_what_was_dropped_and_lowered_is_done_again_after_a_crash_once(kgorch):
    _train(kgorch, "whole", nan='["lr/2"]', bad=[5], steps=14)
    _train(kgorch, "crashed", nan='["lr/2"]', bad=[5], steps=14, crash=9)
    assert len(kgorch.events("remedied")) == 1, "of this run: the replay is no new trouble"
    assert {line["lr"] for step, line in _losses(kgorch).items() if step > 5} == {"0.005"}
    assert kgorch.export("whole") == kgorch.export("crashed")


def test_weights_that_went_bad_are_never_saved_and_training_goes_on_from_the_state_before(kgorch):
    _train(kgorch, "spoilt", nan='["rollback"]', spoil=60, steps=100, sleep=0.05, every="2s")
    [unwell] = kgorch.events("attempt_diverged")
    assert "model.0.weight is no number" in unwell["facts"]["cause"] or "loss" in unwell["facts"]["cause"]
    for shard in kgorch.home.glob("runs/*/*/checkpoints/*/*/*.safetensors"):
        assert all(torch.isfinite(tensor).all() for tensor in load_file(shard).values()), shard
    assert 0 < kgorch.events("launched")[-1]["facts"]["step"] <= 61, "not from the beginning"
    _train(kgorch, "sound", steps=100)
    assert kgorch.export("spoilt") == kgorch.export("sound")


def test_a_spike_soon_after_a_resume_is_told_by_the_losses_before_it(kgorch):
    nan = '["skip"]\nspike = 8.0'
    _train(kgorch, "whole", nan=nan, bad=[70], value=20.0, steps=80, ranks=1, half=True)
    assert "deviations above" in _remedied(kgorch)[0]["why"]
    args = {"bad": [70], "value": 20.0, "steps": 80, "sleep": 0.4, "half": True}
    plan = kgorch.plan("goes_bad.py", name="cut", args=args, ranks=1, every="600s", extra=f"[health]\nnan = {nan}")
    supervisor = kgorch.background("start", str(plan))
    kgorch.wait_for_step(40)
    # not by `kgorch stop`: on a busy machine Python's start takes longer than the steps that are left
    answer = control_socket.ask(kgorch.home / "runs/cut/1/control.sock", "stop", timeout_s=60)
    assert answer and answer.ok and supervisor.wait(60) == 10 and 40 <= kgorch.status()["step"] < 70
    kgorch("start", str(plan), "--set", "stage.train.args.sleep=0.0")
    assert [event["facts"]["change"] for event in kgorch.events("remedied")] == [{"step": 70, "skip": True}]
    assert kgorch.export("whole") == kgorch.export("cut")


def test_when_no_remedy_is_left_the_run_ends_with_the_first_cause(kgorch):
    done = _train(kgorch, nan='["skip", "lr/2"]', bad=[5, 7, 8], steps=12, code=20)
    assert "loss is no number at step 5" in done.stdout + done.stderr
    assert "exhausted: skip, lr/2" in kgorch.status()["why"]


@pytest.mark.parametrize("spoil", [9])
def test_bad_weights_at_a_stage_s_end_are_no_final_checkpoint(kgorch, spoil):
    _train(kgorch, nan="[]", spoil=spoil, steps=spoil + 1, code=20, ranks=1)
    assert "model.0.weight is no number" in kgorch.status()["why"]
    assert not [path for path in kgorch.checkpoints() if path.name.endswith("final")]
