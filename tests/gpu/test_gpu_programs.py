"""`make gpu` without a GPU: every program of tests/gpu that a CPU can run does, and the command itself keeps its word."""

from __future__ import annotations

import ast
import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner
from harness import wait_until

from gpu import __main__ as command
from gpu import delegate, page, runner
from gpu.child import QUICK
from gpu.runner import ROOT, TESTS, Result
from gpu.step import DIFFERS, NOTE, OK, SKIPPED, Check, Report, Step
from gpu.steps import STEPS, select

H100 = {
    "gpus": [{"name": "NVIDIA H100", "memory": 80 << 30, "capability": "9.0"}],
    "driver_gpus": [],
    "torch": "2.11.0",
}
T4S = {"gpus": [{"name": "Tesla T4", "memory": 15 << 30, "capability": "7.5"}] * 2, "driver_gpus": [], "torch": "2.6.0"}


def _gpu(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gpu", *args],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(TESTS), "CUDA_VISIBLE_DEVICES": "", **env},
        capture_output=True,
        text=True,
        timeout=250,
    )


# The rehearsal


WITH_QUICK_PROGRAMS = ("basics", "machine", "health", "memory", "ranks", "failures", "speed")


LONGEST = ("health", "memory", "speed")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.soak] * (name in LONGEST)) for name in WITH_QUICK_PROGRAMS]
)
def test_the_quick_programs_of_a_step_run_on_a_cpu(name, tmp_path):
    [(step, _)] = select((name,))
    result = runner.run(step, [QUICK], device="cpu", gpus=0, logs=tmp_path, limit_s=280)
    assert not result.differing, f"{result.differing}\n{Path(result.log).read_text()[-4000:]}"
    assert result.checks


@pytest.mark.soak  # also: make gpu STEPS=--cpu
@pytest.mark.timeout(700)
@pytest.mark.parametrize("name", [step.name for step in STEPS])
def test_all_programs_of_a_step_run_on_a_cpu(name, tmp_path):
    [(step, _)] = select((name,))
    result = runner.run(step, device="cpu", gpus=0, logs=tmp_path, limit_s=650)
    assert not result.differing, f"{result.differing}\n{Path(result.log).read_text()[-4000:]}"


def test_what_the_programs_name_of_pytorch_exists():
    """A CPU does not come to the lines that need a GPU: at least no name in them is misspelt."""
    import torch

    for path in sorted((TESTS / "gpu").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = _dotted(node)
            if names[:1] == ["torch"]:
                _resolve(torch, names[1:], path)


def _dotted(node: ast.AST) -> list[str]:
    """["torch", "cuda", "Event"] of torch.cuda.Event; empty for anything else."""
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute) and (before := _dotted(node.value)):
        return [*before, node.attr]
    return []


def _resolve(found: object, names: list[str], path: Path) -> None:
    for number, name in enumerate(names):
        assert hasattr(found, name), f"{path.name}: torch.{'.'.join(names[: number + 1])}"
        found = getattr(found, name)


def test_each_step_has_a_module_with_probes_and_those_for_one_gpu_fit_into_forty_minutes():
    for step in STEPS:
        probes = importlib.import_module(step.module).probes.all
        assert probes and all(probe.limit_s <= step.limit_s for probe in probes), step.name
        assert any(probe.quick for probe in probes) == (step.name in WITH_QUICK_PROGRAMS), step.name
    assert sum(step.limit_s for step in STEPS if step.gpus == 1) <= 50 * 60
    assert len([step for step in STEPS if step.gpus == 1]) == 10


# The command


def test_without_a_gpu_each_step_is_named_and_none_runs():
    done = _gpu()
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    assert lines[-1] == f"no GPU: {len(STEPS)} steps skipped"
    assert [line.split(":")[0] for line in lines[:-1]] == [f"skipped {step.name}" for step in STEPS]


