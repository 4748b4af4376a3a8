"""What a person typed that no verb takes: told as every other mistake is, with what was meant where that is safe to say."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import click

DANGEROUS = frozenset({"rm", "uninstall", "drop", "prune"})
"""Never proposed for a word that is only like them: a guess must not delete or remove."""

MEANT: Mapping[str, str] = {
    "run": "start", "train": "start", "launch": "start", "begin": "start", "continue": "resume", "restart": "resume",
    "kill": "stop", "cancel": "stop", "pause": "stop", "ls": "status --all", "list": "status --all", "ps": "status --all",
    "runs": "status --all", "top": "status --watch", "watch": "status --watch", "tail": "logs -f", "events": "history --events",
    "journal": "history --events", "export": "checkpoints export", "verify": "checkpoints verify", "prune": "checkpoints prune",
    "validate": "check", "lint": "check", "new": "init", "create": "init", "man": "help", "docs": "help",
    "remove": "rm", "delete": "rm", "clean": "rm", "gc": "rm",
}  # fmt: skip
"""Verbs as other programs name them."""


class Group(click.Group):
    """Verbs below a verb: help that cuts no sentence, and an unknown word is answered with the nearest known one."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        found = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        rows = [(name, _first_sentence(one)) for name, one in found if one and not one.hidden]
        if rows:
            with formatter.section("Verbs"):
                formatter.write_dl(rows)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if ctx.resilient_parsing:  # a shell asks what may follow
            return super().resolve_command(ctx, args)
        known = [name for name in self.list_commands(ctx) if (one := self.get_command(ctx, name)) and not one.hidden]
        if args and not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            raise UnknownVerb(args[0], known, ctx)
        return super().resolve_command(ctx, args)


class UnknownVerb(click.UsageError):
    def __init__(self, word: str, known: Sequence[str], ctx: click.Context) -> None:
        self.word, self.known = word, known
        proposed = "" if word in MEANT else near(word, known)
        super().__init__(f"no verb {word[:200]!r}{proposed}; known: {', '.join(known)}", ctx)


def _first_sentence(command: click.Command) -> str:
    text = (command.help or "").split("\b")[0].split("\n\n")[0]
    words = " ".join(text.split())
    end = words.find(". ")
    return words[:end] if end > 0 else words.removesuffix(".")


def near(word: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """` (did you mean 'status'?)`, or nothing; never a verb that deletes."""
    safe = [name for name in known if name.strip("-") not in DANGEROUS]
    found = difflib.get_close_matches(word[:200], safe, n=1, cutoff=cutoff)
    return f" (did you mean '{found[0]}'?)" if found else ""


def told(error: click.ClickException) -> str:
    """The lines of an error of click's: `error: …`, then `next: …`."""
    ctx = error.ctx if isinstance(error, click.UsageError) else None
    path = ctx.command_path if ctx else "kgorch"
    next_step = f"{path} --help"
    if isinstance(error, click.NoSuchOption):
        said = f"no such option: {error.option_name[:200]}"
        if proposed := _option_meant(error, ctx):
            next_step = proposed
        elif ctx:
            said += near(error.option_name, _options(ctx), cutoff=0.75)
    elif isinstance(error, UnknownVerb):
        said = error.format_message()
        if (meant := MEANT.get(error.word)) and path == "kgorch":
            next_step = f"kgorch {meant}" if meant != "rm" else "kgorch rm --help"
    elif isinstance(error, click.MissingParameter):
        said = _of_a_sentence(error.format_message())
        if ctx and error.param is not None and error.param.name in ("run", "runs"):
            next_step = "kgorch status --all    (lists the runs)"
    else:
        said = _of_a_sentence(error.format_message())
    return f"error: {said}\nnext: {next_step}"


def _of_a_sentence(text: str) -> str:
    """click begins with a capital and ends with a full stop; what it quotes stays as it is."""
    text = text.strip()
    text = text[:1].lower() + text[1:] if text[:2].istitle() or text[1:2].islower() else text
    return text.removesuffix(".")


def _options(ctx: click.Context) -> list[str]:
    return [
        name for param in ctx.command.get_params(ctx) if not getattr(param, "hidden", False)
        for name in (*param.opts, *param.secondary_opts) if name.startswith("--")
    ]  # fmt: skip


def _option_meant(error: click.NoSuchOption, ctx: click.Context | None) -> str | None:
    """What to type instead: a verb for `start --resume`, --set for a key of the plan."""
    if ctx is None:
        return None
    word = error.option_name.lstrip("-").partition("=")[0].replace("-", "_")
    if ctx.info_name == "start" and word == "resume":
        return "kgorch start    (continues an unfinished run by itself; kgorch resume RUN needs no plan)"
    if "--set" not in _options(ctx):
        return None
    from orchestrator.cli.template import key_help

    known = [key for key, entry in key_help().items() if entry.example]
    keys = [key for key in known if key == word or key.split(".")[-1] == word]
    if not keys:
        return None
    key = keys[0].replace("stage.", "stage.NAME.", 1) if keys[0].startswith("stage.") else keys[0]
    return f"{ctx.command_path} {_argument(ctx)}--set {key}={_value(ctx, error.option_name)}"


def _typed(ctx: click.Context) -> list[str]:
    """The words that were typed behind `kgorch`; empty where they are not known."""
    words = ctx.find_root().obj
    return words if isinstance(words, list) else []


def _argument(ctx: click.Context) -> str:
    plan = next((word for word in _typed(ctx) if word.endswith(".toml") and not word.startswith("-")), None)
    return f"{shlex.quote(plan)} " if plan else ""


def _value(ctx: click.Context, option: str) -> str:
    """What stood behind the option."""
    words = _typed(ctx)
    for number, word in enumerate(words):
        if word == option and number + 1 < len(words) and not words[number + 1].startswith("-"):
            return shlex.quote(words[number + 1])
        if word.startswith(f"{option}="):
            return shlex.quote(word.partition("=")[2])
    return "VALUE"
