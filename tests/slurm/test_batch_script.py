"""The batch script that `kgorch slurm submit` writes, and what it refuses of sbatch's options."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kgorch.errors import KgorchError
from kgorch.slurm import batch_script
from kgorch.slurm.batch_script import JobRequest, JobSetting

GOLDEN = Path(__file__).with_name("batch_script.golden.sh")
SETTING = JobSetting(
    batch_script.job_name("ink-unet3d", "0123456789ab"),
    "ink-unet3d",
    Path("/shared/my kgorch/runs/ink-unet3d/1/slurm"),
    Path("/shared/my kgorch"),
    Path("/shared/plans/ink"),
    "/shared/venv/bin/python",
    save_lead_s=41.2,
)
REQUEST = JobRequest(
    2, 4, 9 * 3600.0, True, ("--partition=gpu", "-A", "vesuvius", "--cpus-per-task", "32", "--comment=it's a # b")
)


def test_the_script_is_the_golden_one():
    """Where the script is meant to change, so is the file."""
    assert batch_script.render(REQUEST, SETTING) == GOLDEN.read_text()


def test_a_run_that_asks_for_nothing_leaves_time_and_gpus_to_the_partition():
    lines = batch_script.render(JobRequest(requeue=False), replace(SETTING, save_lead_s=None)).splitlines()
    assert "#SBATCH --no-requeue" in lines and "#SBATCH --signal=B:USR1@120" in lines
    assert not [line for line in lines if "--time" in line or "--gpus" in line]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(60, "0-00:01:00"), (119, "0-00:01:00"), (9 * 3600, "0-09:00:00"), (90061, "1-01:01:00"), (3e8, "3472-05:20:00")],
)
def test_a_time_limit_is_whole_minutes(seconds, text):
    assert batch_script.slurm_time(seconds) == text


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--array=1-3",), "a name of its own"),
        (("-a", "1-3"), "a name of its own"),
        (("-a1-3",), "a name of its own"),
        (("--arr=0-9%2",), "a name of its own"),
        (("--wrap=rm -rf .",), "kgorch writes the script"),
        (("other.sh",), "not an option of sbatch"),
        (("--partition=gpu", "other.sh"), "not an option of sbatch"),
        (("--signal=B:TERM@5",), "the warning before the time limit"),
        (("--time=1:00:00",), "--time"),
        (("-N2",), "--nodes"),
        (("--out=x",), "kgorch logs"),
        (("--dependency=afterany:3",), "each session would wait for it"),
    ],
)
def test_an_option_that_breaks_the_job_is_refused_with_a_reason(options, says):
    with pytest.raises(KgorchError, match=says):
        JobRequest(options=options).check()


@pytest.mark.parametrize(
    "option", ["--gpus=8", "--exclusive", "--mem=8G", "-pgpu", "-x", "--time-min=10", "--constraint=a100"]
)
def test_any_other_option_of_sbatch_passes(option):
    JobRequest(options=(option,)).check()
    assert f"#SBATCH {option}\n" in batch_script.render(JobRequest(options=(option,)), SETTING)


@pytest.mark.parametrize("word", ["--comment=a\n#SBATCH --uid=0", "--comment=a\x1b[31m"])
def test_a_control_character_gets_no_line_of_its_own_into_the_script(word):
    with pytest.raises(KgorchError, match="control character"):
        batch_script.render(JobRequest(options=(word,)), SETTING)


def test_a_limit_below_a_minute_is_refused():
    with pytest.raises(KgorchError, match="Slurm counts in minutes"):
        JobRequest(time_s=30).check()