def test_one_probe_runs_alone_and_its_checks_are_kept_as_json(tmp_path):
    done = _gpu("basics.first_kernel", "--cpu", "--json", str(tmp_path / "found.json"), "--logs", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    [step] = json.loads((tmp_path / "found.json").read_text())["steps"]
    assert step["step"] == "basics" and {check["probe"] for check in step["checks"]} == {"first_kernel"}
    assert {check["ok"] for check in step["checks"]} == {True, None}
    assert done.stdout.splitlines()[-1].startswith(
        "rehearsal on the CPU: 2 checks as expected, 0 differ, 1 not looked at"
    )
    assert "needs a GPU" in done.stdout


def test_a_name_that_is_no_step_is_refused_with_those_that_are():
    done = CliRunner().invoke(command.main, ["memroy"])
    assert done.exit_code == 2 and "there is no step memroy" in done.output and "two-gpus-wall" in done.output


def test_names_choose_steps_in_their_own_order_and_a_beginning_chooses_several():
    assert [step.name for step, _ in select(("memory", "basics.waits", "basics.first_kernel"))] == ["basics", "memory"]
    assert select(("basics.waits",))[0][1] == ("waits",)
    assert all(step.gpus == 2 for step, _ in select(("two-gpus",))) and len(select(("two-gpus",))) == 8


def test_the_list_names_every_step_and_what_it_looks_for():
    printed = CliRunner().invoke(command.main, ["--list"]).stdout
    assert all(step.name in printed and step.looks_for in printed for step in STEPS)


@pytest.fixture
def on_two_gpus(monkeypatch, tmp_path):
    """The command on a machine with two GPUs, whose steps are found without running anything."""
    monkeypatch.setattr(command.machines, "ask", lambda: dict(T4S))
    ran: list[str] = []

    def run(step, probes=(), **_):
        ran.append(step.name)
        if step.name == "health":
            raise KeyboardInterrupt
        verdict = DIFFERS if step.name == "memory" else OK
        return Result(step, (Check(step.name, "p", "c", "1", "1", verdict),), 7.0, "2026-11-20", log="log")

    monkeypatch.setattr(command.runner, "run", run)
    results = tmp_path / "results.md"
    return lambda *args: (CliRunner().invoke(command.main, [*args, "--results", str(results)]), ran, results)


def test_what_differs_makes_the_exit_status(on_two_gpus):
    done, ran, results = on_two_gpus("basics", "memory")
    assert done.exit_code == 1 and ran == ["basics", "memory"]
    assert "1 checks as expected, 1 differ" in done.stdout
    assert "## 2 × Tesla T4" in results.read_text()
    assert on_two_gpus("basics")[0].exit_code == 0


def test_what_was_found_is_on_the_page_though_the_hour_is_cut_short(on_two_gpus):
    done, ran, results = on_two_gpus("basics", "health", "memory")
    assert done.exit_code != 0 and ran == ["basics", "health"]
    assert "| basics | 1 as expected, none differs | 7 |" in results.read_text()


def test_a_step_that_does_not_fit_any_more_is_skipped_and_named(on_two_gpus):
    done, ran, _ = on_two_gpus("basics", "nvml", "ranks", "--minutes", "2")
    assert ran == ["nvml"] and "2 steps skipped: basics, ranks" in done.stdout


def test_a_step_for_two_gpus_is_skipped_where_there_is_one(monkeypatch, on_two_gpus):
    monkeypatch.setattr(command.machines, "ask", lambda: dict(H100))
    done, ran, _ = on_two_gpus("two-gpus-wall", "basics")
    assert ran == ["basics"] and "needs 2 GPUs, there is 1" in done.stdout


def test_a_gpu_that_pytorch_cannot_use_is_no_machine_without_one(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = {"gpus": [], "driver_gpus": ["Tesla T4"], "torch": "2.13.0+cpu", "error": ""}
    monkeypatch.setattr(command.machines, "ask", lambda: found)
    done = CliRunner().invoke(command.main, ["basics"])
    assert (
        done.exit_code == 1
        and "the driver shows Tesla T4, and PyTorch 2.13.0+cpu (CUDA none) cannot use it" in done.stdout
    )


# What goes wrong in a step


@pytest.fixture
def step_of(tmp_path, monkeypatch):
    """A step with a module of the test's own."""

    def made(code: str, name: str) -> Step:
        module = tmp_path / f"{name}_of_a_test.py"
        module.write_text("import os, subprocess, sys, time\nfrom gpu.step import Probes\nprobes = Probes()\n" + code)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        return Step(name, "a failure", 60.0, 1, module.stem)

    return made


def _run(step: Step, tmp_path: Path, *probes: str, limit_s: float = 60.0) -> dict[str, Check]:
    """Checks by their names."""
    result = runner.run(step, probes, device="cpu", gpus=0, logs=tmp_path / "logs", limit_s=limit_s)
    return {f"{check.probe}: {check.check}": check for check in result.checks}


def test_an_exception_hides_no_other_check_and_no_other_probe(step_of, tmp_path):
    code = """
@probes(limit_s=20)
def raises(report):
    with report.guard("first"):
        raise ValueError("in a check")
    report.check("second", 2, 2)
    raise KeyError("in the probe")

@probes(limit_s=20)
def dies(report):
    os.abort()

@probes(limit_s=20)
def last(report):
    report.check("third", 3, 4)
"""
    found = _run(step_of(code, "raising"), tmp_path)
    assert "ValueError: in a check" in found["raises: first"].found and found["raises: first"].verdict == DIFFERS
    assert found["raises: second"].verdict == OK
    assert "KeyError" in found["raises: runs to its end"].found
    assert found["dies: runs to its end"].found == "ended by SIGABRT"
    assert (found["last: third"].expected, found["last: third"].found, found["last: third"].ok) == ("4", "3", False)


def test_a_probe_that_hangs_is_ended_with_all_that_it_started_and_the_next_one_runs(step_of, tmp_path):
    code = f"""
@probes(limit_s=3)
def hangs(report):
    sleeper = subprocess.Popen(["sleep", "600"], start_new_session=True)
    open({str(tmp_path / "pid")!r}, "w").write(str(sleeper.pid))
    report.check("before", 1, 1)
    time.sleep(600)

@probes(limit_s=20)
def after(report):
    report.check("after", 1, 1)
"""
    found = _run(step_of(code, "hanging"), tmp_path)
    assert found["hangs: before"].ok and found["after: after"].ok
    assert found["hangs: ends"].found == "did not end within 6 s" and found["hangs: ends"].verdict == DIFFERS
    _is_gone(tmp_path / "pid")
    assert "time.sleep" not in found["hangs: ends"].found
    assert "in hangs" in (tmp_path / "logs" / "hanging.log").read_text(), "where it hung"


def test_a_step_that_hangs_is_ended_and_reported(step_of, tmp_path):
    code = f"""
sleeper = subprocess.Popen(["sleep", "600"], start_new_session=True)
open({str(tmp_path / "pid")!r}, "w").write(str(sleeper.pid))
time.sleep(600)
"""
    began_s = time.monotonic()
    found = _run(step_of(code, "stuck"), tmp_path, limit_s=15.0)
    assert found[": ends"].found == "did not end within 15 s" and time.monotonic() - began_s < 90
    _is_gone(tmp_path / "pid")


def _is_gone(path: Path) -> None:
    pid = int(path.read_text())
    wait_until(
        lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE, what="its end"
    )


def test_a_module_that_cannot_be_imported_is_told(step_of, tmp_path):
    found = _run(step_of("import no_such_package", "broken"), tmp_path)
    assert "no_such_package" in found[": runs to its end"].found


def test_a_probe_that_is_none_is_told_with_those_that_are(step_of, tmp_path):
    found = _run(step_of("@probes(limit_s=9)\ndef one(report): pass", "other"), tmp_path, "tow")
    assert "no probe tow; there are: one" in found[": runs to its end"].found


def test_tests_of_the_suite_become_checks_and_one_that_hangs_hides_no_other(tmp_path, monkeypatch):
    tests = tmp_path / "test_some.py"
    tests.write_text(
        "import os, pytest, time\n"
        "def test_a_passes(): assert os.environ['KGORCH_TEST_GPU'] == '1'\n"
        "def test_b_fails(): assert 1 == 2\n"
        "@pytest.mark.skip(reason='not here')\n"
        "def test_c_skips(): pass\n"
        "@pytest.mark.soak\n"
        "def test_d_is_not_wanted(): assert False\n"
        "def test_e_hangs(): time.sleep(600)\n"
    )
    folder = tmp_path / "folder"
    folder.mkdir()
    out = tmp_path / "checks"
    report = Report(out, "s", "p", device="cuda", folder=folder, gpus=1, left_s=20.0)

    class Waited(subprocess.Popen):
        """Its time is over when the last test hangs, however slow this machine is."""

        def wait(self, timeout=None):
            if timeout == 15.0:
                wait_until(lambda: (folder / "lines").read_text().count("test_e_hangs") == 2)  # begun, and set up
                raise subprocess.TimeoutExpired(self.args, timeout)
            return super().wait(timeout)

    monkeypatch.setattr(delegate.subprocess, "Popen", Waited)
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    delegate.run_tests(report, [str(tests)], side_by_side=False)
    checks = list(runner.read_checks(out))
    found = {check.check.partition("::")[2] or check.check: check for check in checks}
    assert len(checks) == len(found)
    assert found["test_a_passes"].verdict == OK
    assert found["test_b_fails"].verdict == DIFFERS and "assert 1 == 2" in found["test_b_fails"].found
    assert (found["test_c_skips"].verdict, found["test_c_skips"].found) == (SKIPPED, "Skipped: not here")
    assert found["test_e_hangs"].found.startswith("has not ended after") and "test_d_is_not_wanted" not in found
    assert found["the tests end"].verdict == DIFFERS


# The page


def _result(name: str, found: str, at: str, verdict: str = OK) -> Result:
    step = next(step for step in STEPS if step.name == name)
    return Result(step, (Check(name, "probe", "check", "x", found, verdict),), 12.3, at)


def test_a_run_on_another_machine_keeps_the_sections_of_the_others():
    first = page.update(page.empty(), H100, [_result("basics", "a | b", "2026-11-20")])
    both = page.update(first, T4S, [_result("memory", "c", "2026-11-21", DIFFERS)])
    assert list(page.sections_of(both)) == ["1 × NVIDIA H100", "2 × Tesla T4"]
    assert page.sections_of(both)["1 × NVIDIA H100"].strip() == page.sections_of(first)["1 × NVIDIA H100"].strip()
    assert "No GPU has run" in page.empty() and "No GPU has run" not in both
    assert "a \\| b" in both and "**1 differ**" in both


def test_a_later_run_replaces_the_steps_that_it_ran_and_keeps_the_others():
    first = page.update(
        "", H100, [_result("basics", "before | bar", "2026-11-20"), _result("memory", "kept | bar", "2026-11-20")]
    )
    later = page.update(first, H100 | {"torch": "2.12.0"}, [_result("basics", "new", "2026-12-01")])
    section = page.sections_of(later)["1 × NVIDIA H100"]
    assert "before" not in section and "| new |" in section and section.count("kept \\| bar") == 1
    assert "2026-12-01, torch 2.12.0" in section and "2026-11-20, torch 2.11.0" in section
    assert (
        page.update(later, H100 | {"torch": "2.12.0"}, [_result("basics", "new", "2026-12-01")]).count("| basics |")
        == 2
    )


def test_a_skipped_step_replaces_nothing():
    first = page.update("", H100, [_result("basics", "measured", "2026-11-20")])
    step = _result("basics", "", "").step
    assert "measured" in page.update(
        first, H100, [Result(step, skipped="no time"), _result("memory", "m", "2026-11-21")]
    )


def test_the_page_in_the_repository_says_who_ran_it_or_that_nobody_has():
    text = (ROOT / "docs" / "gpu-results.md").read_text()
    assert text.startswith(page.HEAD)
    assert text == page.empty() or page.sections_of(text)


def test_a_figure_of_which_nothing_is_expected_is_neither_right_nor_wrong(tmp_path):
    report = Report(tmp_path / "out", "s", "p", device="cpu", folder=tmp_path, gpus=0, left_s=9)
    report.note("speed", "3 GB/s")
    report.at_most("seconds", 3.0, 2.0)
    report.at_least("share", None, 0.8)
    noted, slow, nothing = runner.read_checks(tmp_path / "out")
    assert (noted.verdict, noted.ok) == (NOTE, True)
    assert (slow.expected, slow.found, slow.ok) == ("at most 2 s", "3 s", False)
    assert (nothing.found, nothing.ok) == ("nothing", False)
