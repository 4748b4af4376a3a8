"""A quick test as a stage, and `kgorch check`: measured in children, foretold, held against what came."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
from driver import build
from harness import processes_of, wait_until

from kgorch.core.codes import Fit
from kgorch.errors import KgorchError
from kgorch.hardware import devices
from kgorch.hardware.devices import Accelerators, Gpu, GpuInventory
from kgorch.launch import launcher, requirements
from kgorch.plan import parse
from kgorch.preflight import machine_checks, stage_probe

PROMISE = Path(__file__).parents[1] / "promises" / "check.json"
QUICK = '[[stage]]\nname = "quick"\nquick_test_of = "train"\n\n'


@pytest.fixture(autouse=True)
def whole_torch(kgorch):
    """The profiler of a probe imports what the test programs spare themselves."""
    kgorch.extra_env["KGORCH_TESTS_COMPILER"] = "1"


def shape(value):
    if isinstance(value, dict):
        return {key: shape(item) for key, item in sorted(value.items())}
    if isinstance(value, list):
        return [shape(value[-1])] if value else []
    return "null" if value is None else type(value).__name__


def checked(kgorch, *args: str, code: int = 0):
    return json.loads(kgorch("check", *args, "--json", code=code).stdout)


def line(found, name):
    return next(item for item in found["preflight"] if item["name"] == name)


def test_a_quick_test_does_one_step_and_the_stage_after_it_all(kgorch):
    path = kgorch.plan(ranks=1, args={"epochs": 2, "sleep": 0.0})
    path.write_text(path.read_text().replace("[[stage]]", QUICK + "[[stage]]", 1))
    kgorch("start", str(path))
    found = kgorch.status()
    assert found["state"] == "finished"
    quick, train = kgorch.history()[0]["stages"]
    assert (quick["name"], quick["last_step"]) == ("quick", 1)
    assert (train["name"], train["first_step"], train["last_step"]) == ("train", 0, 12)


def test_a_check_measures_foretells_leaves_nothing_and_is_held_against_the_run(kgorch):
    path = kgorch.plan(ranks=2, args={"epochs": 60, "sleep": 0.05}, wall="1h", every="600s")
    page = kgorch.folder / "report.html"
    began_s = time.monotonic()
    found = checked(kgorch, str(path), "--html", str(page))
    assert time.monotonic() - began_s < 180
    assert found["verdict"] == Fit.FITS, found["why"]
    assert shape(found) == json.loads(PROMISE.read_text()), (
        "a new field is written into tests/promises and docs/json.md"
    )

    stage = found["stages"][0]
    memory, time_ = stage["memory"], stage["time"]
    weights = (16 * 33 + 33 + 33 * 65 + 65 + 65 * 2 + 65 + 1) * 4  # what learns.py builds, BatchNorm's included
    assert memory["parts"]["gradients"] == weights
    assert memory["parts"]["optimizer"] == pytest.approx(2 * weights, rel=0.05), "AdamW keeps two figures of each"
    assert memory["share"] == 16 and memory["largest_microbatch"] == 16
    by_size = {trial["microbatch"]: trial for trial in memory["trials"] if not trial["checkpointing"]}
    assert 1 not in by_size, "BatchNorm has no statistics of one sample"
    assert (
        max(by_size[2]["held"], by_size[16]["held"]) < memory["limit"]
    )  # so small a network's parts are noise in a process
    assert by_size[2]["step_s"] > 0.05
    assert (time_["epochs"], time_["batches"]) == (60, 6)
    assert 0.05 < time_["step_s"] < 5 and time_["epoch_s"] > 6 * 0.05
    assert found["forecast"]["sessions"] == 1 and found["forecast"]["training_s"] > 60 * time_["epoch_s"]
    assert "Forecast" in page.read_text() and "<html" in page.read_text()

    assert not list(kgorch.home.glob(".check-*")) and not list(kgorch.home.glob("runs/*"))
    assert not (kgorch.folder / "outputs").exists()

    kgorch("start", str(path))
    told = kgorch("history").stderr
    assert "check: train: an epoch" in told and "a rank's process" in told


def test_what_does_not_fit_is_said_with_what_would_and_the_exit_code_tells(kgorch):
    path = kgorch.plan("hungry.py", ranks=1, args={"at": 0, "fits": 8, "rank": -1, "batch": 32, "epochs": 1})
    found = checked(kgorch, str(path))
    assert found["verdict"] == Fit.FITS_WITH, found
    memory = found["stages"][0]["memory"]
    assert memory["settings"] == ["microbatch 8"] and memory["rungs"] == ["microbatch/2"]
    assert memory["largest_microbatch"] in range(8, 16)
    assert {trial["microbatch"] for trial in memory["trials"] if trial["ran_out"]} >= {16}
    parts = -(-32 // memory["largest_microbatch"])
    assert memory["auto_microbatch"] == -(-32 // parts)
    hint = line(found, "stage train")
    assert hint["said"].startswith(f"a microbatch of {memory['auto_microbatch']} fits, the plan begins with 32;")
    assert 'memory.microbatch = "auto"' in hint["do"]
    began = kgorch("start", str(path), "--set", "memory.microbatch=auto").stderr
    assert "no kgorch check" not in began
    first = kgorch.status()["memory"]["rungs"][0]
    assert (first["rung"], first["step"]) == (f"microbatch={memory['auto_microbatch']}", 0)
    assert first["why"] == "kgorch check measured that it fits" and not first["changes_result"]

    small = checked(kgorch, str(path), "--device-memory", "512.05MiB", code=20)
    assert small["verdict"] == Fit.DOES_NOT_FIT and "no rung" in small["why"]


@pytest.mark.soak
def test_odd_stages_are_probed_as_they_are_and_a_quick_test_is_not_counted_twice(kgorch):
    path = kgorch.plan("counts_steps.py", ranks=1, args={"epochs": 2}, extra="")
    stage = path.read_text().partition("[checkpoint]")[0].partition("[[stage]]")[2]
    more = [
        stage.replace('"train"', f'"{only}"').replace("epochs = 2", f'only = "{only}"')
        for only in ("foreign", "evaluation")
    ]
    plain = (
        stage.replace('"train"', '"plain"')
        .replace("counts_steps.py", "never_attaches.py")
        .replace("epochs = 2", 'say = "1.5"')
    )
    added = QUICK + "".join(f"[[stage]]{one}" for one in [stage, *more, plain])
    path.write_text(path.read_text().replace(f"[[stage]]{stage}", added, 1))
    found = checked(kgorch, str(path))
    assert found["verdict"] == Fit.FITS, found["why"]
    train, foreign, evaluation, plain = found["stages"]
    assert (train["name"], plain["name"]) == ("train", "plain")
    for stage in (train, foreign):  # 16 samples, 64 and 1 figures each: not the one that is left over
        assert stage["memory"]["share"] == stage["memory"]["largest_microbatch"] == 16
        assert stage["memory"]["parts"]["batch"] == 16 * 65 * 4
        assert {trial["microbatch"] for trial in stage["memory"]["trials"]} == {1, 2, 4, 8, 16}
    besides_s = found["forecast"]["training_s"] - sum(one["time"]["training_s"] for one in (train, foreign))
    # ten batches of 17 slow samples, of which two were read; a second and a half without a step
    assert besides_s > 1.7 + 1.5
    assert evaluation["memory"] is evaluation["time"] is plain["memory"] is None


def test_a_check_that_is_told_to_end_leaves_nothing_behind(kgorch):
    path = kgorch.plan("never_attaches.py", ranks=1, args={"say": "1000"})
    checking = kgorch.background("check", str(path))
    wait_until(lambda: list(kgorch.home.glob(".check-*/attempts/*/rank0.log")), what="a rank that runs")
    checking.send_signal(signal.SIGTERM)
    assert checking.wait(30) == 128 + signal.SIGTERM
    assert not list(kgorch.home.glob(".check-*"))
    wait_until(lambda: not processes_of(kgorch.home))


def test_what_was_killed_for_want_of_memory_is_not_tried_again_and_does_not_fit(tmp_path, monkeypatch):
    """The kernel's part is played: nobody may fill this machine's memory."""
    asked, endings = [], [[64, False], None, None]

    def run(launch, gpus, patience_s):
        asked.append((launch.settings["microbatch"], launch.probe["killed"]))
        folder = Path(launch.folder)
        folder.mkdir(parents=True)
        if endings and (trying := endings.pop(0)):
            (folder / "probe.trying").write_text(json.dumps(trying))
        return True

    monkeypatch.setattr(stage_probe, "_run", run)
    monkeypatch.setattr(launcher, "kernel_kills", lambda folder: 1)
    monkeypatch.setattr(launcher, "was_sigkilled", lambda folder: True)
    plan = parse('name = "a"\n[memory]\nmicrobatch = 4\n[[stage]]\nname = "s"\nentry = "a.py"\nranks = 1', "plan.toml")
    with pytest.raises(stage_probe.ProbeFailed):
        stage_probe.probe(stage_probe.ProbeSite(plan, tmp_path, tmp_path), plan.stage[0], patience_s=1.0)
    assert asked == [(4, []), (4, [(64, False)]), (1, [(64, False), (4, False)])]


def test_the_keeper_that_stages_share_can_tell_their_launches_apart(tmp_path, monkeypatch):
    """It numbers snapshots by attempt: a second stage waited for ever for a save that it took for the first one's."""
    launched = []
    monkeypatch.setattr(stage_probe, "_run", lambda launch, gpus, patience_s: launched.append(launch.attempt) or True)
    stages = "".join(f'[[stage]]\nname = "{name}"\nentry = "a.py"\nranks = 1\n' for name in "abc")
    plan = parse(f'name = "a"\n{stages}', "plan.toml")
    for stage in plan.stage:
        with pytest.raises(stage_probe.ProbeFailed):
            stage_probe.probe(stage_probe.ProbeSite(plan, tmp_path, tmp_path), stage, patience_s=1.0)
    assert len(set(launched)) == 3


