"""The command line of a stage's program: literal words, arguments as flags, and the words of the launcher in front of them.

How an argument becomes a flag (docs/your-training.md, "Arguments as flags"):

| value | `--key value` | `--key=value` | `key=value` |
|---|---|---|---|
| text, number | `--lr 0.1` | `--lr=0.1` | `lr=0.1` |
| true | `--amp` | `--amp=True` | `amp=true` |
| false | left out | `--amp=False` | `amp=false` |
| list | `--tags a b` | `--tags=a --tags=b` | `tags=[a,b]` |
| empty list | left out | left out | `tags=[]` |

The order is that of the plan. A table is passed as JSON text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any

MODULE_PATTERN = re.compile(r"-m ([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)")
"""An entry that `python -m` runs."""


class FlagStyle(StrEnum):
    """How an argument is written on a command line; the values of the plan's `stage.flags`."""

    SPACE = "--key value"
    """argparse, click."""
    EQUALS = "--key=value"
    """Configurators that evaluate `--key=value`, absl, fire."""
    BARE = "key=value"
    """Hydra, OmegaConf."""


class Launcher(StrEnum):
    """What starts the processes of a stage; the values of the plan's `stage.launcher`."""

    TORCHRUN = "torchrun"
    """For ranks of the SDK: in a process that forks them (worker/elastic_agent.py)."""
    TORCHRUN_CLI = "torchrun-cli"
    """The plain command, whose ranks import everything themselves."""
    ACCELERATE = "accelerate"
    NONE = "none"


def module_of(entry: str) -> str:
    """The module of an entry `-m package.module`; empty for another entry."""
    match = MODULE_PATTERN.fullmatch(entry)
    return match[1] if match else ""


def flags_of(args: Mapping[str, Any], style: str = FlagStyle.SPACE) -> list[str]:
    """Arguments as words of a command line, in their order."""
    return [word for name, value in args.items() for word in _flag(name, value, FlagStyle(style))]


def _flag(name: str, value: Any, style: FlagStyle) -> list[str]:
    if value is None:
        return []
    if style is FlagStyle.BARE:
        items = value if isinstance(value, list) else None
        text = _text(value, style) if items is None else f"[{','.join(_text(item, style) for item in items)}]"
        return [f"{name}={text}"]
    values = value if isinstance(value, list) else [value]
    if style is FlagStyle.EQUALS:
        return [f"--{name}={_text(item, style)}" for item in values]
    if value is False or value == []:
        return []
    return [f"--{name}", *([] if value is True else [_text(item, style) for item in values])]


def _text(value: Any, style: FlagStyle) -> str:
    if isinstance(value, bool) and style is FlagStyle.BARE:
        return "true" if value else "false"
    return json.dumps(value) if isinstance(value, dict | list) else str(value)


def flag_names(words: Sequence[str], style: str) -> Iterator[str]:
    """The flags that literal words give: `--lr`, `--lr=0.1` and, in the style `key=value`, `lr=0.1`."""
    for word in words:
        if word.startswith("--") and len(word) > 2:
            yield word[2:].partition("=")[0]
        elif style == FlagStyle.BARE and re.match(r"[+~]{0,2}[\w./@-]+=", word):
            yield word.lstrip("+~").partition("=")[0]


def launch_command(launcher: str, entry: str, processes: int, *, python: str, on_gpu: bool) -> list[str]:
    """The words that start a foreign program, without its own arguments.

    Args:
        entry: path of a script, `-m package.module`, or an executable (a path, or a name on PATH).
        processes: for a launcher that starts several.
        python: the interpreter.
        on_gpu: GPUs are visible: `accelerate` is told so.
    """
    module, is_script = module_of(entry), entry.endswith(".py")
    program = ["-m", module] if module else [entry]
    if launcher == Launcher.NONE:
        return [python, *program] if module or is_script else program
    # On CPUs accelerate starts one process, whatever its --num_processes says (more need MPI). Its programs run under torchrun.
    under_torchrun = launcher == Launcher.ACCELERATE and processes > 1 and not on_gpu
    if under_torchrun or launcher in (Launcher.TORCHRUN, Launcher.TORCHRUN_CLI):
        words = ["torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", "--max-restarts=0"]
        plain = [] if module or is_script else ["--no-python"]
    else:
        words = ["accelerate.commands.launch", "--num_machines=1", f"--num_processes={processes}"]
        words += [] if on_gpu and processes == 1 else ["--multi_gpu" if on_gpu else "--cpu"]
        plain = [] if module or is_script else ["--no_python"]
    return [python, "-m", *words, *plain, *program]
