"""Slurm's commands, as a user types them. Each has a time limit, and an error that says what Slurm answered.

Commands and not libslurm (PySlurm): its binding must be built against the site's exact version of Slurm, as Slurm's own
documentation says, while these options have been the same for ten years.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path

from kgorch.core.slurm.job_state import JobState, JobView, parse_job
from kgorch.errors import KgorchError

TIMEOUT_S = 30.0
"""A controller that is busy with its scheduler answers after seconds."""

UNANSWERED = re.compile(
    "contact slurm controller|socket timed out|zero bytes were transmitted|in standby mode|message (send|receive) failure"
    "|communication (connection|shutdown) failure|connection (refused|reset|timed out)|temporar(y|ily) (failure|unavailable)"
    "|munge (en|de)code failed|protocol authentication error",
    re.IGNORECASE,
)
"""Of a command that has not reached the controller or got no answer: texts of slurm_errno.c (22.05), and of munge.

What was asked may have been done all the same.
"""

STOP_SIGNAL = "USR2"
"""By which `kgorch stop` asks the process of a job (scheduler/slurm_job.py) to save and end."""


class SlurmError(KgorchError):
    """Slurm did not do what was asked."""


class SlurmUnavailable(SlurmError):
    """Slurm's commands are not installed here, or the controller does not answer: nobody knows how the job is."""


class SlurmMissing(SlurmUnavailable):
    """There is no such command on this machine: nothing was asked of Slurm."""


def are_installed() -> bool:
    return shutil.which("scontrol") is not None


def submit(script: Path, *options: str, environ: Mapping[str, str] = os.environ) -> str:
    """Submit a batch script. Args: options: of sbatch, which outrank those in the script. Returns: the job's number.

    Raises: SlurmError.
    """
    # sbatch takes variables SBATCH_… for options, and in a job it would inherit that job's own limits as SLURM_…
    inherited = {name: value for name, value in environ.items() if not name.startswith(("SLURM_", "SBATCH_"))}
    kept = {name: environ[name] for name in ("SLURM_CONF",) if name in environ}
    answer = _run(["sbatch", "--parsable", *options, str(script)], inherited | kept)
    job = answer.strip().splitlines()[-1].partition(";")[0] if answer.strip() else ""
    if not job.isdecimal():
        raise SlurmError(f"sbatch: expected the number of a job, found {answer[:80]!r}")
    return job


def show(job: str) -> JobView:
    """How a job is; ABSENT where Slurm does not know it. Raises: SlurmUnavailable."""
    try:
        return parse_job(job, _run(["scontrol", "show", "job", job]))
    except SlurmUnavailable:
        raise
    except SlurmError as error:
        if "Invalid job id" in error.what:
            return JobView(job, JobState.ABSENT)
        raise SlurmUnavailable(error.what) from None
    except ValueError as error:
        raise SlurmUnavailable(f"scontrol show job {job}: {error}") from None


def find(name: str, but: str = "") -> str | None:
    """The number of the newest job of that name of this user that is not over. Args: but: another job. Raises: SlurmError."""
    numbers = _run(["squeue", "--noheader", "--me", "--name", name, "--format", "%A"]).split()
    return max((number for number in numbers if number.isdecimal() and number != but), key=int, default=None)


def requeue(job: str) -> None:
    """Have a job run again from its start. Slurm ends it first. Raises: SlurmError where it refuses."""
    _run(["scontrol", "requeue", job])


def cancel_waiting(job: str) -> None:
    """Cancel a job unless it runs by now. Raises: SlurmError."""
    _run(["scancel", "--state=PENDING", job])


def ask_to_stop(job: str) -> None:
    """Have the batch process of a job save and end. Only that process gets the signal, no rank. Raises: SlurmError."""
    _run(["scancel", "--batch", f"--signal={STOP_SIGNAL}", job])


def time_option(begins_at: datetime) -> str:
    """sbatch's option for a job that must not begin earlier. Slurm reads it in the zone of the machine."""
    return f"--begin={begins_at.astimezone():%Y-%m-%dT%H:%M:%S}"


def _run(command: list[str], environ: Mapping[str, str] = os.environ) -> str:
    # Instants in ISO 8601, whatever format the user has set
    variables = {**environ, "SLURM_TIME_FORMAT": "standard"}
    try:
        done = subprocess.run(
            command,
            env=variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT_S,
        )
    except FileNotFoundError:
        raise SlurmMissing(
            f"there is no {command[0]} on this machine",
            next_step="type it on a login node of the cluster, or add Slurm's commands to PATH",
        ) from None
    except subprocess.TimeoutExpired:
        raise SlurmUnavailable(
            f"{command[0]} has not answered within {TIMEOUT_S:.0f} s", next_step="sinfo shows whether Slurm is up"
        ) from None
    except OSError as error:
        raise SlurmUnavailable(f"{command[0]}: {error}") from None
    if done.returncode < 0:
        raise SlurmUnavailable(
            f"{command[0]} was ended by signal {-done.returncode}: what it asked for may have been done"
        )
    if done.returncode:
        answer = " ".join(done.stderr.split())[:500] or f"exit status {done.returncode}"
        if UNANSWERED.search(answer):
            raise SlurmUnavailable(f"{command[0]}: {answer}", next_step="sinfo shows whether Slurm is up")
        raise SlurmError(
            f"{command[0]} refused: {answer}", next_step="change what it names, or ask those who run the cluster"
        )
    return done.stdout