def test_a_training_that_fails_in_its_first_steps_is_found_before_an_hour_is_spent(kgorch):
    found = checked(kgorch, str(kgorch.plan("crashes.py", ranks=1, args={"at": 0})), code=20)
    assert found["verdict"] == Fit.DOES_NOT_RUN
    assert "ValueError: the loss went wrong at step 0" in found["why"]
    assert not list(kgorch.home.glob(".check-*"))


def test_a_plan_that_needs_gpus_is_neither_passed_nor_begun_without_them(kgorch):
    path = kgorch.plan(ranks=1, extra="gpus = 2")
    found = checked(kgorch, str(path), code=20)
    assert line(found, "gpus")["verdict"] == "fail" and "needs 2" in line(found, "gpus")["said"]
    assert found["stages"] == [], "nothing was probed"
    path.write_text(path.read_text().replace("ranks = 1", 'ranks = "auto"'))
    meant = checked(kgorch, str(path), "--device-memory", "15GiB")  # on a laptop, of two GPUs that are elsewhere
    assert (
        meant["verdict"] == Fit.FITS
        and meant["stages"][0]["ranks"] == 2
        and meant["stages"][0]["memory"]["share"] == 16
    )
    assert line(meant, "gpus")["verdict"] == line(meant, "time")["verdict"] == "warn"
    refused = kgorch("start", str(path), "--set", "quota.hours=30", "--set", "platform.name=kaggle", code=2)
    assert "the plan needs 2 GPUs" in refused.stderr
    assert "next: in the notebook: Settings, Accelerator, GPU T4 x2" in refused.stderr
    assert kgorch.history() == [] and "no hours are counted yet" in kgorch("quota").stdout


