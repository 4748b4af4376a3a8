"""Memory runs out in a step, on one rank or all, and the step is done again: with the bits of a run that had used the smaller
microbatch from that step on."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import ranks

from kgorch.checkpoint.folder import readable_checkpoints
from kgorch.core.memory.memory_ladder import Settings
from kgorch.worker.memory import ddp_drain
from kgorch.worker.ranks.consensus_board import Board, PeersLost, size

LADDER = ["microbatch/2", "activation_checkpointing"]


def _reference(folder, count, args, at, microbatch, **launched):
    """A run that goes over to the smaller microbatch before step `at`, and never lacks memory."""
    schedule = [{"step": at, "settings": Settings(microbatch=microbatch).as_dict()}]
    harmless = {name: value for name, value in args.items() if name not in ("at", "where", "fits", "rank")}
    return ranks.run(folder, "hungry.py", count, harmless, ladder=LADDER, schedule=schedule, **launched)


CASES = [
    (2, {"where": "backward", "at": 0, "scaler": True}),
    pytest.param(2, {"where": "backward", "at": 3, "zeros": True}, marks=pytest.mark.soak),
    pytest.param(2, {"where": "backward", "at": 3, "unused": True}, marks=pytest.mark.soak),
    (2, {"where": "forward", "at": 0, "unused": True}),
    (2, {"where": "backward", "at": 3, "undefined": True}),
    (2, {"where": "backward", "at": 3, "late": True}),
    pytest.param(2, {"where": "backward", "at": 3, "view": True}, marks=pytest.mark.soak),
    pytest.param(2, {"where": "forward", "at": 3, "view": True, "zeros": True}, marks=pytest.mark.soak),
    pytest.param(2, {"where": "backward", "at": 3, "rank": -1, "fits": 4}, marks=pytest.mark.soak),
    (2, {"where": "backward", "at": 3, "loop": "own"}),
    (2, {"where": "backward", "at": 0, "loop": "boundary"}),
    (4, {"where": "forward", "at": 3, "rank": 2, "fits": 4}),
    pytest.param(4, {"where": "backward", "at": 0, "rank": 3, "fits": 4}, marks=pytest.mark.soak),
]


@pytest.mark.parametrize(
    ("count", "args"),
    CASES,
    ids=lambda value: str(value) if isinstance(value, int) else "-".join(map(str, value.values())),
)
def test_a_step_that_runs_out_of_memory_is_done_again_in_smaller_parts(tmp_path, count, args):
    fell = ranks.run(tmp_path / "fell", "hungry.py", count, args, ladder=LADDER)
    assert fell.codes == [0] * count, fell.said()
    steps = fell.lines(starting="step ")
    fits = args.get("fits", 8)
    assert len(steps) == 10
    assert [f"microbatch {fits}" in line for line in steps] == [step >= args["at"] for step in range(10)]

    smaller = _reference(tmp_path / "reference", count, args, args["at"], fits)
    assert fell.lines(starting="step ") == smaller.lines(starting="step ")
    assert fell.weights == smaller.weights


@pytest.mark.parametrize("norm", [pytest.param("layer", marks=pytest.mark.soak), "batch"])
def test_below_the_smallest_microbatch_activations_are_dropped(tmp_path, norm):
    """For BatchNorm they go first, and nothing of its statistics changes."""
    fits = 40 if norm == "batch" else 16
    args = {"at": 3, "norm": norm, "fits": fits, "kept": True}
    fell = ranks.run(tmp_path / "fell", "hungry.py", 2, args, ladder=LADDER)
    assert fell.codes == [0, 0], fell.said()
    assert _microbatches(fell) == ["None"] * 10
    taken = {"step": 3, "settings": Settings(activation_checkpointing=True).as_dict()}
    dropped = ranks.run(tmp_path / "dropped", "hungry.py", 2, {"norm": norm}, ladder=LADDER, schedule=[taken])
    never = ranks.run(tmp_path / "never", "hungry.py", 2, {"norm": norm}, ladder=LADDER)
    assert fell.weights == dropped.weights == never.weights  # computed again: not a bit differs


def _microbatches(attempt):
    return [line.split()[3] for line in attempt.lines(starting="step ")]


def test_a_real_limit_on_one_ranks_memory_is_found_by_halving(tmp_path):
    args = {"at": 2, "limit_mb": 200, "copies": 6000, "width": 64, "fits": 99, "epochs": 1}
    fell = ranks.run(tmp_path / "fell", "hungry.py", 2, args, ladder=LADDER)
    assert fell.codes == [0, 0], fell.said()
    sizes = _microbatches(fell)
    assert sizes[:2] == ["None", "None"] and len(sizes) == 5
    assert all(int(later) < 16 for later in sizes[2:]), sizes


def test_batchnorm_keeps_its_batch_as_long_as_activations_can_go(tmp_path):
    """Without blocks to checkpoint the microbatch is all there is, and two samples the least."""
    args = {"at": 3, "norm": "batch", "fits": 8, "depth": 1}
    fell = ranks.run(tmp_path / "fell", "hungry.py", 2, args, ladder=LADDER)
    assert fell.codes == [0, 0], fell.said()
    assert _microbatches(fell) == ["None"] * 3 + ["8"] * 7
    smaller = _reference(tmp_path / "reference", 2, args, 3, 8)
    assert fell.weights == smaller.weights  # the running statistics among them


@pytest.mark.soak
def test_a_static_graph_is_not_tried_again_and_goes_apart_once_it_is_microbatched(tmp_path):
    ends = ranks.run(tmp_path / "ends", "hungry.py", 2, {"at": 3, "static": True}, ladder=LADDER)
    assert 1 in ends.codes and "can't allocate memory" in "\n".join(ends.lines(1))
    half = Settings(microbatch=8)
    fell = ranks.run(
        tmp_path / "apart", "hungry.py", 2, {"at": 3, "static": True, "fits": 4}, settings=half, ladder=LADDER
    )
    assert fell.codes == [0, 0], fell.said()
    assert _microbatches(fell) == ["8"] * 3 + ["4"] * 7
    assert fell.weights == _reference(tmp_path / "reference", 2, {"static": True}, 3, 4, settings=half).weights


@pytest.mark.parametrize(
    ("where", "static"), [("backward", False), pytest.param("forward", True, marks=pytest.mark.soak)]
)
def test_ranks_with_uneven_shares_choose_alike(tmp_path, where, static):
    """Of 9 samples one rank has 4 and the other 5: with a microbatch of 4 only that one has two parts."""
    args = {"at": 2, "batch": 9, "fits": 1, "epochs": 1, "where": where, "static": static}
    fell = ranks.run(tmp_path / "fell", "hungry.py", 2, args, settings=Settings(microbatch=4), ladder=LADDER)
    assert fell.codes == [0, 0], fell.said()
    assert _microbatches(fell) == ["4"] * 2 + ["1"] * 15


def test_in_the_scripts_own_no_sync_nobody_waits_for_the_rank_that_lacks_memory(tmp_path):
    args = {"at": 3, "unsynced": True, "epochs": 1}
    fell = ranks.run(tmp_path / "fell", "hungry.py", 2, args, ladder=LADDER)
    assert fell.codes == [0, 0], fell.said()
    assert _microbatches(fell) == ["None"] * 3 + ["8"] * 2


def test_a_loss_that_communicates_is_no_step_to_try_again_and_the_cause_is_the_memory(tmp_path):
    ended = ranks.run(tmp_path / "ended", "hungry.py", 2, {"at": 3, "talks": True}, ladder=LADDER)
    assert ended.codes[1] == 1 and ended.codes[0] != 0
    error = json.loads((ended.folder / "rank1.status.json").read_text())["error"]
    assert error["memory"] == "device" and "can't allocate memory" in error["message"]
    assert "other collectives" in error["message"]


def test_a_loss_that_communicates_cannot_be_played_by_fewer_processes(tmp_path):
    """Each of the ranks that one process plays would gather from itself alone."""
    talks = ranks.run(tmp_path / "talks", "hungry.py", 2, {"talks": True, "epochs": 1}, ladder=LADDER)
    plain = ranks.run(tmp_path / "plain", "hungry.py", 2, {"epochs": 1}, ladder=LADDER)
    assert [_divisible(attempt) for attempt in (talks, plain)] == [False, True]


def _divisible(attempt):
    assert attempt.codes == [0, 0], attempt.said()
    return next(readable_checkpoints(attempt.folder / "checkpoints" / "train"))[1].divisible


def test_an_evaluation_that_runs_out_of_memory_is_told_as_one(tmp_path):
    ended = ranks.run(tmp_path / "ended", "hungry.py", 2, {"evaluates": True}, ladder=LADDER)
    error = json.loads((ended.folder / "rank0.status.json").read_text())["error"]
    assert (error["memory"], error["place"]) == ("device", "evaluation")


def test_memory_that_runs_out_before_the_reduction_began_is_no_step_to_try_again():
    reduction = ddp_drain.GradientReduction([])
    reduction._ddps, reduction._syncs = [object()], True  # begin() has raised half-way
    with pytest.raises(RuntimeError, match="prepared its buckets"):
        reduction.drain()


def test_the_ladders_end_is_told_as_what_ran_out(tmp_path):
    ended = ranks.run(tmp_path / "ended", "hungry.py", 2, {"at": 2, "fits": 0}, ladder=["microbatch/2"])
    assert ended.codes == [1, 1]
    for rank in (0, 1):
        status = json.loads((ended.folder / f"rank{rank}.status.json").read_text())
        assert status["error"]["type"].endswith("LadderEnds")
    assert "can't allocate memory" in status["error"]["message"]


@pytest.fixture
def page(tmp_path):
    """A board for two."""
    place = tmp_path / "page"
    place.write_bytes(b"\0" * size(2))
    return place


def _voter(page, rank, code):
    head = (
        f"import sys; from kgorch.worker.ranks.consensus_board import Board; board = Board({str(page)!r}, {rank}, 2)\n"
    )
    return subprocess.Popen(
        [sys.executable, "-c", head + code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def test_a_rank_that_dies_in_a_step_does_not_leave_the_others_voting(page):
    other = _voter(page, 1, "board.vote(0); print('voted', flush=True); sys.stdin.read()")
    board = Board(str(page), 0, 2)
    assert board.vote(2) == 2
    assert other.stdout.readline() == "voted\n"
    other.kill()
    other.wait()
    with pytest.raises(PeersLost, match="rank 1"):
        board.vote(0)


def test_votes_of_free_running_ranks_never_mix(page):
    """Each vote's flags come from a rule that both know; a flag of the vote before or after would show."""
    code = (
        "flag = lambda rank, n: (n * 7 + rank * 13) % 5\n"
        "for n in range(5000): assert board.vote(flag(board._rank, n)) == max(flag(0, n), flag(1, n)), n"
    )
    both = [_voter(page, rank, code) for rank in (0, 1)]
    assert [process.wait(240) for process in both] == [0, 0]
