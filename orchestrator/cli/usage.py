"""Mistakes on the command line: their message has the form of every other error, and suggests what was probably meant."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import click

from kgorch.errors import KgorchError

DANGEROUS = frozenset({"rm", "uninstall", "drop", "prune"})
"""Never suggested for a similar word: a user who types the suggestion must not delete something by mistake."""

SYNONYMS: Mapping[str, str] = {
    "run": "start", "train": "start", "launch": "start", "begin": "start", "continue": "resume", "restart": "resume",
    "kill": "stop", "cancel": "stop", "pause": "stop", "ls": "status --all", "list": "status --all", "ps": "status --all",
    "runs": "status --all", "top": "status --watch", "watch": "status --watch", "tail": "logs -f", "events": "history --events",
    "journal": "history --events", "export": "checkpoints export", "verify": "checkpoints verify", "prune": "checkpoints prune",
    "validate": "check", "lint": "check", "new": "init", "create": "init", "man": "help", "docs": "help",
    "remove": "rm", "delete": "rm", "clean": "rm", "gc": "rm",
}  # fmt: skip
"""Words of other programs → the verb of kgorch."""


class Group(click.Group):
    """A verb with verbs of its own. Unlike click's, its help does not cut summaries, and an unknown word gets a suggestion."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.subcommand_metavar = self.subcommand_metavar.replace("COMMAND", "VERB")

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        rows = [(name, _first_sentence(one)) for name, one in commands if one and not one.hidden]
        if rows:
            with formatter.section("Verbs"):
                formatter.write_dl(rows)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if ctx.resilient_parsing:  # completion
            return super().resolve_command(ctx, args)
        verbs = [name for name in self.list_commands(ctx) if (one := self.get_command(ctx, name)) and not one.hidden]
        if args and not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            raise UnknownVerb(args[0], verbs, ctx)
        return super().resolve_command(ctx, args)


class UnknownVerb(click.UsageError):
    """A word where a verb is expected."""

    def __init__(self, word: str, verbs: Sequence[str], ctx: click.Context) -> None:
        self.word = word
        suggestion = "" if word in SYNONYMS else near(word, verbs)
        super().__init__(f"no verb {word[:200]!r}{suggestion}; verbs: {', '.join(verbs)}", ctx)


def _first_sentence(command: click.Command) -> str:
    text = (command.help or "").split("\b")[0].split("\n\n")[0]
    words = " ".join(text.split())
    end = words.find(". ")
    return words[:end] if end > 0 else words.removesuffix(".")


def near(word: str, names: Iterable[str], *, cutoff: float = 0.6) -> str:
    """` (did you mean 'status'?)`, or nothing; never a verb that deletes."""
    safe = [name for name in names if name.strip("-") not in DANGEROUS]
    begun = [name for name in safe if word and name.startswith(word)]
    matches = begun if len(begun) == 1 else difflib.get_close_matches(word[:200], safe, n=1, cutoff=cutoff)
    return f" (did you mean '{matches[0]}'?)" if matches else ""


def usage_error(error: click.ClickException) -> KgorchError:
    """click's error as one of kgorch's."""
    ctx = error.ctx if isinstance(error, click.UsageError) else None
    path = ctx.command_path if ctx else "kgorch"
    next_step = f"{path} --help"
    if isinstance(error, click.NoSuchOption):
        text = f"no such option: {error.option_name[:200]}"
        if command := _suggested_command(error, ctx):
            next_step = command
        elif ctx:
            text += near(error.option_name, _long_options(ctx), cutoff=0.75)
    elif isinstance(error, UnknownVerb):
        text = error.format_message()
        if (verb := SYNONYMS.get(error.word)) and path == "kgorch":
            next_step = f"kgorch {verb}" if verb != "rm" else "kgorch rm --help"
    elif isinstance(error, click.MissingParameter):
        text = _as_clause(error.format_message())
        if ctx and error.param is not None and error.param.name in ("run", "runs"):
            next_step = "kgorch status --all    (lists the runs)"
    else:
        text = _as_clause(error.format_message())
    return KgorchError(text, next_step=next_step)


def _as_clause(text: str) -> str:
    """click's sentence without its capital letter and full stop; a quoted word at its start is unchanged."""
    text = text.strip()
    text = text[:1].lower() + text[1:] if text[:2].istitle() or text[1:2].islower() else text
    return text.removesuffix(".")


def _long_options(ctx: click.Context) -> list[str]:
    return [
        name for param in ctx.command.get_params(ctx) if not getattr(param, "hidden", False)
        for name in (*param.opts, *param.secondary_opts) if name.startswith("--")
    ]  # fmt: skip


def _suggested_command(error: click.NoSuchOption, ctx: click.Context | None) -> str | None:
    """The command that was probably meant by an unknown option: a verb for `start --resume`, --set for a key of the plan."""
    if ctx is None:
        return None
    word = error.option_name.lstrip("-").partition("=")[0].replace("-", "_")
    if ctx.info_name == "start" and word == "resume":
        return "kgorch start    (continues an unfinished run by itself; kgorch resume RUN needs no plan)"
    if "--set" not in _long_options(ctx):
        return None
    from kgorch.cli.template import key_help

    all_keys = [key for key, entry in key_help().items() if entry.example]
    keys = [key for key in all_keys if key == word or key.split(".")[-1] == word]
    if not keys:
        return None
    key = keys[0].replace("stage.", "stage.NAME.", 1) if keys[0].startswith("stage.") else keys[0]
    return f"{ctx.command_path} {_plan_word(ctx)}--set {key}={_value(ctx, error.option_name)}"


def _typed(ctx: click.Context) -> list[str]:
    """The words that were typed after `kgorch`; empty when click was called by a test or by completion."""
    words = ctx.find_root().obj
    return words if isinstance(words, list) else []


def _plan_word(ctx: click.Context) -> str:
    """The plan that was typed, with a space; empty without one."""
    plan = next((word for word in _typed(ctx) if word.endswith(".toml") and not word.startswith("-")), None)
    return f"{shlex.quote(plan)} " if plan else ""


def _value(ctx: click.Context, option: str) -> str:
    """The value that was typed for the option."""
    words = _typed(ctx)
    for number, word in enumerate(words):
        if word == option and number + 1 < len(words) and not words[number + 1].startswith("-"):
            return shlex.quote(words[number + 1])
        if word.startswith(f"{option}="):
            return shlex.quote(word.partition("=")[2])
    return "VALUE"