def test_mistakes_in_what_is_typed_are_told_before_minutes_are_spent(kgorch):
    path = kgorch.plan(ranks=1)
    refused = kgorch("check", str(path), "--html", "nowhere/report.html", code=2)
    assert "nowhere/report.html cannot be written" in refused.stderr and "probing" not in refused.stderr
    assert "no steps were taken" in checked(kgorch, str(path), "--no-probe")["why"]
    assert "less than the CUDA context needs" in kgorch("check", str(path), "--device-memory", "15", code=2).stderr


def test_a_driver_that_does_not_say_which_cuda_it_takes_is_no_mistake(kgorch, tmp_path):
    kgorch.extra_env |= build(tmp_path).env
    found = checked(kgorch, str(kgorch.plan(ranks=1, extra="gpus = 1")), "--no-probe")
    assert line(found, "gpus")["verdict"] == "pass"
    assert line(found, "cuda")["verdict"] == "warn"


T4S = {index: Gpu(f"GPU-{index}{index}{index}", "Tesla T4", has_mig=False) for index in range(2)}
A100 = {0: Gpu("GPU-aaa", "NVIDIA A100-SXM4-40GB", has_mig=True)}
CUDA_12 = GpuInventory(T4S, "550.54", (12, 4))


def a_plan(ranks: object = '"auto"', gpus: int = 0):
    session = f"[session]\ngpus = {gpus}\n" if gpus else ""
    return parse(f'name = "a"\n{session}[[stage]]\nname = "s"\nentry = "a.py"\nranks = {ranks}', "plan.toml")


