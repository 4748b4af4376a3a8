"""The storm's own judgement (tests/storm): what it draws, how it shrinks, and that each invariant sees what it is there for."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from kgorch.worker.entry import check_arguments, function_of
from storm import programs, schedule
from storm.invariants import INVARIANTS, Charged, Checkpoint, Facts, Process, Said, Trace, broken
from storm.shrink import smallest


def test_the_same_seed_gives_the_same_storm_and_another_one_another():
    first, again, other = (list(islice(schedule.episodes(seed), 5)) for seed in (7, 7, 8))
    assert first == again and first != other


def test_an_episode_does_not_hang_on_those_before_it():
    assert schedule.episode(7, 3) == next(islice(schedule.episodes(7), 3, None)) == next(schedule.episodes(7, first=3))


def test_every_kind_of_fault_comes():
    drawn = {fault.kind for episode in islice(schedule.episodes(1), 150) for fault in episode.faults}
    assert drawn == schedule.KINDS.keys()


def test_runs_of_one_stage_and_of_two_come_and_as_many_ranks_as_are_promised():
    drawn = list(islice(schedule.episodes(1), 150))
    assert {episode.stages for episode in drawn} == {1, 2} and {episode.ranks for episode in drawn} == {1, 2, 3, 4}
    assert {episode.program for episode in drawn} == schedule.PROGRAMS.keys()
    counted = [(item.loader, item.workers > 0, item.ranks > 1) for item in drawn if item.program == "weathers"]
    assert {*itertools.product(schedule.LOADERS, [False, True], [False, True])} <= {*counted}


def test_each_stage_of_an_episode_has_a_name_and_arguments_that_its_training_takes():
    for episode in islice(schedule.episodes(1), 150):
        told = programs.stages(episode, Path("data"))
        assert list(told) == list(programs.STAGES[: episode.stages])
        for entry, args in told.values():
            assert ("inner" in args) == (episode.program != "weathers") == (entry == "weathered:main")
            if "inner" in args:
                args = dict(args)
                check_arguments(function_of(args.pop("inner")), args, "")


def test_runs_over_two_nodes_and_of_a_fleet_come_and_have_nothing_that_they_cannot_have():
    drawn = list(islice(schedule.episodes(1), 150))
    nodes, fleet = ([item for item in drawn if getattr(item, what)] for what in ("nodes", "fleet"))
    assert len(nodes) > 3 and len(fleet) > 3
    assert all(item.ranks == 2 and not (item.driver or item.hungry or item.daemon) for item in nodes)
    assert not {fault.kind for item in fleet for fault in item.faults} & {
        name for name, how in schedule.KINDS.items() if "fleet" in how.without
    }


def test_a_fault_comes_only_where_it_means_something_and_once_where_once_is_enough():
    for episode in islice(schedule.episodes(2), 150):
        kinds = [fault.kind for fault in episode.faults]
        assert all(episode.bears(kind) for kind in kinds)
        assert all(kinds.count(kind) < 2 for kind, how in schedule.KINDS.items() if how.once)


@pytest.mark.parametrize("kind", schedule.KINDS)
def test_a_storm_can_be_restricted_to_any_kind(kind):
    faults = {fault.kind for episode in islice(schedule.episodes(1, [kind]), 5) for fault in episode.faults}
    assert faults == {kind}


def test_an_episode_goes_through_its_file_and_what_is_none_is_refused():
    episode = schedule.episode(3, 1)
    assert schedule.from_json(schedule.to_json(episode, ["same_bits: …"])) == episode
    for text in ("[]", "{}", schedule.to_json(episode).replace('"ranks"', '"rank"')):
        with pytest.raises(ValueError, match="not an episode"):
            schedule.from_json(text)
    with pytest.raises(ValueError, match="no such fault: hail"):
        schedule.from_json(schedule.to_json(episode).replace(episode.faults[0].kind, "hail"))


@pytest.mark.parametrize("seed", range(20))
def test_what_shrinks_is_the_least_that_still_fails(seed):
    chance = random.Random(seed)
    items = list(range(chance.randrange(1, 40)))
    culprits = set(chance.sample(items, min(len(items), chance.randrange(1, 4))))
    asked = []

    def fails(part):
        asked.append(tuple(part))
        return culprits <= set(part)

    assert smallest(items, fails) == sorted(culprits)
    assert len(asked) == len(set(asked)), "a run is costly: none twice"


def test_shrinking_ends_when_its_tries_do_and_keeps_what_is_known_to_fail():
    asked = []
    found = smallest(list(range(64)), lambda part: bool(asked.append(part)) or 13 in part, tries=3)
    assert len(asked) == 3 and 13 in found


def test_what_fails_without_any_fault_shrinks_to_none():
    assert smallest([1, 2, 3], lambda part: True) == []


DROPPED = Checkpoint("/a", 8, "dropped", whole=False)
KEPT = Checkpoint("/b", 16, "verified", final=True, samples=192, counted=192, most=1)
SOUND = Facts(
    history=({"phase": "cut_off", "why": "x", "attempts": [{"outcome": "crashed", "cause": "rank 1 was killed"}]},),
    events=({"kind": "launched", "facts": {"step": 0}}, {"kind": "launched", "facts": {"step": 8}}),
    checkpoints=(DROPPED, KEPT),
    promised={"/a": 8, "/b": 16},
    charges=(Charged(1, rows=1, used_s=31.0, lasted_s=30.0),),
    said=(Said("kgorch start", 10, "saved"), Said("kgorch start", -9, "", killed=True)),
    trace=Trace("kill_rank", "SIGKILL to rank 1", (("attempt", "rank 1 was killed"),), 1, 1, 1, promised=8),
    over=True,
    bits={"train": ("same", "same")},
    metrics={"train: loss of epoch 1": (0.25, 0.25 + 1e-9)},
)
"""A world in which nothing is broken."""


def test_nothing_is_broken_in_a_sound_world():
    assert broken(SOUND) == []


DOCTORED = {
    "same_bits": [replace(SOUND, bits={"train": ("one", "another")})],
    "metrics_are_complete": [
        replace(SOUND, metrics={"train: loss of epoch 1": (0.25, 0.26)}),
        replace(SOUND, metrics={"train: loss of epoch 1": (float("nan"), 0.25)}),
    ],
    "samples_once": [
        replace(SOUND, checkpoints=(DROPPED, Checkpoint("/b", 16, "verified", final=True, samples=192, counted=180, most=1))),
        replace(SOUND, checkpoints=(DROPPED, Checkpoint("/b", 16, "verified", final=True, samples=192, counted=192, most=2))),
    ],
    "best_is_what_was_measured": [
        replace(SOUND, checkpoints=(DROPPED, replace(KEPT, figure=0.9, measures=0.8))),
        replace(SOUND, checkpoints=(replace(DROPPED, figure=0.9), replace(KEPT, figure=0.8, measures=0.8))),
        replace(SOUND, checkpoints=(replace(DROPPED, figure=0.9), KEPT)),
    ],
    "nothing_verified_lost": [
        replace(SOUND, promised={"/gone": 12}),
        replace(SOUND, over=False, checkpoints=(Checkpoint("/b", 16, "verified", whole=False, why="a hash"),)),
        replace(SOUND, over=False, checkpoints=(Checkpoint("/b", 16, "dropped", whole=False),)),
        replace(SOUND, trace=replace(SOUND.trace, promised=16)),
    ],
    "finished_means_verified": [
        replace(SOUND, checkpoints=(DROPPED, Checkpoint("/b", 16, "verified", samples=192, counted=192, most=1))),
    ],
    "no_orphans": [replace(SOUND, processes=(Process(7, role, "0"),)) for role in ("rank", "helper")],
    "no_double_run": [
        replace(SOUND, doubles="rank 0 trains twice\n"),
        replace(SOUND, over=False, processes=(Process(7, "rank", "0"), Process(8, "rank", "0"))),
        replace(SOUND, over=False, processes=(Process(7, "helper", "0"), Process(8, "helper", "0"))),
        replace(SOUND, over=False, processes=(Process(7, "supervisor"), Process(8, "supervisor"))),
    ],
    "quota_charged_once": [
        replace(SOUND, charges=(Charged(1, rows=2, used_s=30.0, lasted_s=30.0),)),
        replace(SOUND, charges=(Charged(1, rows=1, used_s=60.0, lasted_s=30.0),)),
        replace(SOUND, charges=(Charged(1, rows=1, used_s=60.0, lasted_s=30.0, launches=0),)),
        replace(SOUND, charges=(Charged(1, rows=0, used_s=0.0, lasted_s=4.0),)),
        replace(SOUND, charges=(Charged(1, rows=1, used_s=10.0, lasted_s=30.0),)),
    ],
    "log_tells_the_cause": [
        replace(SOUND, history=({"phase": "cut_off", "why": "x", "attempts": [{"outcome": "crashed", "cause": "?"}]},)),
        replace(SOUND, trace=replace(SOUND.trace, expects=(("event SaveFailed", "No space left"),))),
    ],
    "nothing_outside": [replace(SOUND, strays=("/tmp/left",))],
    "nothing_foreign_runs": [replace(SOUND, foreign=("PWNED was made",))],
    "no_bug": [
        replace(SOUND, events=(*SOUND.events, {"kind": "bug", "facts": {"what": "KeyError"}})),
        replace(SOUND, said=(Said("kgorch start", 1, "error"),)),
        replace(SOUND, said=(Said("kgorch start", 2, "Traceback (most recent call last):"),)),
        replace(SOUND, said=(Said("kgorch start", -11, ""),)),
    ],
    "comes_back": [
        replace(SOUND, stuck="it does not train within 90 s"),
        replace(SOUND, history=({"phase": "failed", "why": "rank 1 was killed", "attempts": SOUND.history[0]["attempts"]},)),
    ],
}  # fmt: skip


def test_each_invariant_is_shown_to_break():
    assert DOCTORED.keys() == INVARIANTS.keys()


@pytest.mark.parametrize(("name", "facts"), [(name, facts) for name, worlds in DOCTORED.items() for facts in worlds])
def test_an_invariant_sees_what_it_is_there_for_and_no_other_does(name, facts):
    assert {what.split(":")[0] for what in broken(facts)} == {name}


def test_what_meets_ranks_whose_stage_is_done_need_not_be_told():
    done = ({"phase": "training", "why": "", "attempts": [{"outcome": "finished", "cause": ""}]},)
    assert broken(replace(SOUND, history=done)) == []


def test_a_run_that_took_another_rung_need_not_have_the_same_bits():
    assert broken(replace(SOUND, bits={"train": ("one", "another")}, inexact=("microbatch/2",))) == []


def test_a_session_that_could_launch_nothing_need_not_be_charged():
    assert broken(replace(SOUND, charges=(Charged(4, rows=0, used_s=0.0, lasted_s=4.4, launches=0),))) == []


def test_a_checkpoint_that_a_fault_has_damaged_is_not_promised():
    damaged = replace(
        SOUND, checkpoints=(Checkpoint("/b", 16, "broken"), *SOUND.checkpoints[:1]), damaged=frozenset("/b")
    )
    assert any("step 8" in what for what in broken(damaged)), "dropped for one that is no more"
    whole = (Checkpoint("/b", 16, "broken"), Checkpoint("/a", 8, "verified", samples=96, counted=96, most=1))
    assert broken(replace(damaged, checkpoints=whole, damaged=frozenset({"/b"}))) == []


def test_each_kind_of_fault_has_its_deed():
    from storm.faults import DEEDS

    assert DEEDS.keys() == schedule.KINDS.keys()


def test_a_schedule_that_breaks_something_is_kept_as_small_as_it_can_be_and_replays(monkeypatch, tmp_path):
    from storm import __main__ as storm
    from storm.episode import Hit, Outcome

    whole = schedule.episode(5, 0)
    culprit = whole.faults[4]

    def run(episode, cache, out):
        return Outcome(episode, broken=("after x: same_bits: y",) if culprit in episode.faults else ("no_bug: z",))

    monkeypatch.setattr(storm.episodes, "run", run)
    hits = tuple(Hit(fault.kind) for fault in whole.faults)
    storm._shrink(Outcome(whole, hits, ("after x: same_bits: y",), kept=str(tmp_path)), tmp_path, tmp_path)
    assert schedule.from_json((tmp_path / "smallest.json").read_text()) == whole.with_faults([culprit])


@pytest.mark.parametrize(
    "path", sorted(Path(schedule.__file__).with_name("past").glob("*.json")), ids=lambda path: path.stem
)
def test_a_storm_of_the_past_can_still_be_read(path):
    assert schedule.from_json(path.read_text()).faults
