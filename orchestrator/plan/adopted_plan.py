"""The plan that `kgorch adopt` writes for a program, of what was found in its source (program_inspection.py)."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from kgorch.core.program_command import module_of
from kgorch.plan.program_inspection import ProgramFindings

_ANY_PROGRAM = re.compile(r"(pre-?|re)?(train(er|ing)?|run|main|fit|fine-?tun(e|ing)|__main__)", re.IGNORECASE)
"""Names of programs that many projects have. The run takes the name of the folder as well: a name is that of one training."""

_ANY_PACKAGE = ("", "app", "code", "lib", "scripts", "src", "tools")
"""Names of packages that many projects have."""


def plan_text(
    entry: str,
    words: Sequence[str],
    found: ProgramFindings,
    *,
    folder: str = "",
    plan: str = "",
    is_foreign: bool = True,
) -> str:
    """The plan of a program, as TOML.

    Args:
        entry: relative to the plan's folder, or `-m package.module`.
        words: its command line, which is kept word for word.
        folder: the name of the plan's.
        plan: its own name where another plan lies there; its run is another one.
        is_foreign: the program saves and resumes by itself; else a Trainer of its library is carried.
    """
    package, _, name = module_of(entry).rpartition(".")
    name = name or entry.rpartition("/")[2].rpartition(".")[0]
    owner = package if package not in _ANY_PACKAGE else folder
    name = f"{owner}-{name}" if _ANY_PROGRAM.fullmatch(name) else name
    name += f"-{plan}" if plan else ""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-._")[-64:].lstrip("-._") or "run"
    lines = [f"name = {_quoted(name)}", "", "[[stage]]", 'name = "train"', f"entry = {_quoted(entry)}"]
    words, first = _without_resume(words, found.again) if is_foreign and found.checkpoint else (words, [])
    # What continues it stands before the words that it takes whatever they are: they come with it.
    is_resumed = is_foreign and found.checkpoint and found.again
    rest = found.rest if is_resumed and not any("{" in word for word in found.rest) else []
    words, first = list(words)[: len(words) - len(rest)], [*first, *rest]
    if words:
        lines.append(f"argv = {_quoted(list(words))}")
    lines.append(f'flags = "{found.flags}"                # how args = {{ … }} become flags')
    if found.library == "kgorch" and not is_foreign:
        return "\n".join(lines) + "\n"
    if not is_foreign:
        what = "loop" if found.library == "accelerate" else "Trainer"
        lines.append(
            'integration = "auto"' + _remark(f"it trains with {found.library}, whose {what} is carried as it is")
        )
        return "\n".join(lines) + "\n"
    lines.append(f'launcher = "{found.launcher}"' + _remark(found.library and f"it trains with {found.library}"))
    lines += ["", "[stage.foreign]"]
    lines.append(
        f"checkpoint = {_quoted(found.checkpoint)}"
        if found.checkpoint
        else '# checkpoint = "out/checkpoint-*"   # not found'
    )
    if found.incomplete:
        lines.append(f"incomplete = {_quoted(found.incomplete)}")
    again = f"again = {_quoted([*found.again, *rest] or ['--resume', '{checkpoint}'])}"
    lines.append((again if found.checkpoint else f"# {again}") if found.again else f"# {again}   # not found")
    if found.checkpoint and found.latest:
        kind, path = found.latest
        value = _quoted(path) if kind == "file" else f"{{ link = {_quoted(path)} }}"
        lines.append(
            f"# latest = {value}" + _remark("if it finds its newest checkpoint by that; `text` is what stands there")
        )
    if first:
        lines.append(f"first = {_quoted(first)}")
    handled = (
        "its handler saves, it seems"
        if found.stop
        else "it does not handle it, it seems: what it saves by itself is kept"
    )
    grace = "60s" if found.stop else "10s"  # before the wall each session keeps as much free until a stop was seen
    lines.append(f'stop = {{ signal = "{found.stop or "SIGTERM"}", grace = "{grace}" }}' + _remark(handled))
    if found.step:
        why = "   # it prints no step: an epoch is one" if found.step.lower().startswith("epoch") else ""
        lines.append(f"step = {{ log = {_literal(found.step)} }}{why}")
    elif found.step_file:
        lines.append(f"step = {{ file = {_quoted(found.step_file[0])}, key = {_quoted(found.step_file[1])} }}")
    else:
        lines.append("# step = { log = 'step (\\d+)' }   # not found")
    if found.loss:
        lines.append(f"metrics = {{ loss = {{ log = {_literal(found.loss)} }} }}")
    return "\n".join(lines) + "\n"


def _without_resume(words: Sequence[str], again: Sequence[str]) -> tuple[list[str], list[str]]:
    """The command line without the flag by which the program continues, and that flag: it is for the first launch alone."""
    flag = again[0].partition("=")[0] if again else ""
    others, first = list(words), list[str]()
    for number, word in enumerate(words):
        if flag and word.partition("=")[0] == flag:
            value = next(iter(words[number + 1 : number + 2]), "-")
            has_value = word == flag and len(again) > 1 and not value.startswith("-")
            first = list(words[number : number + 1 + has_value])
            others = [*words[:number], *words[number + len(first) :]]
    return others, first


def _remark(text: str) -> str:
    return f"   # {text}" if text else ""


def _quoted(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # which TOML has no other way to write


def _literal(pattern: str) -> str:
    """A regular expression as TOML: without escapes where it has no apostrophe."""
    return f"'{pattern}'" if "'" not in pattern and pattern.isprintable() else _quoted(pattern)