def checks(accelerators, plan=None, **kwargs):
    return {check.name: check for check in requirements.check_accelerators(accelerators, plan or a_plan(), **kwargs)}


@pytest.mark.parametrize(
    ("accelerators", "verdicts"),
    [
        (Accelerators(CUDA_12, None, "12.6"), {"gpus": "pass", "cuda": "pass"}),
        (Accelerators(CUDA_12, "GPU-1", "12.6"), {"gpus": "pass", "cuda": "pass"}),
        (Accelerators(CUDA_12, None, "11.8"), {"gpus": "pass", "cuda": "pass"}),
        (Accelerators(CUDA_12, None, "13.0"), {"gpus": "pass", "cuda": "fail"}),
        (Accelerators(CUDA_12, "", "13.0"), {"gpus": "pass"}),
        (Accelerators(CUDA_12, None, ""), {"gpus": "pass", "cuda": "warn"}),
        (Accelerators(CUDA_12, None, None), {"gpus": "pass"}),
        (Accelerators(CUDA_12._replace(cuda=None), None, "12.6"), {"gpus": "pass", "cuda": "warn"}),
        (Accelerators(CUDA_12, "GPU-9", "12.6"), {"gpus": "fail"}),
        (Accelerators(CUDA_12._replace(gpus=A100), None, "12.6"), {"gpus": "pass", "cuda": "pass", "mig": "warn"}),
        (Accelerators(CUDA_12._replace(gpus=A100), "MIG-1", "12.6"), {"gpus": "pass", "cuda": "pass", "mig": "warn"}),
        (Accelerators(None, None, "12.6"), {"gpus": "pass"}),
        (Accelerators(None, "nonsense", "12.6"), {"gpus": "pass"}),
    ],
)
def test_what_the_machine_offers_decides_whether_the_gpus_can_be_used(accelerators, verdicts):
    assert {name: check.verdict for name, check in checks(accelerators).items()} == verdicts


@pytest.mark.parametrize(
    ("accelerators", "why", "do"),
    [
        (Accelerators(None), "no NVIDIA driver answers", "switch the accelerator on"),
        (Accelerators(None, "0,1"), "no NVIDIA driver answers", "switch the accelerator on"),
        (Accelerators(CUDA_12._replace(gpus={})), "the driver shows no GPU", "switch the accelerator on"),
        (Accelerators(CUDA_12._replace(gpus=A100)), "the driver shows 1 GPU", "choose a machine with 2"),
        (Accelerators(CUDA_12, "1"), "CUDA_VISIBLE_DEVICES='1' leaves 1 of 2", "unset CUDA_VISIBLE_DEVICES"),
        (Accelerators(CUDA_12, ""), "CUDA_VISIBLE_DEVICES is empty and hides 2 GPUs", "unset CUDA_VISIBLE_DEVICES"),
    ],
)
def test_gpus_that_are_missing_are_told_with_the_reason(accelerators, why, do):
    check = checks(accelerators, a_plan(gpus=2))["gpus"]
    assert check.verdict == "fail" and check.facts == (why,)
    assert check.do == f"{check.do.partition(';')[0]}; or take session.gpus out of the plan" and do in check.do
    assert "the plan needs 2 GPUs (session.gpus = 2), and CUDA sees" in check.what
    elsewhere = checks(accelerators, a_plan(gpus=2), elsewhere=True)["gpus"]
    assert elsewhere.verdict == "warn"


