"""A rank's eye on losses and weights, without a supervisor around it; on CUDA too where there is one."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

from kgorch.core.health.training_health import change_of, parse_remedy
from kgorch.protocol.launch_spec import LaunchSpec
from kgorch.protocol.messages import JournalEntry, RemedyApplied
from kgorch.worker.health.loss_guard import LATE, NOT_FINITE, SPIKE, LossGuard, Unwell
from kgorch.worker.memory.ladder import Ladder

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]


def _health(told, *, nan=("skip",), schedule=(), late=False, **more):
    launch = LaunchSpec(
        run="r", run_id="id", stage="train", attempt="1.1", folder="", entry="x.py", workdir="/", ranks=1, socket="",
        checkpoints="", output="", plan_hash="", schedule=list(schedule), health={"nan": list(nan), **more},
    )  # fmt: skip
    return LossGuard(launch, 0, Ladder(launch, torch.device("cpu"), told.append), told.append, late=late)


def _training(steps, lr=0.8):
    """A net with a schedule of two parts, and its rates over so many steps."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr)
    parts = [LinearLR(optimizer, 0.5, total_iters=4), CosineAnnealingLR(optimizer, 20)]
    return {"model": model, "optimizer": optimizer, "scheduler": SequentialLR(optimizer, parts, [4])}


def _rates(tracked, health, steps):
    rates = []
    for step in steps:
        health.boundary(step)
        rates.append(tracked["optimizer"].param_groups[0]["lr"])
        tracked["optimizer"].step()
        tracked["scheduler"].step()
    return rates


@pytest.mark.parametrize("at", [1, 4, 9])
def test_a_lowered_rate_halves_all_that_the_schedule_says_from_there_on(at):
    plain, lowered = _training(15), _training(15)
    before = _rates(plain, _health([]), range(15))
    health = _health([], schedule=[{"step": at, "lr": 0.5}])
    health.begin(lowered, 0)
    expected = [rate if step < at else rate / 2 for step, rate in enumerate(before)]
    assert _rates(lowered, health, range(15)) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("resumed_at", [3, 4, 5])
def test_a_lowered_rate_is_in_a_state_saved_after_it_and_is_lowered_once_by_who_goes_on_from_the_one_before(resumed_at):
    schedule = [{"step": 4, "lr": 0.5}]
    whole, health = _training(12), _health([], schedule=schedule)
    health.begin(whole, 0)
    first = _rates(whole, health, range(resumed_at))  # a save at a step comes before the change at it
    saved = {name: thing.state_dict() for name, thing in whole.items()}
    again = _training(12)
    for name, thing in again.items():
        thing.load_state_dict(saved[name])
    resumed = _health([], schedule=schedule)
    resumed.begin(again, resumed_at)
    rest = _rates(again, resumed, range(resumed_at, 12))
    through, straight = _training(12), _health([], schedule=schedule)
    straight.begin(through, 0)
    assert first + rest == _rates(through, straight, range(12))


def test_a_dropped_backward_is_dropped_once_and_takes_its_change_along():
    told = []
    health = _health(told, schedule=[{"step": 3, "skip": True, "call": 1, "amp": "off"}])
    health.begin({}, 0)
    assert [health.skips(step) for step in (2, 3, 3, 3, 4)] == [False, False, True, False, False]
    assert health._ladder.settings.amp == "off"


def test_a_scaler_is_reset_to_where_scalers_begin():
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.ones(1))
    _make = _health([], schedule=[{"step": 2, "scaler": "reset"}])
    _make.begin({"scaler": scaler}, 2)
    assert scaler.get_scale() == 65536.0


def _step(health, step, loss, *, scaled=False):
    health.skips(step)
    health.add_loss(loss)
    return health.flag_of_step(scaled=scaled)


def test_on_the_cpu_a_loss_is_known_at_once_and_all_that_is_needed_is_to_drop_the_batch():
    told = []
    health = _health(told)
    health.begin({"model": nn.Linear(2, 1)}, 0)
    assert _step(health, 0, torch.tensor(1.0)) == 0
    assert _step(health, 1, torch.tensor(float("inf"))) == NOT_FINITE
    health.apply_remedy(NOT_FINITE)
    assert [type(message) for message in told] == [JournalEntry, RemedyApplied] and told[1].change == {
        "step": 1,
        "skip": True,
    }
    assert _step(health, 2, torch.tensor(float("nan"))) == NOT_FINITE
    with pytest.raises(Unwell, match="loss is nan at step 2"):
        health.apply_remedy(NOT_FINITE)  # the only remedy is used up


@pytest.mark.parametrize("device", DEVICES)
def test_bad_weights_behind_a_bad_loss_cannot_be_helped_by_dropping_the_batch(device):
    model = nn.Linear(2, 1).to(device)
    health = _health([])
    health.begin({"model": model}, 0)
    with torch.no_grad():
        model.weight[0, 0] = torch.inf
    assert _step(health, 7, torch.tensor(float("nan"))) == LATE


@pytest.mark.parametrize("device", DEVICES)
def test_a_loss_that_is_seen_late_ends_the_attempt_with_the_step_it_was_in(device):
    health = _health([], late=True)
    health.begin({"model": nn.Linear(2, 1).to(device)}, 0)
    flags = [_step(health, step, torch.tensor(float("nan") if step == 3 else 1.0, device=device)) for step in range(4)]
    assert flags == [0] * 4, "nobody waits for it"
    if device == "cuda":
        torch.cuda.synchronize()
    assert _step(health, 4, torch.tensor(1.0, device=device)) == LATE
    with pytest.raises(Unwell) as caught:
        health.apply_remedy(LATE)
    assert (caught.value.trouble.step, caught.value.trouble.since) == (3, 0)


