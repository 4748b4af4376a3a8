"""The same bits after a resume and on another number of processes; two ranks share the GPU over gloo."""

from __future__ import annotations

from typing import Any

from gpu import delegate, training
from gpu.step import Probes, Report
from gpu.steps.memory import compare_states, compare_steps, compare_with_reference
from gpu.training import Attempt

probes = Probes()
FIRST_STOP, SECOND_STOP = 4, 8


def chain(report: Report, name: str, counts: list[int], args: dict[str, Any], **common: Any) -> list[Attempt]:
    """One training over several attempts, each on its number of processes. All but the last are stopped at a fixed step."""
    attempts: list[Attempt] = []
    for number, count in enumerate(counts):
        options: dict[str, Any] = dict(common)
        if attempts:
            options["resume"] = str(training.checkpoint_of(attempts[-1]))
        if number < len(counts) - 1:
            options["stop_at"] = FIRST_STOP + number * (SECOND_STOP - FIRST_STOP)
        attempt = training.train(report, f"{name}-{number}", args, count=count, ladder=["microbatch/2"], **options)
        attempts.append(attempt)
        if not training.see_that_it_ended(report, attempt, f"{name}: attempt {number + 1} on {count} ends"):
            return []
    return attempts


def compare_chain(report: Report, name: str, parts: list[Attempt], whole: Attempt) -> None:
    """Compare the losses of all attempts in order, and the final state, with those of a run without a stop."""
    if not parts or not training.see_that_it_ended(report, whole, f"{name}: the uncut run ends"):
        return
    steps = [step for attempt in parts for step in training.steps_of(attempt)]
    compare_steps(report, name, steps, training.steps_of(whole))
    compare_states(report, name, parts[-1], whole)


def precisions(report: Report) -> tuple[str, ...]:
    return ("fp16", "bf16", "off") if report.is_on_gpu else ("fp16",)


@probes(limit_s=100)
def resumed(report: Report) -> None:
    """A new process continues with the bits of the old one, also with dropout between the layers of an LSTM."""
    cases: dict[str, dict[str, Any]] = {"fp16": {"amp": "fp16"}, "LSTM": {"lstm_dropout": 0.3}}
    if not report.is_on_gpu:
        cases = {"both": {"amp": "fp16", "lstm_dropout": 0.3}}
    for name, args in cases.items():
        parts = chain(report, name, [1, 1], args)
        whole = training.train(report, f"{name}-whole", args, ladder=["microbatch/2"])
        compare_chain(report, f"resumed, {name}", parts, whole)


@probes(limit_s=200, quick=False)
def two_one_two(report: Report) -> None:
    """Two ranks, then one process that plays both, then two again."""
    for amp in precisions(report):
        args = {"amp": amp}
        parts = chain(report, amp, [2, 1, 2], args)
        whole = training.train(report, f"{amp}-whole", args, count=2, ladder=["microbatch/2"])
        compare_chain(report, f"2 → 1 → 2, {amp}", parts, whole)
    if parts and report.on_gpu("two ranks on one GPU go over gloo"):
        facts = training.facts_of(parts[0])
        report.check("two ranks on one GPU go over gloo", facts.get("backend"), "ProcessGroupGloo")


@probes(limit_s=120, quick=False)
def one_of_two_lacks_memory(report: Report) -> None:
    """Memory runs out on rank 1 alone: both ranks repeat the step, and neither waits for ever."""
    cases: dict[str, dict[str, Any]] = {
        "backward": {"where": "backward"},
        "forward": {"where": "forward"},
        "unused": {"where": "backward", "unused": True},
    }
    for name, args in cases.items():
        if report.is_on_gpu or name == "unused":
            compare_with_reference(report, name, {"at": 2, "rank": 1, "fits": 2, "norm": "group", **args}, count=2)


@probes(limit_s=240)
def tests_with_the_gpu(report: Report) -> None:
    delegate.run_tests(
        report,
        [
            "worker/ranks/test_virtual_ranks.py::test_one_process_plays_both_ranks_and_status_says_so",
            "worker/ranks/test_virtual_ranks.py::test_two_ranks_then_one_then_two_have_the_bits_of_two",
            "sessions/test_sameness.py::test_a_run_killed_at_random_has_the_bits_of_an_uninterrupted_one[2-1]",
        ],
        marks="",
    )