def test_ranks_that_share_a_gpu_are_told_that_gloo_is_slower_and_what_starts_one_each():
    one = Accelerators(CUDA_12, "0", "12.6")
    check = checks(one, a_plan(ranks=2))["gpus"]
    assert (check.verdict, check.what) == ("warn", "2 ranks share 1 GPU (Tesla T4)")
    assert "NCCL refuses two ranks on one GPU" in check.facts[0] and "gloo" in check.facts[0]
    assert checks(Accelerators(CUDA_12, None, "12.6"), a_plan(ranks=2))["gpus"].verdict == "pass"
    assert checks(one._replace(torch_cuda=""), a_plan(ranks=2))["gpus"].verdict == "pass", (
        "on the CPU nobody shares one"
    )


def test_a_start_refuses_the_first_failure_and_says_each_warning_in_a_line(monkeypatch):
    notes = []
    monkeypatch.setattr(devices, "detect_accelerators", lambda: Accelerators(CUDA_12, "0", "12.6"))
    requirements.check_gpus(a_plan(ranks=2), notes.append)
    [note] = notes
    assert note.startswith("2 ranks share 1 GPU (Tesla T4); NCCL") and note.endswith("starts one rank a GPU")
    monkeypatch.setattr(devices, "detect_accelerators", lambda: Accelerators(CUDA_12, None, "13.0"))
    with pytest.raises(KgorchError) as error:
        requirements.check_gpus(a_plan(), notes.append)
    assert "the driver 550.54 takes CUDA up to 12.4, and PyTorch is built for CUDA 13.0" in error.value.what
    assert "install a PyTorch built for CUDA 12" in error.value.next_step


def torch_for(cuda: str, folder: Path) -> dict[str, str]:
    """The environment of a machine whose PyTorch says that it is built for that CUDA. It trains on the CPU all the same."""
    package = folder / "built" / "torch"
    package.mkdir(parents=True)
    (package / "version.py").write_text(f"from typing import Optional\ncuda: Optional[str] = '{cuda}'\n")
    (package / "__init__.py").write_text(
        f"import sys\nsys.path.remove({str(package.parent)!r})\ndel sys.modules['torch']\nimport torch\n"
    )
    return {"PYTHONPATH": str(package.parent)}


def test_a_variable_that_names_no_gpu_is_refused_in_the_same_words_by_check_start_and_resume(kgorch, tmp_path):
    kgorch.extra_env |= build(tmp_path).env | {"CUDA_VISIBLE_DEVICES": "0,7"}
    path = kgorch.plan(ranks=1, args={"epochs": 2})
    row = line(checked(kgorch, str(path), "--no-probe", code=20), "gpus")
    assert row["verdict"] == "fail"
    for verb in ("start", str(path)), ("resume",):
        stderr = kgorch(*verb, code=2).stderr
        what, fact, do = stderr.splitlines()
        assert what.startswith(
            "error: CUDA_VISIBLE_DEVICES is not valid: there is no GPU 7; the GPUs of this machine: 0 (GPU-0"
        )
        assert fact == "  found CUDA_VISIBLE_DEVICES='0,7', of which CUDA would use only what comes before that entry"
        assert do == "next: unset CUDA_VISIBLE_DEVICES; or name GPUs that there are: export CUDA_VISIBLE_DEVICES=0,1"
        assert what.endswith(" [KG305]")
        assert row["said"] in f"{what.removesuffix(' [KG305]')}; {fact.strip()}" and row["do"] in do
    assert kgorch.history() == [], "no session was opened"
    kgorch.extra_env["CUDA_VISIBLE_DEVICES"] = "GPU-00000001"
    kgorch("resume")
    assert kgorch.status()["state"] == "finished"


