"""Which checkpoint of a foreign program is complete, which step it stands for, and how long a stop takes."""

from __future__ import annotations

import pytest

from kgorch.core.checkpoint import foreign_checkpoint as rules
from kgorch.core.checkpoint.foreign_checkpoint import CompletenessRule, ForeignCandidate, Wholeness

SETTLES, RENAMES = CompletenessRule((), 10.0), CompletenessRule(("*.tmp",), 10.0)


def checkpoint(path="out/checkpoint-1", at=1, files=("model.safetensors", "optimizer.pt"), problem=""):
    return ForeignCandidate(path, True, files, 100, at, f"{path}@{at}", problem)


def complete(found, rule, *, first_s=0.0, now_s=0.0, after_ns=0, excluded=(), wholeness=Wholeness.UNKNOWN):
    watched = rules.observe({}, found, first_s)
    watched = rules.observe(watched, found, now_s)
    items = rules.eligible(watched, rule, after_ns=after_ns, excluded=excluded)
    return rules.newest_complete(items, rule, now_s, wholeness_of=lambda _: wholeness)


def test_a_checkpoint_is_complete_when_it_was_not_changed_for_a_while():
    assert complete([checkpoint()], SETTLES, now_s=9.9) is None
    assert complete([checkpoint()], SETTLES, now_s=10.0) == checkpoint()


def test_a_change_begins_the_while_anew():
    watched = rules.observe({}, [checkpoint(at=1)], 0.0)
    watched = rules.observe(watched, [checkpoint(at=2)], 8.0)
    items = rules.eligible(watched, SETTLES, after_ns=0, excluded=())
    assert rules.newest_complete(items, SETTLES, 12.0, wholeness_of=lambda _: Wholeness.UNKNOWN) is None
    assert rules.newest_complete(items, SETTLES, 18.0, wholeness_of=lambda _: Wholeness.UNKNOWN) == checkpoint(at=2)


def test_a_checkpoint_that_its_files_prove_whole_waits_for_a_moment_only():
    assert complete([checkpoint()], SETTLES, now_s=0.4, wholeness=Wholeness.WHOLE) is None
    assert complete([checkpoint()], SETTLES, now_s=0.6, wholeness=Wholeness.WHOLE) == checkpoint()


def test_a_program_that_renames_what_is_done_is_believed_at_once():
    assert complete([checkpoint()], RENAMES) == checkpoint()
    assert complete([checkpoint()], RENAMES, wholeness=Wholeness.LACKING) == checkpoint()


@pytest.mark.parametrize("rule", [SETTLES, RENAMES])
def test_one_that_is_torn_by_its_format_is_never_complete_and_the_one_before_it_is(rule):
    found = [checkpoint("out/checkpoint-2", at=2), checkpoint("out/checkpoint-1", at=1)]
    assert complete(found[:1], rule, now_s=1e6, wholeness=Wholeness.TORN) is None
    items = rules.eligible(rules.observe({}, found, 0.0), rule, after_ns=0, excluded=())
    quality = {found[0].path: Wholeness.TORN, found[1].path: Wholeness.UNKNOWN}
    chosen = rules.newest_complete(items, rule, 100.0, wholeness_of=lambda candidate: quality[candidate.path])
    assert chosen == found[1]


def test_one_that_lacks_files_waits_for_minutes_since_an_optimizer_may_be_gathered_meanwhile():
    assert complete([checkpoint()], SETTLES, now_s=100.0, wholeness=Wholeness.LACKING) is None
    assert complete([checkpoint()], SETTLES, now_s=rules.LACKING_S, wholeness=Wholeness.LACKING) == checkpoint()


@pytest.mark.parametrize("files", [("model.safetensors.tmp",), ("a.tmp/model.safetensors",)])
def test_a_name_of_a_file_or_folder_in_it_says_that_it_is_being_written(files):
    assert complete([checkpoint(files=files)], RENAMES, now_s=1000.0) is None


def test_the_newest_is_newest_by_time_and_not_by_name():
    found = [checkpoint("out/checkpoint-999", at=1), checkpoint("out/checkpoint-1000", at=2)]
    assert complete(found, RENAMES).path == "out/checkpoint-1000"


def test_what_was_taken_what_is_another_runs_and_what_cannot_be_copied_does_not_count():
    assert complete([checkpoint(at=5)], RENAMES, after_ns=5) is None
    assert complete([checkpoint()], RENAMES, excluded=[checkpoint().signature]) is None
    assert complete([checkpoint(problem="holds a link")], RENAMES) is None


@pytest.mark.parametrize(
    ("path", "pattern", "logged", "taken", "step"),
    [
        ("out/checkpoint-500", "out/checkpoint-*", None, -1, 500),
        ("out/checkpoint-500", "out/checkpoint-*", 510, 400, 500),  # the log is a little ahead
        ("ckpts/epoch_3.pt", "ckpts/epoch_*.pt", 1200, 800, 1200),  # names count epochs
        ("ckpts/epoch_3.pt", "ckpts/epoch_*.pt", None, 2, 3),
        ("out/epoch=3-step=1200.ckpt", "out/*.ckpt", None, -1, 1200),
        ("out/ckpt.pt", "out/ckpt.pt", 40, 30, 40),
        ("out/ckpt.pt", "out/ckpt.pt", 30, 30, 31),  # a step is larger than the one before, whatever is said
        ("out/ckpt.pt", "out/ckpt.pt", None, -1, 1),
        ("out/epoch_0.pt", "out/epoch_*.pt", None, -1, 1),  # a checkpoint is progress, whatever it is called
        ("out/last.pt", "out/*.pt", None, 6, 7),
        ("v2/checkpoint-8", "v2/checkpoint-*", None, -1, 8),  # a number that the plan itself names is none
        ("out/checkpoint-" + "9" * 30, "out/checkpoint-*", None, -1, 1),
    ],
)
def test_a_checkpoint_stands_for_the_step_of_its_name_or_of_the_log(path, pattern, logged, taken, step):
    assert rules.step_of(rules.number_of(path, pattern, logged=logged), logged=logged, taken=taken) == step


