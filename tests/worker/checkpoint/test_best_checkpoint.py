"""keep.best: the state is saved at the very step whose weights the figure was measured on, whoever reports it and where."""

from __future__ import annotations

import random
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import ranks
import torch
from safetensors.numpy import load_file
from saving import Place, save
from torch import nn

from kgorch.checkpoint.folder import list_checkpoints
from kgorch.checkpoint.manifest import Manifest, shard_names
from kgorch.checkpoint.verify import verify_checkpoint
from kgorch.core.metrics.metric_curve import Mark
from kgorch.worker.checkpoint.best_checkpoint import BestCheckpoint
from kgorch.worker.ranks.consensus_board import SAVE, STOP, Board, size
from kgorch.worker.telemetry.reported_metrics import ReportedMetrics

BEST = {"metric": "accuracy", "highest": True, "value": None}


def _train(
    folder: Path,
    accuracies: str,
    *,
    count: int = 2,
    best=BEST,
    resume: Path | None = None,
    stop_at: int | None = None,
    **args,
) -> list[tuple]:
    """The manifest of each of its checkpoints and the norm of the weights in it, by step."""
    found = ranks.run(
        folder,
        "evaluates.py",
        count,
        {"accuracies": accuracies, **args},
        best=best,
        resume=resume and str(resume),
        stop_at=stop_at,
    )
    assert found.codes == [0] * count, found.said()
    places = sorted(list_checkpoints(folder / "checkpoints" / "train"), key=lambda place: place.name)
    return [(described := verify_checkpoint(place), norm_in(place, described)) for place in places]


def norm_in(folder: Path, described: Manifest) -> float:
    parts: dict[str, np.ndarray] = {}
    for name in shard_names(described):
        parts |= {key: value for key, value in load_file(folder / name).items() if key.startswith("model")}
    return float(np.sqrt(sum((value.astype(np.float64) ** 2).sum() for value in parts.values())))


def evaluated(saves) -> list[tuple[int, float]]:
    """Step and accuracy of the plain checkpoints; each is checked to hold the weights that were measured."""
    told = []
    for described, norm in saves:
        if not described.final:
            assert described.measured["accuracy"] == described.measured["weights_norm"] == described.step
            assert norm == pytest.approx(described.metrics["weights_norm"], rel=1e-6)
            told.append((described.step, described.metrics["accuracy"]))
    return told


@pytest.mark.parametrize(("count", "who"), [(2, "first"), (2, "all"), pytest.param(1, "all", marks=pytest.mark.soak)])
def test_each_new_best_is_saved_with_the_weights_that_were_measured(tmp_path, count, who):
    saves = _train(tmp_path / "run", "0.5_0.9_0.8_0.9_0.95", count=count, who=who, sleep=0.02)
    assert evaluated(saves) == [(6, 0.5), (12, 0.9), (30, 0.95)], "of equals the first; a worse one never"


@pytest.mark.parametrize("who", ["first", pytest.param("all", marks=pytest.mark.soak)])
def test_an_evaluation_before_an_epochs_first_step_is_of_the_weights_before_it(tmp_path, who):
    saves = _train(tmp_path / "run", "0.5_0.9_0.8", who=who, when="before", sleep=0.02)
    assert evaluated(saves) == [(0, 0.5), (6, 0.9)]


def test_right_after_an_optimizers_step_the_weights_are_those_of_its_boundary(tmp_path):
    saves = _train(tmp_path / "run", "0.9_0.8_0.95", when="midst", sleep=0.02)
    assert evaluated(saves) == [(3, 0.9), (15, 0.95)]


def test_what_one_rank_alone_reports_in_the_midst_of_an_epoch_is_not_saved_and_holds_nobody_up(tmp_path):
    saves = _train(tmp_path / "run", "0.9_0.8_0.95", when="midst", who="first", sleep=0.02)
    assert evaluated(saves) == []


def test_weights_that_are_changed_after_the_last_epoch_do_not_pass_for_the_best(tmp_path):
    saves = _train(tmp_path / "run", "0.8_0.9", last="changed")
    assert evaluated(saves) == [(6, 0.8), (12, 0.9)]


def test_without_keep_best_nothing_is_saved_for_a_report(tmp_path):
    assert evaluated(_train(tmp_path / "run", "0.5_0.9", best=None)) == []


def test_a_resumed_training_beats_what_it_was_told_or_saves_nothing(tmp_path):
    first = tmp_path / "run"
    _train(first, "0.5_0.9_0.8")
    begun = first / "checkpoints" / "train" / "step-00000012"
    saves = _train(tmp_path / "again", "0.5_0.9_0.8_0.85_0.91", best=BEST | {"value": 0.9}, resume=begun)
    assert evaluated(saves) == [(30, 0.91)]


def test_a_checkpoint_of_the_step_that_is_there_already_learns_what_its_weights_were_measured_at(tmp_path):
    """Stopped at the boundary after step 6, so saved there, before the evaluation that a resume does first of all."""
    place = tmp_path / "run" / "checkpoints" / "train" / "step-00000006"
    [(described, norm)] = _train(tmp_path / "run", "0.9_0.8_0.95", stop_at=6)
    assert described.step == 6 and not described.measured
    saves = _train(tmp_path / "run", "0.9_0.8_0.95", resume=place)
    assert evaluated(saves) == [(6, 0.9), (18, 0.95)]
    assert saves[0][0].files == described.files and saves[0][1] == norm