def test_gpus_that_are_hidden_on_purpose_are_missed_only_by_a_plan_that_needs_some(kgorch, tmp_path):
    kgorch.extra_env |= build(tmp_path).env | {"CUDA_VISIBLE_DEVICES": ""}
    path = kgorch.plan(ranks=1, args={"epochs": 1})
    row = line(checked(kgorch, str(path), "--no-probe"), "gpus")
    assert row["verdict"] == "pass" and row["do"] == "unset CUDA_VISIBLE_DEVICES to use them"
    assert "CUDA_VISIBLE_DEVICES is empty and hides 2 GPUs; training would run on the CPU" in row["said"]
    stderr = kgorch("start", str(path), "--set", "session.gpus=1", code=2).stderr
    assert "the plan needs 1 GPU (session.gpus = 1), and CUDA sees none [KG305]\n" in stderr
    assert "\n  CUDA_VISIBLE_DEVICES is empty and hides 2 GPUs\nnext: unset CUDA_VISIBLE_DEVICES; or" in stderr


def test_a_driver_too_old_for_pytorch_is_found_before_an_hour_is_spent(kgorch, tmp_path):
    driver = build(tmp_path)
    driver.be(cuda="12.4")
    kgorch.extra_env |= driver.env | torch_for("13.0", tmp_path)
    path = kgorch.plan(ranks=1, args={"epochs": 1})
    row = line(checked(kgorch, str(path), "--no-probe", code=20), "cuda")
    stderr = kgorch("start", str(path), code=2).stderr
    assert row["verdict"] == "fail" and row["said"] in stderr and row["do"] in stderr
    assert "takes CUDA up to 12.4, and PyTorch is built for CUDA 13.0" in stderr
    assert kgorch.history() == [], "no session was opened"


def test_two_ranks_on_one_gpu_start_with_a_note(kgorch, tmp_path):
    driver = build(tmp_path)
    driver.be(gpus=1, cuda="12.4")
    kgorch.extra_env |= driver.env | torch_for("12.6", tmp_path)
    path = kgorch.plan(ranks=2, args={"epochs": 1})
    assert line(checked(kgorch, str(path), "--no-probe"), "gpus")["verdict"] == "warn"
    stderr = kgorch("start", str(path)).stderr
    assert "note: 2 ranks share 1 GPU (Tesla T4); NCCL refuses two ranks on one GPU" in stderr
    assert 'ranks = "auto" starts one rank a GPU' in stderr
    assert kgorch.status()["state"] == "finished"


def test_a_gpu_in_mig_mode_is_told_with_what_chooses_an_instance(kgorch, tmp_path):
    driver = build(tmp_path)
    driver.be(gpus=1, cuda="12.4", migs=["MIG-c6d4f1ef"])
    driver.set(0, mig=1)
    kgorch.extra_env |= driver.env
    path = kgorch.plan(ranks=1)
    row = line(checked(kgorch, str(path), "--no-probe"), "mig")
    assert "GPU 0: MIG mode is on" in row["said"] and "nvidia-smi -L" in row["do"]
    kgorch.extra_env["CUDA_VISIBLE_DEVICES"] = "MIG-c6d4f1ef"
    row = line(checked(kgorch, str(path), "--no-probe"), "mig")
    assert "the whole GPU's" in row["said"] and "one alone" in row["said"]


def test_a_start_while_the_driver_fails_says_what_to_do(kgorch, tmp_path):
    driver = build(tmp_path)
    driver.fail("nvmlDeviceGetCount_v2", "unknown")
    kgorch.extra_env |= driver.env
    stderr = kgorch("start", str(kgorch.plan(ranks=1, extra="gpus = 1")), code=2).stderr
    assert "the GPUs of this machine cannot be listed" in stderr and "next: run nvidia-smi" in stderr