@pytest.mark.parametrize(
    ("path", "handed", "logged", "is_over"),
    [
        ("out/checkpoint-100", "out/checkpoint-500", None, True),
        ("out/checkpoint-100", "out/checkpoint-500", 110, True),
        ("out/checkpoint-600", "out/checkpoint-500", None, False),
        ("out/checkpoint-500", "out/checkpoint-500", None, False),
        ("out/checkpoint-0", "out/checkpoint-1", 510, False),  # slots that are written in turn: the log goes on
        ("out/checkpoint-e0-s100", "out/checkpoint-e3-s500", None, True),
        ("out/checkpoint-600-loss0.1", "out/checkpoint-500-loss0.25", None, False),  # not each number is a step
        ("out/checkpoint-last", "out/checkpoint-500", None, False),
        ("out/checkpoint-100", "", None, False),
    ],
)
def test_a_program_that_saves_behind_the_checkpoint_that_it_was_handed_has_started_over(path, handed, logged, is_over):
    history = [] if logged is None else [(0, logged)]
    before = rules.Handed(handed, 500, history)
    assert rules.has_started_over(checkpoint(path), before, "out/checkpoint-*") is is_over


def test_what_is_kept_of_a_log_tells_at_each_time_whether_it_was_beyond_a_step():
    history = list(enumerate([3, 5, 480, 520, 600, 700, 2, 4, 6, 510, 900]))
    kept = rules.passings(history, 500)
    assert [step for _, step in kept] == [3, 480, 520, 700, 2, 6, 510]
    for at in range(15):
        assert (rules.logged_at(kept, at) > 500) is (rules.logged_at(history, at) > 500)
    assert rules.passings(kept, 500) == kept and rules.passings([], 500) == []


def test_of_a_log_that_goes_to_and_fro_the_newest_entries_are_kept():
    """A claim file that is too long disowns all checkpoints."""
    history = [(at, 600 * (at % 2)) for at in range(3000)]
    assert rules.passings(history, 500) == history[-rules.MAX_PASSINGS :]


def test_the_step_of_the_log_is_that_of_the_time_at_which_the_checkpoint_was_written():
    history = [(10, 1), (20, 2), (30, 3)]
    assert [rules.logged_at(history, at) for at in (5, 20, 21, 99)] == [1, 2, 3, 3]
    assert rules.logged_at([], 5) is None


def test_files_that_the_checkpoint_before_had_are_missed_in_a_folder_alone():
    assert rules.lacks_files(checkpoint(files=("a",)), ["a", "b"]) == ["b"]
    single = ForeignCandidate("out/epoch_2.pt", False, ("epoch_2.pt",), 1, 1, "s")
    assert rules.lacks_files(single, ["epoch_1.pt"]) == []


def test_numbers_in_the_names_of_files_may_differ_and_their_count_may_not():
    assert rules.lacks_files(checkpoint(files=("global_step20/m.pt",)), ["global_step10/m.pt"]) == []
    earlier = ["model-00001-of-00002.bin", "model-00002-of-00002.bin"]
    assert rules.lacks_files(checkpoint(files=("model-00001-of-00002.bin",)), earlier) == ["model-00002-of-00002.bin"]


def test_the_first_stop_gets_the_plans_grace_and_later_ones_what_stops_have_taken():
    assert rules.stop_lead_s([], grace_s=60.0, copy_s=2.0) == 62.0
    assert rules.stop_lead_s([4.0], grace_s=60.0, copy_s=2.0) == 8.5
    quick = rules.stop_lead_s([4.0] * 8, grace_s=60.0, copy_s=2.0)
    assert 5.0 < quick < 6.5
    assert rules.stop_lead_s([4.0] * 7 + [50.0], grace_s=60.0, copy_s=2.0) == 62.0, "never more than the plan grants"


def stop(took_s="4.000", saved="yes", killed="no", **others):
    return {"stage": "train", "took_s": took_s, "by": "SIGTERM", "saved": saved, "killed": killed} | others


def test_a_stop_that_a_kill_has_ended_counts_as_the_whole_grace():
    assert rules.stop_times_s([stop(), stop("2.000", saved="no", killed="yes")], grace_s=60.0) == [4.0, 60.0]
    assert rules.stop_times_s([stop("0.200", saved="no", killed="yes")], grace_s=0.0) == [0.2], 'stop = "kill"'


def test_a_stop_before_the_first_checkpoint_of_its_session_does_not_count_unless_it_saved():
    stops = [stop("0.100", saved="no", had_checkpoint="no"), stop(had_checkpoint="no"), stop("0.200", saved="no")]
    assert rules.stop_times_s(stops, grace_s=60.0) == [4.0, 0.2]
    assert rules.stop_times_s([stop("9.000", saved="no", killed="yes", had_checkpoint="no")], grace_s=60.0) == [60.0]


@pytest.mark.parametrize(
    ("path", "is_match"),
    [
        ("out/checkpoint-5", True),
        ("out/checkpoint-5/x", False),
        ("out2/checkpoint-5", False),
        ("out/.checkpoint-5", False),
        ("train.py", False),
    ],
)
def test_a_place_matches_part_by_part(path, is_match):
    assert rules.matches(path, "out/checkpoint-*") is is_match
    assert not rules.matches("out/.hidden", "out/*")