@pytest.mark.parametrize("loss", [1.0, float("nan")])
def test_a_late_loss_is_not_forgotten_where_another_rank_runs_out_of_memory_in_the_same_vote(loss):
    health = _health([], late=True)
    health.begin({"model": nn.Linear(2, 1)}, 0)
    _step(health, 3, torch.tensor(float("nan")))
    assert (
        _step(health, 4, torch.tensor(loss)) == LATE
    )  # and the other rank's flag is higher: the step is done once more
    health.forget_losses()
    health.add_loss(torch.tensor(loss))
    assert health.flag_of_step(scaled=False) == LATE
    with pytest.raises(Unwell) as caught:
        health.apply_remedy(LATE)
    assert caught.value.trouble.step == 3


def test_a_late_loss_whose_step_has_spoilt_the_weights_leaves_that_batch_out_and_only_then_blames_the_weights():
    model = nn.Linear(2, 1)
    health = _health([], late=True)
    health.begin({"model": model}, 0)
    _step(health, 3, torch.tensor(float("nan")))
    with torch.no_grad():
        model.weight.fill_(float("nan"))  # the step was taken before anybody could see its loss
    assert _step(health, 4, torch.tensor(float("nan"))) == LATE
    with pytest.raises(Unwell) as caught:
        health.apply_remedy(LATE)
    assert change_of(parse_remedy("skip"), caught.value.trouble) == {"step": 3, "skip": True}
    again = _health([], late=True, past=[{"step": 3, "remedy": "skip", "why": "", "seen": 3}])
    again.begin({"model": model}, 0)  # it was left out, and the weights are bad all the same
    _step(again, 5, torch.tensor(float("nan")))
    assert _step(again, 6, torch.tensor(1.0)) == LATE
    with pytest.raises(Unwell, match="weight is no number"):
        again.apply_remedy(LATE)


def test_a_save_after_a_step_that_the_scaler_left_out_is_made():
    told, votes = [], []
    health = _health(told, late=True)
    health.begin({"model": nn.Linear(2, 1)}, 0)
    _step(health, 3, torch.tensor(float("nan")), scaled=True)
    health.check_state({}, 4, lambda flag: votes.append(flag) or flag)
    assert votes == [0] and isinstance(told[-1], RemedyApplied) and told[-1].change == {"step": 3}


def test_a_step_that_the_scaler_leaves_out_again_uses_no_remedy_up():
    told = []
    health = _health(told, late=True, past=[{"step": 3, "remedy": "skip", "why": "", "seen": 3}])
    health.begin({"model": nn.Linear(2, 1)}, 0)
    _step(health, 3, torch.tensor(float("nan")), scaled=True)
    assert _step(health, 4, torch.tensor(1.0), scaled=True) == 0
    assert not [message for message in told if isinstance(message, RemedyApplied)]


def test_statistics_that_a_left_out_step_has_spoilt_are_not_trained_on():
    norm = nn.BatchNorm1d(2)
    health = _health([], late=True)
    health.begin({"norm": norm}, 0)
    norm(torch.full((3, 2), float("nan")))
    _step(health, 3, torch.tensor(float("nan")), scaled=True)
    assert _step(health, 4, torch.tensor(1.0), scaled=True) == LATE


@pytest.mark.parametrize("device", DEVICES)
def test_a_late_loss_whose_step_the_scaler_left_out_is_only_told(device):
    told = []
    health = _health(told, late=True)
    health.begin({"model": nn.Linear(2, 1).to(device)}, 0)
    _step(health, 3, torch.tensor(float("nan"), device=device), scaled=True)
    if device == "cuda":
        torch.cuda.synchronize()
    assert _step(health, 4, torch.tensor(1.0, device=device), scaled=True) == 0
    assert "the GradScaler skipped it" in told[-1].why and told[-1].change == {"step": 3}


def test_a_spike_is_dropped_and_when_no_remedy_is_left_it_is_the_new_level():
    health = _health([], spike=8.0)
    health.begin({}, 0)
    for step in range(60):
        assert _step(health, step, torch.tensor(1.0)) == 0
        health.accept_step()
    assert _step(health, 60, torch.tensor(5.0)) == SPIKE
    health.apply_remedy(SPIKE)
    assert _step(health, 61, torch.tensor(5.0)) == 0


@pytest.mark.parametrize("device", DEVICES)
def test_a_state_that_is_no_number_is_not_saved_except_for_what_was_so_from_the_start(device):
    state = {
        "mask": torch.tensor([0.0, -torch.inf]),
        "w": torch.full((3,), 6e4, dtype=torch.float16),
        "n": torch.ones(2).long(),
    }
    state = {name: tensor.to(device) for name, tensor in state.items()}
    health = _health([], nan=())
    health.set_baseline(state)
    health.check_state(state, 5, lambda flag: flag)
    state["w"][1] = torch.nan
    with pytest.raises(Unwell, match="w is no number at step 9: not saved") as caught:
        health.check_state(state, 9, lambda flag: flag)
    assert caught.value.trouble.since == 5