def shared_memory(free: int, monkeypatch, folder: Path, *, gpus: int, ranks: int):
    monkeypatch.setattr(machine_checks, "SHM", folder)
    monkeypatch.setattr(devices, "visible_gpu_count", lambda environ=None: gpus)
    monkeypatch.setattr(devices, "torch_cuda", lambda: "12.6")
    return list(machine_checks._shared_memory(free, a_plan(ranks=ranks)))


def test_nccl_needs_shared_memory_too(monkeypatch, tmp_path):
    """64 MiB is what Docker gives."""
    assert shared_memory(64 << 20, monkeypatch, tmp_path, gpus=0, ranks=2) == []
    assert shared_memory(64 << 20, monkeypatch, tmp_path, gpus=1, ranks=1) == []
    [row] = shared_memory(64 << 20, monkeypatch, tmp_path, gpus=2, ranks=2)
    assert row.verdict == "warn" and "2 ranks exchange gradients (NCCL)" in row.said and "--shm-size" in row.do
    [row] = shared_memory(63 << 20, monkeypatch, tmp_path, gpus=0, ranks=2)
    assert "NCCL" not in row.said
    assert shared_memory(1 << 30, monkeypatch, tmp_path, gpus=8, ranks=8) == []


def test_what_killed_ranks_left_of_nccl_is_told_in_bytes(monkeypatch, tmp_path):
    with open(tmp_path / "nccl-aB3dEf", "wb") as file:
        os.posix_fallocate(file.fileno(), 0, 3 << 20)  # as NCCL does
    (tmp_path / "nccl-linked").symlink_to("/dev/zero")
    (tmp_path / "torch_1_2").write_bytes(bytes(1 << 20))
    [row] = shared_memory(1 << 30, monkeypatch, tmp_path, gpus=0, ranks=1)
    assert row.verdict == "warn" and row.said.startswith(f"3.0 MiB of {tmp_path} are NCCL's files")
    assert row.do.endswith(f"find {tmp_path} -name 'nccl-*' -user $(id -u) -delete")
    monkeypatch.setattr(machine_checks.os, "getuid", lambda: 12345)
    assert shared_memory(1 << 30, monkeypatch, tmp_path, gpus=0, ranks=1) == [], "another user's are not ours to remove"


def test_the_machine_alone_is_looked_at_in_a_moment_and_what_is_wrong_is_named(kgorch):
    (kgorch.folder / "file").write_text("no folder")
    path = kgorch.plan(ranks=1, wall="9h", extra="[checkpoint2]\n")
    assert "unknown key" in kgorch("check", str(path), code=2).stderr
    path = kgorch.plan(ranks=1, wall="9h", extra="[quota]\nhours = 30\n")
    path.write_text(path.read_text().replace("[checkpoint]", '[checkpoint]\ndir = "file/below"\nmirror = "nowhere"'))
    found = checked(kgorch, str(path), "--no-probe", code=20)
    verdicts = {item["name"]: item["verdict"] for item in found["preflight"]}
    assert verdicts["checkpoints"] == verdicts["mirror"] == "fail"
    assert verdicts["python"] == verdicts["torch"] == verdicts["entries"] == "pass"
    assert "30.0 of 30 h left" in line(found, "quota")["said"]
    assert "9:00:00" in line(found, "platform")["said"]


def test_a_checkpoint_that_a_start_would_go_on_from_is_read_back_and_the_forecast_counts_from_it(kgorch, tmp_path):
    path = kgorch.plan(ranks=1, args={"epochs": 40, "sleep": 0.05}, every="600s")
    kgorch("start", str(path), "--detach")
    kgorch.wait_for_step(20)
    kgorch("stop")
    step = kgorch.status()["checkpoint"]["step"]
    found = checked(kgorch, str(path), "--no-probe")
    assert f"train, step {step}, read back" in line(found, "checkpoint")["said"]

    there = replace(kgorch, home=tmp_path / "new machine")
    found = checked(there, str(path), "--set", f'resume.sources=["{kgorch.home}"]')
    assert "a start copies it and goes on from it" in line(found, "checkpoint")["said"]
    ahead, time_ = found["forecast"], found["stages"][0]["time"]
    assert ahead["goes_on_from"] == {"stage": "train", "step": step}
    assert time_["epochs"] == 40 and time_["batches"] == 6
    assert ahead["training_s"] == pytest.approx(time_["training_s"] - step / 6 * time_["epoch_s"])

    shard = next(kgorch.checkpoints()[-1].glob("*.safetensors"))
    broken = bytearray(shard.read_bytes())
    broken[-1] ^= 1
    shard.write_bytes(broken)
    told = checked(kgorch, str(path), "--no-probe")
    assert any(item["name"] == "checkpoint" and item["verdict"] == "warn" for item in told["preflight"])