def test_a_loader_with_a_generator_of_its_own_goes_on_from_a_save_between_epochs_as_if_it_had_not_stopped(tmp_path):
    whole = ranks.run(
        tmp_path / "whole", "evaluates.py", 2, {"accuracies": "0.5_0.9_0.8", "loader": "torch"}, best=BEST
    )
    begun = tmp_path / "whole" / "checkpoints" / "train" / "step-00000006"
    again = ranks.run(
        tmp_path / "again",
        "evaluates.py",
        2,
        {"accuracies": "0.5_0.9_0.8", "loader": "torch"},
        best=BEST,
        resume=str(begun),
    )
    assert again.codes == [0, 0] and again.weights == whole.weights, again.said()


def test_a_figure_that_is_no_number_or_infinite_is_never_the_best(tmp_path):
    saves = _train(tmp_path / "run", "nan_inf_0.1_nan")
    assert evaluated(saves) == [(18, 0.1)]


@pytest.mark.parametrize("seed", range(6))
def test_ranks_that_compare_at_a_boundary_agree_and_those_that_pass_wait_for_nobody(tmp_path, seed):
    """Each rank compares or passes at each step as chance has it, and is as slow as chance has it."""
    world, steps, chance = 3, 300, random.Random(seed)
    page = tmp_path / "page"
    page.write_bytes(b"\0" * size(world))
    all_compare = [chance.random() < 0.5 for _ in range(steps)]
    flags = [[chance.choice((0, 1, 9)) if all_compare[step] or chance.random() < 0.3 else None for step in range(steps)]
             for _ in range(world)]  # fmt: skip
    answers: list[dict[int, int | None]] = [{} for _ in range(world)]

    def train(rank: int) -> None:
        board, slow = Board(str(page), rank, world), random.Random(seed * 10 + rank)
        for step, flag in enumerate(flags[rank], start=1):
            if flag is None:
                board.pass_step(step)
            else:
                answers[rank][step] = board.compare(step, flag)
            if slow.random() < 0.02:
                time.sleep(slow.random() / 200)

    threads = [threading.Thread(target=train, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for step in range(1, steps + 1):
        given = [flags[rank][step - 1] for rank in range(world)]
        known = [flag for flag in given if flag is not None]
        expected = max(known) if len(known) == world else None
        assert all(answers[rank][step] == expected for rank in range(world) if given[rank] is not None), (step, given)


def test_a_stop_that_was_asked_for_is_known_before_it_is_a_request(tmp_path):
    page = tmp_path / "page"
    page.write_bytes(b"\0" * size(2))
    first, second = Board(str(page), 0, 2), Board(str(page), 1, 2)
    first.ask(SAVE)
    assert not first.stop_asked
    first.ask(STOP)
    assert first.stop_asked and not first.open_request
    first.tick(4)
    assert first.stop_asked and first.open_request & STOP and second.tick(4) == 0


def test_after_a_save_of_the_best_that_failed_lower_values_than_its_own_are_saved_again(tmp_path):
    """A memory snapshot in between clears the error of the failed save."""
    place, metrics, net = Place(tmp_path), ReportedMetrics(), {"model": nn.Linear(4, 4)}
    place.start_keeper()
    saver = place.saver(best=BEST | {"value": 0.5})
    best = BestCheckpoint(saver._launch, 0, saver._board, saver, metrics, place.told.append)
    saver.prepare(1 << 16, torch.device("cpu"))
    place.keeper.send_signal(signal.SIGSTOP)
    metrics.report("accuracy", 0.9, Mark(1, 1, True))
    assert save(saver, net, 1)
    best.record_save(1)
    place.kill_keeper()
    place.start_keeper()
    assert not saver.wait()
    saver.prepare(1 << 16, torch.device("cpu"))  # waits for the keeper, for which a snapshot has no patience
    assert save(saver, net, 2, persist=False)
    metrics.report("accuracy", 0.8, Mark(3, 1, True))
    assert best.between_epochs(3, None) & SAVE
    assert save(saver, net, 3) and saver.wait()
    best.record_save(3)
    metrics.report("accuracy", 0.7, Mark(4, 1, True))
    assert best.between_epochs(4, None) == 0
    place.kill_keeper()


def test_a_better_value_that_comes_after_the_end_of_its_step_is_told_once(tmp_path):
    """In a loop around Accelerate an evaluation after an epoch comes there: its weights were not saved, without a word."""
    place, metrics = Place(tmp_path), ReportedMetrics()
    saver = place.saver(best=BEST | {"value": 0.5})
    page = tmp_path / "page"
    page.write_bytes(b"\0" * size(1))
    best = BestCheckpoint(saver._launch, 0, Board(str(page), 0, 1), saver, metrics, place.told.append)

    def told_at(step: int, measured: int, value: float) -> list[str]:
        metrics.report("accuracy", value, Mark(measured, 1, True))
        place.told.clear()
        assert best.after_step(step, None) == 0
        return [entry.facts["why"] for entry in place.told]

    assert told_at(2, 1, 0.4) == [] == told_at(4, 2, 0.9), "it is not better, or was measured long ago"
    [why] = told_at(5, 4, 0.9)
    assert "after the end of its step" in why and "right after the optimizer's step" in why
    assert told_at(6, 5, 0.95) == []
