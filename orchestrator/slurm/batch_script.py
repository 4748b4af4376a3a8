"""The batch script of a run: what a user would write by hand, with all options in it, so that a requeue and a successor get the
same ones."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kgorch.errors import KgorchError

WARNING_S = 60
"""Seconds that Slurm's warning comes before the save lead: Slurm sends it up to half a minute late (measured on 22.05.8)."""

FIRST_LEAD_S = 60.0
"""Save lead of a run that was not trained yet."""

SHORTEST_S = 60.0
"""Slurm counts time limits in minutes."""

OWN_OPTIONS = {
    "array": "all tasks of an array would train the same run: submit one plan for each, with a name of its own",
    "wrap": "kgorch writes the script",
    "job-name": "kgorch finds the job by its name",
    "output": "kgorch logs reads it in the run's folder",
    "error": "it goes to the job's output in the run's folder",
    "open-mode": "sessions of a requeued job append to one file",
    "signal": "kgorch needs the warning before the time limit",
    "chdir": "training starts in the plan's folder",
    "parsable": "kgorch reads the answer of sbatch",
    "test-only": "kgorch slurm submit --dry-run shows the script",
    "wait": "kgorch status --watch follows the run",
    "dependency": "each session would wait for it again: submit the run when it may begin",
    "begin": "each session would wait for it again: submit the run when it may begin",
    "nodes": "give it to kgorch: --nodes",
    "time": "give it to kgorch: --time",
    "gpus-per-node": "give it to kgorch: --gpus",
    "requeue": "give it to kgorch: --requeue",
    "no-requeue": "give it to kgorch: --no-requeue",
    "ntasks": "one task a node starts the ranks",
    "ntasks-per-node": "one task a node starts the ranks",
    "help": "man sbatch",
    "usage": "man sbatch",
    "version": "sbatch --version",
}
"""Options of sbatch that a user may not give, and why."""

SHORT = {"a": "array", "J": "job-name", "o": "output", "e": "error", "D": "chdir", "W": "wait", "d": "dependency", "b": "begin",
         "N": "nodes", "t": "time", "n": "ntasks", "h": "help", "V": "version"}  # fmt: skip


@dataclass(frozen=True, slots=True)
class JobRequest:
    """What a run asks of Slurm.

    Attributes:
        gpus: on each node; 0 for none.
        time_s: time limit; None for the partition's.
        requeue: sessions follow one another until the run is finished.
        options: further options of sbatch, as they were typed.
    """

    nodes: int = 1
    gpus: int = 0
    time_s: float | None = None
    requeue: bool = True
    options: tuple[str, ...] = ()

    def check(self) -> None:
        """Raises: KgorchError."""
        if self.time_s is not None and self.time_s < SHORTEST_S:
            raise KgorchError(
                f"--time {self.time_s:g}s is too short: Slurm counts in minutes", next_step="give it 1m at least"
            )
        for option, _ in grouped(self.options):
            _check_option(option)


@dataclass(frozen=True, slots=True)
class JobSetting:
    """Where the job of a run works.

    Attributes:
        name: of the job, unique for the run.
        run: what `kgorch resume` takes.
        folder: of the job's files, in the run's folder.
        home: the state folder.
        workdir: the plan's folder.
        python: the interpreter that has kgorch.
        save_lead_s: of the run's last session; None before there was one.
    """

    name: str
    run: str
    folder: Path
    home: Path
    workdir: Path
    python: str
    save_lead_s: float | None = None

    @property
    def script(self) -> Path:
        return self.folder / "job.sh"


def job_name(run: str, run_id: str) -> str:
    return f"kgorch-{run}-{run_id[:6]}"


def render(request: JobRequest, setting: JobSetting) -> str:
    """The text of the script. Raises: KgorchError for a path that cannot stand in it."""
    warning_s = math.ceil(FIRST_LEAD_S if setting.save_lead_s is None else setting.save_lead_s) + WARNING_S
    log = str(setting.folder).replace("%", "%%") + "/%j.log"
    directives = [
        f"--job-name={setting.name}",
        f"--nodes={request.nodes}",
        "--ntasks-per-node=1",
        *([f"--gpus-per-node={request.gpus}"] if request.gpus else []),
        *([f"--time={slurm_time(request.time_s)}"] if request.time_s is not None else []),
        f"--signal=B:USR1@{warning_s}",
        "--requeue" if request.requeue else "--no-requeue",
        "--open-mode=append",
        f"--output={log}",
    ]
    lines = [quoted(item) for item in directives] + [
        " ".join(quoted(word) for word in (option, *values)) for option, values in grouped(request.options)
    ]
    command = [setting.python, "-m", "kgorch.cli", "slurm", "session", setting.run]
    return "\n".join(
        [
            "#!/bin/bash",
            f"# Sessions of the run {setting.run}. Written by `kgorch slurm submit`, which overwrites it.",
            *(f"#SBATCH {line}" for line in lines),
            "",
            "# Slurm's warning before the time limit (USR1) and `kgorch stop` (USR2) are ignored until the session listens.",
            "trap '' USR1 USR2",
            f"export KGORCH_HOME={shlex.quote(str(setting.home))}",
            f"cd {shlex.quote(str(setting.workdir))} || exit 2",
            f"exec {shlex.join(command)}",
            "",
        ]
    )


def slurm_time(seconds: float) -> str:
    """A duration as sbatch takes it: `0-09:00:00`. Rounded down to a whole minute, because Slurm would round it up."""
    minutes = int(seconds // 60)
    return f"{minutes // 1440}-{minutes // 60 % 24:02d}:{minutes % 60:02d}:00"


def quoted(word: str) -> str:
    """A word of a line `#SBATCH`: sbatch reads quotes as a shell does, without expansion. Raises: KgorchError."""
    if not word.isprintable():
        raise KgorchError(f"{word!r:.100} has a control character, and cannot stand in a batch script")
    return word if re.fullmatch(r"[\w@%+=:,./\-\[\]*]+", word) else shlex.quote(word)


def grouped(options: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Options with the words that follow each: a line of the script each. Raises: KgorchError for a word before the first one."""
    groups: list[tuple[str, list[str]]] = []
    for word in options:
        if word.startswith("-") and len(word) > 1:
            groups.append((word, []))
        elif groups and not groups[-1][1] and "=" not in groups[-1][0]:
            groups[-1][1].append(word)
        else:
            raise KgorchError(
                f"{word!r:.100} is not an option of sbatch",
                next_step="kgorch slurm submit PLAN -- --partition=gpu",
            )
    return groups


def _check_option(option: str) -> None:
    if option.startswith("--"):
        typed = option[2:].partition("=")[0]
        # sbatch takes each unique beginning of an option; --gpus is one by itself
        names = [own for own in OWN_OPTIONS if own == typed or (len(typed) > 2 and own.startswith(typed))]
        names = [] if typed == "gpus" else names
    else:
        names = [SHORT[option[1]]] if option[1] in SHORT else []
    if not names:
        return
    why = OWN_OPTIONS[names[0]]
    raise KgorchError(f"sbatch's option {option!r:.100} is not for kgorch slurm submit: {why}")