def test_an_estimate_for_two_t4_computes_nothing_prints_what_it_assumes_and_counts_the_validation(kgorch):
    path = kgorch.plan("divides.py", ranks=2, args={"epochs": 10}, wall="9h", every="600s")
    told = ("samples=1000", "epoch=50m", "first_epoch=60m", "evaluation=7.5m")
    found = checked(kgorch, str(path), "--on", "t4x2", *(word for one in told for word in ("--assume", one)))
    assert found["verdict"] == Fit.FITS, found["why"]
    [stage] = found["stages"]
    assert stage["ranks"] == 2 and stage["memory"]["limit"] == int(14.74 * (1 << 30))
    assert found["forecast"]["training_s"] / 3600 == pytest.approx((60 + 9 * 50 + 10 * 7.5) / 60, rel=0.01)
    assert found["forecast"]["sessions"] == 2
    assert found["forecast_by_model"]["training_s"] < 3600 < found["forecast"]["training_s"]
    assert {row["value"] for row in found["assumptions"]} >= {"1000", "0:50:00", "1:00:00", "0:07:30"}


def test_an_estimate_refuses_more_gpus_than_the_machine_has(kgorch):
    path = kgorch.plan(ranks=1, args={"epochs": 1})
    found = checked(kgorch, str(path), "--on", "t4", "--set", "session.gpus=2", code=20)
    assert found["verdict"] == Fit.DOES_NOT_RUN and "the plan needs 2" in found["why"]


def test_a_result_that_a_probed_script_writes_over_is_named(kgorch):
    plan = kgorch.plan(args={"epochs": 2})
    script = kgorch.folder / "learns.py"
    script.write_text(f"open('result.pt', 'w').write('of a few steps')\nopen('new.pt', 'w')\n{script.read_text()}".replace(
        "from __future__ import annotations\n", "", 1))  # fmt: skip
    (kgorch.folder / "result.pt").write_text("of the whole training")
    found = json.loads(kgorch("check", str(plan), "--json", code=None).stdout)
    [line] = [line for line in found["preflight"] if line["name"] == "files"]
    assert line["verdict"] == "warn" and line["said"].endswith("probed: result.pt") and "session.quick" in line["do"]


def test_a_session_whose_time_is_over_fails_the_check_as_it_refuses_a_start(kgorch):
    kgorch.extra_env["KAGGLE_KERNEL_RUN_TYPE"] = (
        "Interactive"  # whose sessions begin with the container: here with the machine
    )
    plan = kgorch.plan(wall="1s", margin="0.1s")
    over = line(checked(kgorch, str(plan), "--no-probe", code=20), "platform")
    assert over["verdict"] == "fail" and "0:00:00 of this one left" in over["said"] and "--until" in over["do"]
    on = line(checked(kgorch, str(kgorch.plan(wall="20000h")), "--no-probe", code=None), "platform")
    assert on["verdict"] == "pass" and "left: it began with the container" in on["said"]


def test_results_of_an_earlier_training_that_the_probe_has_written_over_are_named(kgorch):
    plan, result = kgorch.plan(args={"epochs": 2}), kgorch.folder / "net.pt"
    with open(kgorch.folder / "learns.py", "a") as script:
        script.write("    open('net.pt', 'w').write('of a few steps')\n")
    result.write_text("of an earlier training")
    found = checked(kgorch, str(plan))
    assert result.read_text() == "of a few steps"
    files = line(found, "files")
    assert files["verdict"] == "warn" and "net.pt" in files["said"] and "session.quick" in files["do"]
