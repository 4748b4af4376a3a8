"""Calls a stage's `preflight` function in a process of its own: `python -m kgorch.worker.preflight_entry`
(launch/inputs.py).

The request comes on standard input. The answer, a line of JSON, goes to standard output; everything else that is printed here goes
to the log.
"""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kgorch.errors import KgorchError
from kgorch.worker import entry

LONGEST = 300
"""Limit of characters of an answer, which is shown in a table."""


def accepted_arguments(function: Callable[..., Any], args: dict[str, Any]) -> dict[str, Any]:
    """The stage's arguments that the function names; all of them for `**kwargs`."""
    parameters = inspect.signature(function).parameters
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values()):
        return args
    return {name: value for name, value in args.items() if name in parameters}


def answer_of(name: str, args: dict[str, Any], workdir: str) -> dict[str, Any]:
    """The answer: `said`, the first line of the function's result; or its error, with the line unless it is a KgorchError."""
    try:
        function = entry.function_of(name)
        arguments = accepted_arguments(function, args)
        entry.check_arguments(function, arguments, name)
        result = function(**arguments)
        return {"said": next(iter(str("" if result is None else result).splitlines()), "passed")[:LONGEST]}
    except KgorchError as error:
        facts = [fact[:LONGEST] for fact in error.facts[:8]]
        return {"what": error.what[:1000], "facts": facts, "do": error.next_step or "", "line": ""}
    except BaseException as error:
        entry.name_package(error)
        what = f"{type(error).__name__}: {error}"[:1000]
        return {"what": what, "facts": [], "do": "", "line": entry.line_of(error, workdir)}


def main() -> None:
    order = json.load(sys.stdin)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != order["parent"]:
        os._exit(1)
    if order["score"] is not None:  # undo the protection from the OOM killer, which is the supervisor's
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text(str(order["score"]))
    with os.fdopen(os.dup(1), "w") as answer:
        os.dup2(2, 1)
        os.chdir(order["workdir"])
        sys.path.insert(0, order["workdir"])
        json.dump(answer_of(order["function"], order["args"], order["workdir"]), answer)
    os._exit(0)  # without unloading PyTorch, or joining threads


if __name__ == "__main__":
    main()
