"""The command line: one file a verb, loaded when it is typed; here alone an error becomes text and an exit code."""

from __future__ import annotations

import errno
import gc
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from orchestrator import __version__
from orchestrator.cli.usage import Group, UnknownVerb
from orchestrator.errors import ExitCode, KgorchError

USUAL_GC = gc.get_threshold()
gc.set_threshold(
    50_000, 20, 20
)  # imports make many objects and drop few: looking for some took 20 of 320 ms of `status`

THE_MACHINES = {
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR,
    errno.ELOOP, errno.EIO, errno.ESTALE,
}  # fmt: skip
"""What is wrong with a path or its disk, and not with us: a file that is merely missing would be our own bug."""

VERBS = {
    "start": "Begin the run of a plan, or go on with it.",
    "resume": "Go on with a run, by the plan that it keeps.",
    "status": "Where a run stands; also when no supervisor lives.",
    "queue": "The runs that wait, and when each goes on.",
    "daemon": "Carry out what is due; what systemd starts.",
    "stop": "Save, then end the session.",
    "save": "Save now and go on.",
    "logs": "What the ranks print.",
    "history": "The sessions of a run, or its journal.",
    "metrics": "What a run has reported, as a table, CSV or picture.",
    "checkpoints": "List, verify, prune, export.",
    "rm": "Remove runs, with all that they keep.",
    "quota": "Accelerator hours used and left; correct them.",
    "doctor": "What slows a run down, and what to change.",
    "notify": "Send a test notice to whom a plan tells.",
    "systemd": "Let systemd run the daemon.",
    "check": "What a plan will take, before an hour is spent.",
    "init": "Write a commented plan.toml and a train.py.",
    "explain": "What a key of the plan means.",
    "help": "What a verb does, and its options.",
    "version": "Which kgorch this is.",
}

GROUPS: dict[str, tuple[str, ...]] = {
    "Begin": ("init", "explain", "check"),
    "Train": ("start", "resume", "save", "stop"),
    "Look": ("status", "logs", "history", "metrics", "doctor", "quota"),
    "Keep": ("checkpoints", "rm"),
    "Unattended": ("queue", "daemon", "systemd", "notify"),
}
"""The verbs as help shows them; those that are in none stand below the last."""


class Verbs(Group):
    """Imports a verb's module when it is used: `kgorch status` does not pay for what `kgorch start` needs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in VERBS:
            return None
        command: click.Command = importlib.import_module(f"orchestrator.cli.{name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """All in one column, whatever the group; no verb's module is imported for it."""
        others = tuple(name for name in VERBS if not any(name in names for names in GROUPS.values()))
        width = max(map(len, VERBS))
        for title, names in {**GROUPS, "Besides": others}.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(width), VERBS[name]) for name in names if name in VERBS])

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if args and args[0] not in VERBS and not args[0].startswith("-") and not ctx.resilient_parsing:
            raise UnknownVerb(args[0], list(VERBS), ctx)
        return click.Group.resolve_command(self, ctx, args)


@click.command(
    cls=Verbs,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    subcommand_metavar="VERB [ARGS]...",
)
@click.version_option(__version__, prog_name="kgorch")
def cli() -> None:
    """One training run that lives through many short GPU sessions.

    \b
    Example:
      kgorch init                 write plan.toml and a small train.py
      kgorch start plan.toml      train until the session's wall; saved in time
      kgorch start plan.toml      the next session goes on at the exact sample
      kgorch status               where it stands

    \b
    Completion of verbs, runs, plans and --set keys (or zsh_source, fish_source):
      eval "$(_KGORCH_COMPLETE=bash_source kgorch)"
    """


def main(args: Sequence[str] | None = None) -> None:
    _open_closed_streams()
    try:
        Path.cwd()
    except FileNotFoundError:
        _say("error: the working folder is gone\nnext: cd to a folder that is there, then the same again")
        sys.exit(int(ExitCode.MISTAKE))
    words = list(sys.argv[1:] if args is None else args)
    try:
        status = cli.main(args=list(words), prog_name="kgorch", standalone_mode=False, obj=words)
    except KgorchError as error:
        _say(f"error: {error}")
        sys.exit(int(error.code))
    except click.exceptions.Abort:
        sys.exit(130)
    except click.ClickException as error:
        from orchestrator.cli.usage import told

        _say(told(error))
        sys.exit(int(ExitCode.MISTAKE))
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the reader of our pipe has enough
        sys.exit(0)
    except Exception as error:
        if not (said := _no_bug(error)):
            raise
        _say(said)
        sys.exit(int(ExitCode.MISTAKE))
    sys.exit(status if isinstance(status, int) else 0)


def _open_closed_streams() -> None:
    """`2>&-`: what is opened next would get the stream's number, and all that is written there."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)
            os.dup2(nowhere, number)
            if nowhere != number:
                os.close(nowhere)
            setattr(sys, name, os.fdopen(number, "r" if name == "stdin" else "w", closefd=False))


def _say(text: str) -> None:
    from orchestrator.cli import render

    render.echo(text, err=True)


def _no_bug(error: Exception) -> str | None:
    """What is wrong and what to do, where not we but a word, a disk or the database has ended the verb; else None."""
    if isinstance(error, UnicodeEncodeError) and error.encoding == "utf-8":
        return f"error: {error.object[:200]!r} is no UTF-8 and cannot be kept\nnext: rename it, or set LC_ALL=C.UTF-8"
    if isinstance(error, OSError):
        if error.errno not in THE_MACHINES or not error.filename:
            return None
        place = str(error.filename)[:200]
        return f"error: {error.strerror}: {place!r}\nnext: see that the path is right, its disk not full and writable for you"
    if type(error).__module__ == "sqlalchemy.exc" and (cause := getattr(error, "orig", None)):
        return (
            f"error: the database cannot be used just now: {cause}\nnext: try again; see that no other program holds it"
        )
    from orchestrator.cli.cause import odd_row

    if odd := odd_row(error):
        return (
            f"error: the database holds what kgorch has not written: {odd} ({type(error).__name__}: {str(error)[:200]})\n"
            "next: put a copy of kgorch.db back, or correct that row"
        )
    return None
