"""Write the reference pages, docs/reference/*.md, from the code that they describe.

    make docs

| page | source |
|---|---|
| commands.md | the verbs as click has them |
| plan.md | the comments of the plan that `kgorch init` writes, and the defaults of the plan's model |
| sdk.md | the names of `kgorch.__all__`: signatures and docstrings |
| events.md, exit-codes.md | the comments in EventKind and ExitCode |
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import click
from pydantic import BaseModel

import kgorch
from kgorch.cli import cli, template
from kgorch.cli.commands import TOPICS
from kgorch.core.codes import EventKind
from kgorch.errors import ExitCode
from kgorch.plan import Plan
from kgorch.plan.keys import table_below

FOLDER = Path(__file__).parent / "reference"


def commands() -> str:
    """The verbs by topic: usage, help and options."""
    lines = [
        "`kgorch VERB --help` prints the same. The exit codes stand on [a page of their own](exit-codes.md), the fields of",
        "`--json` in [json.md](../json.md).",
    ]
    root = click.Context(cli, info_name="kgorch", **cli.context_settings)
    for topic, verbs in TOPICS.items():
        lines += ["", f"## {topic}"]
        for verb in verbs:
            command = cli.get_command(root, verb)
            assert command is not None
            lines += _command(command, click.Context(command, info_name=verb, parent=root))
    return _page("Commands", lines)


def _command(command: click.Command, context: click.Context) -> Iterator[str]:
    yield from ["", f"### {context.command_path}", ""]
    usage = " ".join(command.collect_usage_pieces(context))
    yield from ["```text", f"{context.command_path} {usage}", "```"]
    for paragraph in inspect.cleandoc(command.help or "").split("\n\n"):
        if paragraph.startswith("\b\n"):
            title, *code = paragraph.removeprefix("\b\n").splitlines()
            if code and not code[0].startswith(" "):
                title, code = "", [title, *code]
            yield from ["", title, "", "```text", *textwrap.dedent("\n".join(code)).splitlines(), "```"]
        else:
            yield from ["", _prose(" ".join(paragraph.split()))]
    records = [record for option in command.get_params(context) if (record := option.get_help_record(context))]
    records = [(names, text) for names, text in records if text and "--help" not in names]
    if records:
        yield from ["", "| option | |", "|---|---|"]
        yield from (f"| {_code(names)} | {_cell(_prose(text))} |" for names, text in records)
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            yield from _command(inner, click.Context(inner, info_name=name, parent=context))


def plan() -> str:
    """Every key of the plan by table, and the template as a whole."""
    tables: dict[str, list[str]] = {"": []}
    for entry in template.key_help().values():
        if not entry.example:
            title = "[[stage]]" if entry.key == "stage" else f"[{entry.key}]"
            tables[entry.key] = ["", f"## {title}", "", *([_sentence(_prose(entry.text))] if entry.text else []), *KEYS]
            continue
        table, _, name = entry.key.rpartition(".")
        value = entry.example.partition(" = ")[2]
        row = [_code(name), _code(_default(entry)), _code(value), _cell(_prose(entry.text))]
        tables[table].append(f"| {' | '.join(row)} |")
    lines = [
        "`kgorch explain KEY` prints the same in a terminal, and `kgorch init` writes the plan at the end of this page. Where no",
        "default stands, the platform or a measurement decides, or the text says what does.",
        *KEYS,
    ]
    lines += [line for table in tables.values() for line in table]
    lines += ["", "## A plan with every key", "", "```toml", template.plan_text().rstrip(), "```"]
    return _page("The plan", lines)


KEYS = ["", "| key | default | example | |", "|---|---|---|---|"]


def _default(entry: template.KeyHelp) -> str:
    """A key's default as TOML; empty where there is none of its own."""
    *tables, name = entry.key.split(".")
    model: type[BaseModel] | None = Plan
    for table in tables:
        model = table_below(model, table)
    value = model.model_fields[name].default if model else None
    match value:
        case bool():
            return str(value).lower()
        case float() if re.search(r'"[\d.]+[smhd]"', entry.example):
            return f'"{value:g}s"'
        case int() | float():
            return f"{value:g}"
        case str():
            return f'"{value}"'
    return ""


def sdk() -> str:
    """Functions and classes that a script, a program or a notebook uses."""
    every = {name: getattr(kgorch, name) for name in kgorch.__all__}
    of_script = {name for name, thing in every.items() if thing.__module__.startswith("kgorch.worker")}
    lines = ["The names that `import kgorch` offers."]
    for title, page, names in (
        ("In a training script", "your-training.md", of_script),
        ("In a program or a notebook", "notebooks.md", every.keys() - of_script),
    ):
        lines += ["", f"## {title}", "", f"How they are used: [{page}](../{page})."]
        for name in sorted(names, key=str.lower):
            thing = every[name]
            lines += ["", f"### {name}", ""]
            lines += _docstring(thing) if inspect.isclass(thing) else [*_signature(name, thing), *_docstring(thing)]
            for method, function in _methods(thing) if thing is kgorch.Session else ():
                lines += ["", f"#### {name}.{method}", ""]
                if isinstance(function, functools.cached_property):
                    lines += _docstring(function.func)
                else:
                    lines += _signature(method, function) if inspect.isfunction(function) else []
                    lines += _docstring(function)
    return _page("Python", lines)


