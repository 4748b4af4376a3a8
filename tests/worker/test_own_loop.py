"""What a script that owns its loop is told: resumed values, remembered ones, boundaries, and what it gets wrong."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import ranks
import torch
import torch.distributed as dist
from harness import wait_until
from saving import Place, save
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks as HOOKS
from torch.utils.data import DataLoader, TensorDataset

from kgorch.checkpoint.folder import list_checkpoints
from kgorch.checkpoint.manifest import Position
from kgorch.errors import CannotRestore, KgorchError
from kgorch.worker import attach, session_end
from kgorch.worker.checkpoint import restore_source
from kgorch.worker.checkpoint.resumed_state import MOST_BYTES, RememberedValues, ResumedState
from kgorch.worker.optimizer_steps import OptimizerSteps


@pytest.fixture
def session(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("KGORCH_LAUNCH", "MASTER_ADDR", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    made = attach(seed=1)
    yield made
    made.end()
    assert not dist.is_initialized()


@pytest.fixture
def net(session):
    net = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    session.track(net=net, optimizer=optimizer)
    return net, optimizer


def train(net, optimizer, *, steps: bool = True) -> None:
    net(torch.ones(4, 2)).sum().backward()
    if steps:
        optimizer.step()
        optimizer.zero_grad()


def test_a_session_needs_no_with_block_and_ends_once(session):
    session.end()
    session.end()
    assert not dist.is_initialized()


def test_a_session_that_is_over_observes_no_optimizer(session, net):
    session.boundary()
    train(*net)
    observed = len(HOOKS)
    session.end()
    assert len(HOOKS) == observed - 1


def test_each_boundary_counts_the_step_before_it_and_the_end_counts_the_last(session, net):
    counted = []
    for _ in range(3):
        session.boundary(samples=4)
        counted.append(session.step)
        train(*net)
    session.end()
    assert counted == [0, 1, 2] and session.step == 3
    assert session._state.position.samples == 12


def test_a_step_that_was_begun_and_left_does_not_count(session, net):
    for number in range(3):
        session.boundary()
        if number == 2:
            break
        train(*net)
    session.end()
    assert session.step == 2


@pytest.mark.parametrize("resumed_at", [0, 2, 3])
def test_a_loop_that_looks_at_its_step_behind_the_boundary_ends_at_the_same_step_after_a_resume(
    session, net, resumed_at
):
    """Resumed behind its last step it used no optimizer, and the step that it had begun and left was counted."""
    session._state.position.step = resumed_at
    while True:
        session.boundary()
        if session.step >= 3:
            break
        train(*net)
    session.end()
    assert session.step == 3


def test_steps_of_a_loop_that_does_not_use_what_it_tracks_are_counted_to_the_last(session, net):
    for _ in range(3):
        session.boundary()
        net[0].weight.data += 1
    session.end()
    assert session.step == 3


def test_no_gradient_waits_behind_the_last_step(session, net):
    """An evaluation behind the loop was told that its weights could not be saved."""
    for number in range(4):
        session.boundary()
        train(*net, steps=number % 2 == 1)
    session._own_loop.close()
    assert (session.step, session._loop._batches_since) == (2, 0)


def test_a_boundary_between_two_backwards_of_one_step_does_nothing(session, net):
    counted = []
    for number in range(9):
        session.boundary()
        counted.append(session.step)
        train(*net, steps=number % 3 == 2)
    session.end()
    assert counted == [0, 0, 0, 1, 1, 1, 2, 2, 2] and session.step == 3


def test_batches_that_are_accumulated_by_hand_are_one_step_and_the_total_counts_steps(session, net):
    loader = session.loader(TensorDataset(torch.arange(24.0)[:, None]), 4)
    totals = []
    for number, _ in enumerate(session.steps(loader, epochs=2)):
        train(*net, steps=number % 3 == 2)
        totals.append(session._state.position.steps_total)
    assert session.step == 4 and totals[0] == 12 and totals[-1] == 4


def test_a_step_of_accumulated_batches_takes_as_long_as_all_of_them(session, net):
    """The ranks save at steps alone, so the lead of the last save has to count these."""
    for number in range(8):
        session.boundary()
        time.sleep(0.05)
        train(*net, steps=number % 4 == 3)
    session.end()
    assert session._state.timer.usual_s >= 0.2


def test_a_step_whose_optimizer_a_scaler_has_skipped_counts_once_its_gradients_are_gone(net):
    _, optimizer = net
    steps = OptimizerSteps()
    steps.begin()
    train(*net, steps=False)
    assert steps.is_accumulating({"optimizer": optimizer})
    optimizer.zero_grad()
    assert not steps.is_accumulating({"optimizer": optimizer})
    steps.close()


def test_a_followed_loader_gives_all_epochs_and_is_otherwise_the_loader(session, net):
    data = DataLoader(TensorDataset(torch.arange(10.0)[:, None]), 4)
    loader = session.follow(data)
    given = []
    for epoch in range(session.epoch, 2):
        for number, (batch,) in enumerate(loader, loader.next_batch):
            session.boundary()
            given.append((epoch, session.epoch, number, len(batch)))
            train(*net)
    assert given == [(epoch, epoch, number, 4 if number < 2 else 2) for epoch in range(2) for number in range(3)]
    assert len(loader) == 3 and loader.dataset is data.dataset and loader.batch_size == 4
    session.end()
    assert session._state.position.samples == 20
    assert session.epoch == 2, "the last epoch counts, too"


@pytest.mark.parametrize("names_epochs", [True, False])
def test_what_is_saved_at_the_first_boundary_of_an_epoch_goes_on_with_that_epoch(
    session, net, monkeypatch, names_epochs
):
    """It went on with the one before, and the script trained an epoch too many."""
    loader, saved = session.follow([torch.ones(4, 2)] * 3), []
    loop, at = session._own_loop._loop, session._state.position
    monkeypatch.setattr(
        loop, "_boundary", lambda: saved.append((at.step, at.epoch, loader.place["epoch"], loader.place["batches"]))
    )
    for epoch in range(2):
        for _ in loader:
            session.boundary(epoch=epoch if names_epochs else None)
            train(*net)
    session.end()
    assert saved == [(1, 0, 0, 1), (2, 0, 0, 2), (3, 1, 1, 0), (4, 1, 1, 1), (5, 1, 1, 2)]


@pytest.mark.parametrize(("expected", "counted"), [({"epochs": 3}, 3), ({"epochs": 9}, 2), ({}, 2)])
def test_the_last_epoch_of_a_loop_that_follows_no_loader_counts_where_the_script_says_how_many_there_are(
    session, net, expected, counted
):
    session.expect(**expected)
    for epoch in range(3):
        session.boundary(epoch=epoch)
        train(*net)
    session.end()
    assert session.epoch == counted


def test_two_loaders_of_one_name_are_refused(session):
    session.follow([1, 2], name="data")
    with pytest.raises(KgorchError, match="called twice"):
        session.follow([3, 4], name="data")


class Saved:
    """A source with these remembered values, as restore_source.py gives it."""

    def __init__(self, values: object, *, final: bool = False) -> None:
        self.manifest = type("", (), {"position": Position(epoch=2, step=7), "final": final, "world_size": 1})()
        self.tree, self.values = {}, values

    def own(self, rank: int) -> dict:
        return {"own": {"steps": {"count": 3}}, "rng": {}, "remembered": self.values}

    def reader(self, rank: int):
        return SimpleNamespace(fetch={}.__getitem__)

    def is_readable(self) -> bool:
        return True


def test_a_stage_that_begins_has_resumed_from_nothing(session):
    assert not session.resumed and session.resumed.get("best", 0.5) == 0.5
    assert (session.step, session.epoch, session.resumed.is_finished) == (0, 0, False)
    with pytest.raises(KeyError):
        session.resumed.state("model")


def test_resumed_is_true_though_nothing_was_remembered_and_knows_the_position_and_states():
    resumed = ResumedState(Saved({}), 0)
    assert resumed and len(resumed) == 0 and (resumed.step, resumed.epoch) == (7, 2)
    assert resumed.state("steps") == {"count": 3}


def test_what_a_session_has_continued_from_is_known_after_its_folder_was_deleted(tmp_path):
    first = ranks.run(tmp_path / "first", "resumed_late.py", 1, stop_at=2)
    [folder] = list_checkpoints(tmp_path / "first" / "checkpoints" / "train")
    assert first.codes == [0] and folder.name == "step-00000002", first.said()
    again = ranks.run(tmp_path / "again", "resumed_late.py", 1, {"delete": str(folder)}, resume=str(folder))
    assert again.codes == [0] and again.lines(starting="continued") == ["continued from 2 False"], again.said()
    [late] = again.lines(starting="late:")
    assert "KgorchError" in late and "not there any more" in late


def test_a_state_is_not_read_out_of_a_buffer_that_was_filled_again(tmp_path):
    place, net = Place(tmp_path), nn.Linear(4, 4)
    place.start_keeper()
    saver = place.saver()
    saver.prepare(1 << 16, torch.device("cpu"))  # waits for the keeper, for which a snapshot has no patience
    assert save(saver, {"net": net}, 5, persist=False)
    wait_until(place.newest)
    source = restore_source.SnapshotSource(*saver.fetch())
    resumed, expected = ResumedState(source, 0), net.weight.detach().clone()
    with torch.no_grad():
        net.weight.zero_()
    for step in (6, 7):
        assert torch.equal(resumed.state("net")["weight"], expected)
        assert save(saver, {"net": net}, step, persist=False)
    with pytest.raises(KgorchError, match="before the first step"):
        resumed.state("net")
    assert resumed.step == 5
    place.kill_keeper()


def test_a_final_checkpoint_is_finished_unless_it_is_extended():
    assert ResumedState(Saved({}, final=True), 0).is_finished
    assert not ResumedState(Saved({}, final=True), 0, extends=True).is_finished


def test_remembered_values_come_back_as_they_were():
    kept, values = RememberedValues(), {"best": float("inf"), "seen": [1, (2, "x")], "by": {3: None}}
    kept.update(values)
    values["seen"].append("later")
    kept.update({"best": 0.25})
    stored = json.loads(json.dumps(kept.values))
    assert dict(ResumedState(Saved(stored), 0)) == {"best": 0.25, "seen": [1, (2, "x")], "by": {3: None}}


@pytest.mark.parametrize(
    "value",
    [torch.ones(2), object(), {"x": [torch.ones(1)]}, "x" * MOST_BYTES],
    ids=["a tensor", "an object", "a tensor within", "too much"],
)
def test_what_is_not_plain_or_too_large_is_refused_by_name(session, value):
    with pytest.raises(KgorchError, match=r"session\.remember\("):
        session.remember(history=value)


@pytest.mark.parametrize("foreign", [None, [], "x", 3])
def test_remembered_values_of_another_form_in_a_checkpoint_are_none(foreign):
    assert dict(ResumedState(Saved(foreign), 0)) == {}


def test_a_value_that_is_reported_after_the_optimizers_step_belongs_to_the_new_weights(session, net):
    session.boundary()
    session.report(before=1.0)
    train(*net)
    session.report(after=1.0)
    assert session._state.metrics.measured == {"before": 0, "after": 1}


def test_an_evaluation_is_marked_as_one_and_the_step_goes_on(session, net):
    session.boundary()
    with session.evaluation():
        assert session._state.marker.where == "evaluation" and session._loop.is_between_steps
    assert session._state.marker.where != "evaluation" and not session._loop.is_between_steps


def test_a_script_that_fails_ends_its_session_with_the_error(session):
    assert Path(session.output).is_dir()
    error = RuntimeError("x")
    session_end.end(error)
    assert error.at_step == 0  # type: ignore[attr-defined]
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "place", [None, [], {}, {"epoch": "x", "batches": 0}, {"epoch": 1}, {"epoch": -1, "batches": 0}], ids=str
)
def test_a_place_in_a_loader_that_cannot_be_read_is_refused_and_counts_no_epochs(session, place):
    loader = session.follow([1, 2])
    with pytest.raises(CannotRestore, match="place in a followed loader"):
        loader.resume(place, 1)
    saved = Saved({})
    saved.own = lambda rank: {"loaders": {"loader0": place}}  # type: ignore[method-assign]
    assert all(isinstance(one, int) for one in ResumedState(saved, 0).place_of("loader0"))
