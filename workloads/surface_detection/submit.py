"""Hand the archive in to the competition with Kaggle's own client; once, however often the stage is cut.

    alone:  python -m kgorch.workloads.surface_detection.submit --message "first try"

The client (`pip install kaggle`, version 2) needs a token: KAGGLE_API_TOKEN, or ~/.kaggle/access_token. It ends with 0 also
where the server refused, and has no time limit of its own, so the list of submissions is asked before and after.
"""

from __future__ import annotations

import hashlib
import json
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from kgorch import KgorchError, output_folder
from kgorch.workloads import cli

COMPETITION = "vesuvius-challenge-surface-detection"
ASK_S, SUBMIT_S = 120.0, 3600.0
"""Seconds that the client may take to list the submissions, and to upload the archive."""
TRIES, PAUSE_S = 6, 10.0
"""How often, and at what distance, the list is asked for a submission that was just made."""

Run = Callable[[Sequence[str], float], str]


def main(
    archive: str = "submission.zip", competition: str = COMPETITION, message: str = "kgorch", quick: bool = False
) -> None:
    """Submit, and write submitted.json to the output folder; --archive is below it.

    The message gets the archive's hash as its last word: that is how a submission that was made before is known.
    """
    path = output_folder() / archive
    if not path.is_file():
        raise KgorchError(f"there is no {path}", next_step="run the package stage first")
    facts = submit(path, competition, message, client, wait_s=0 if quick else PAUSE_S)
    (output_folder() / "submitted.json").write_text(json.dumps(facts, indent=1) + "\n")
    print(f"handed in to {competition}: {facts['description']}, {facts['status']}", flush=True)


def submit(path: Path, competition: str, message: str, run: Run, *, wait_s: float = PAUSE_S) -> dict[str, str]:
    """What the competition's list says of this archive, after it was handed in unless it had been.

    Raises: KgorchError when the client fails, or the list does not show the submission.
    """
    description = f"{message} {hashlib.sha256(path.read_bytes()).hexdigest()[:12]}"
    if found := listed(competition, description, run):
        return found
    answer = run(command(competition, path, description), SUBMIT_S)
    for attempt in range(TRIES):
        time.sleep(wait_s if attempt else 0)
        if found := listed(competition, description, run):
            return found
    raise KgorchError(
        f"{competition} does not list the submission", f"the client said: {answer.strip()[-400:] or 'nothing'}",
        next_step="look at the competition's page: it may take notebooks only, be closed, or the day's submissions be used up",
    )  # fmt: skip


def listed(competition: str, description: str, run: Run) -> dict[str, str] | None:
    """The submission of that description: its fields as the client names them, as text."""
    text = run(["kaggle", "competitions", "submissions", competition, "--format", "json", "--page-size", "200"], ASK_S)
    begin = text.find("[")
    try:
        rows = json.loads(text[begin:]) if begin >= 0 else []
    except ValueError as problem:
        raise KgorchError(
            "the list of submissions cannot be read", f"expected JSON, found: {text.strip()[-400:]}",
            next_step="pip install --upgrade kaggle",
        ) from problem  # fmt: skip
    mine = [row for row in rows if row.get("description") == description]
    return {name: str(value) for name, value in mine[0].items()} if mine else None


def command(competition: str, archive: Path, message: str) -> list[str]:
    """What a person would type."""
    return ["kaggle", "competitions", "submit", "-c", competition, "-f", str(archive), "-m", message]


def shown(words: Sequence[str]) -> str:
    return shlex.join(words)


def client(words: Sequence[str], within_s: float) -> str:
    """What the real client printed. Raises: KgorchError when it is missing, fails, or takes too long."""
    beside = Path(sys.executable).with_name(words[0])  # of this environment, whose bin folder may not be on PATH
    program = str(beside) if beside.is_file() else shutil.which(words[0])
    if program is None:
        raise KgorchError("the program kaggle is missing", next_step=f"pip install kaggle; or type: {shown(words)}")
    try:
        done = subprocess.run(
            [program, *words[1:]],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=within_s,
            check=False,
        )
    except subprocess.TimeoutExpired as problem:
        raise KgorchError(f"kaggle did not answer within {within_s:.0f} s", f"asked: {shown(words)}") from problem
    if done.returncode:
        raise KgorchError(
            f"kaggle ended with {done.returncode}", f"asked: {shown(words)}", (done.stderr or done.stdout).strip()[-600:],
            next_step="look whether the competition takes files and not notebooks alone, and whether rules and token are accepted",
        )  # fmt: skip
    return done.stdout


if __name__ == "__main__":
    cli.run(main)