def _methods(cls: type) -> Iterator[tuple[str, Any]]:
    """Public methods and properties with a docstring, base classes of kgorch last."""
    for base in cls.__mro__:
        for name, value in vars(base).items() if base.__module__.startswith("kgorch") else ():
            is_method = inspect.isfunction(value) or isinstance(value, (property, functools.cached_property))
            if is_method and not name.startswith("_") and value.__doc__:
                yield name, value


def _signature(name: str, function: Callable[..., Any]) -> list[str]:
    [node] = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    assert isinstance(node, ast.FunctionDef)
    node.args.args = [item for item in node.args.args if item.arg != "self"]
    every = ast.unparse(node.args)
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    if len(every) > 70:  # one parameter a line
        spans = [part.strip() for part in re.split(r", (?![^\[]*\])", every)]
        every = "\n    " + ",\n    ".join(spans) + ",\n"
    return ["```python", f"{name}({every}){returns}", "```", ""]


def _docstring(thing: object) -> list[str]:
    """A docstring as Markdown: sections as lists, indented blocks as code; without the names of source files."""
    text = re.sub(r"\s*\([\w/ ]+\.py\)", "", inspect.getdoc(thing) or "")
    text = re.sub(r"^(Raises|Returns): (.+)", r"\1:\n    \2", text, flags=re.MULTILINE)
    text = re.sub(r"(?<=[.]) Raises: (.+)$", r"\n\nRaises:\n    \1", text)
    lines: list[str] = []
    for block in re.split(r"\n{2,}|\n(?=(?:Args|Attributes|Raises|Returns):\n)", text):
        head, _, rest = block.partition("\n")
        if head in ("Args:", "Attributes:", "Raises:", "Returns:") and rest:
            items = re.split(r"\n(?=\S)", textwrap.dedent(rest))
            lines += [f"**{head.rstrip(':')}**", ""]
            for item in items:
                names, colon, meaning = " ".join(item.split()).partition(": ")
                is_named = colon and re.fullmatch(r"[\w, ]+", names) and head != "Returns:"
                lines.append(f"- `{names}`: {_prose(meaning)}" if is_named else f"- {_prose(' '.join(item.split()))}")
        elif block.startswith("    "):
            lines += ["```python", *textwrap.dedent(block).splitlines(), "```"]
        else:
            lines.append(_prose(" ".join(block.split())))
        lines.append("")
    return lines[:-1]


def events() -> str:
    """The kinds of journal entries."""
    lines = [
        "Entries of a run's journal, as `kgorch events`, `kgorch history --events` and their `--json` show them. The facts of each",
        "kind stand in [json.md](../json.md#kgorch-history---events---json).",
        *_members(EventKind, "kind"),
    ]
    return _page("Events", lines)


def exit_codes() -> str:
    """The exit statuses of the verbs."""
    lines = ["Scripts may rely on them. Ctrl-C ends a verb that only shows something with 130, as shells report it."]
    return _page("Exit codes", [*lines, *_members(ExitCode, "exit code")])


def _members(enum: type[Enum], title: str) -> Iterator[str]:
    """Value and comment of each member; a comment between members is the heading of those that follow."""
    head = ["", f"| {title} | |", "|---|---|"]
    is_begun = False
    for line in inspect.getsource(enum).splitlines():
        if match := re.fullmatch(r"    # (.+)", line):
            yield from ["", f"## {_sentence(match[1].partition(' (')[0]).rstrip('.')}", *head]
            is_begun = True
        elif match := re.fullmatch(r"    ([A-Z_]+) = .+?  # (.+)", line):
            yield from () if is_begun else head
            yield f"| `{enum[match[1]].value}` | {_cell(_prose(match[2]))} |"
            is_begun = True
        elif match := re.fullmatch(r"    ([A-Z_]+) = .*", line):
            raise SystemExit(f"{enum.__name__}.{match[1]} has no comment that says what it means")


def _page(title: str, lines: list[str]) -> str:
    text = "\n".join(
        [f"# {title}", "", "<!-- written by docs/reference.py: change the code, then make docs -->", "", *lines]
    )
    return re.sub(r"\n{3,}", "\n\n", text).rstrip() + "\n"


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:].rstrip('.')}."


def _code(text: str) -> str:
    return f"`{_cell(text)}`" if text else ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _prose(text: str) -> str:
    """Text as Markdown: its own characters escaped, pages linked; code as it is."""
    parts = re.split(r"(`[^`]*`)", text)
    parts[::2] = [re.sub(r"(\*|(?<!\w)_|_(?!\w))", r"\\\1", part).replace("<", "&lt;") for part in parts[::2]]
    parts[::2] = [re.sub(r"\bdocs/([\w-]+\.md)", r"[\1](../\1)", part) for part in parts[::2]]
    return "".join(parts)


PAGES: dict[str, Callable[[], str]] = {
    "commands": commands,
    "events": events,
    "exit-codes": exit_codes,
    "plan": plan,
    "sdk": sdk,
}
"""What writes each page, by the page's name."""


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, written in PAGES.items():
        (FOLDER / f"{name}.md").write_text(written())
