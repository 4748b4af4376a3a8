"""The command line: finds the verb that was typed, and turns an error into text and an exit code.

The verbs are in `commands`, by topic. `display` prints; `foreground` runs a session in the terminal; `options` and `lookup` hold
what verbs share. May import every package but the worker, and imports most of them inside functions: `kgorch status` and the
completion must not wait for pydantic or SQLAlchemy that they do not use.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from kgorch import __version__
from kgorch.cli.commands import TOPICS, VERBS, module_of
from kgorch.cli.usage import Group, UnknownVerb
from kgorch.errors import ExitCode, KgorchError

USUAL_GC = gc.get_threshold()
"""Python's own thresholds, for a session that runs for hours."""

# imports create many objects and drop few: the collections among them took 20 of the 320 ms of `kgorch status`
gc.set_threshold(50_000, 20, 20)


class _PipeClosed(Exception):
    """The reader of stdout has ended."""


class Verbs(Group):
    """Imports the module of a verb when the verb is typed."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # under another name, because click exits with 1 for this one
            raise _PipeClosed from None

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in VERBS:
            return None
        command: click.Command = importlib.import_module(module_of(name)).command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The verbs by topic, with one width of column for all topics. Imports no verb."""
        width = max(map(len, VERBS))
        for topic, verbs in TOPICS.items():
            with formatter.section(topic):
                formatter.write_dl([(name.ljust(width), summary) for name, summary in verbs.items()])

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
    """Train one PyTorch model across many time-limited GPU sessions.

    \b
    Example:
      kgorch init                 write plan.toml and a small train.py
      kgorch start plan.toml      train; save before the session's time limit
      kgorch start plan.toml      the next session continues at the exact sample
      kgorch status               show the state of the run

    \b
    Shell completion (bash; or zsh_source, fish_source):
      eval "$(_KGORCH_COMPLETE=bash_source kgorch)"
    """


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line and exit with a code of `ExitCode`. A bug of kgorch leaves with its traceback."""
    _open_closed_streams()
    try:
        Path.cwd()
    except FileNotFoundError:
        deleted = KgorchError(
            "the working folder was deleted", next_step="cd to a folder that exists, then try again", error_code="KG503"
        )
        sys.exit(_exit_with(deleted))
    words = list(sys.argv[1:] if args is None else args)
    try:
        status = cli.main(args=list(words), prog_name="kgorch", standalone_mode=False, obj=words)
    except KgorchError as error:
        sys.exit(_exit_with(error))
    except click.exceptions.Abort:
        sys.exit(130)  # 128 + SIGINT, as shells report it
    except click.ClickException as error:
        from kgorch.cli.display import render
        from kgorch.cli.usage import usage_error

        if isinstance(error, getattr(click.exceptions, "NoArgsIsHelpError", ())):  # click >= 8.2
            render.echo(error.format_message(), err=True)
            sys.exit(ExitCode.MISTAKE)
        sys.exit(_exit_with(usage_error(error)))
    except (BrokenPipeError, _PipeClosed):
        # the reader of the pipe has ended, as `| head` does: no error. Without the dup2 the flush at exit would fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(0)
    except Exception as error:
        from kgorch.cli.environment_errors import environment_error

        if not (shown := environment_error(error)):
            bug = KgorchError("this is a bug of kgorch", next_step="kgorch explain KG901", error_code="KG901")
            error.add_note(bug.render())  # Python prints it below the traceback
            raise
        sys.exit(_exit_with(shown))
    sys.exit(status if isinstance(status, int) else 0)


def _open_closed_streams() -> None:
    """Open standard streams that the caller closed (`2>&-`) on /dev/null.

    Otherwise the next file that is opened gets the number of the stream, and everything printed there is written into that file.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            os.dup2(null, number)
            if null != number:
                os.close(null)
            setattr(sys, name, os.fdopen(number, "r" if name == "stdin" else "w", closefd=False))


def _exit_with(error: KgorchError) -> int:
    """Print the error, and return the exit code."""
    from kgorch.cli.display import render

    render.echo(error.render(), err=True)
    return int(error.code)
