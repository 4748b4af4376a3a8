"""Calls a stage's `preflight` function and tells what it answered: `python -m orchestrator.worker.preflight` (launch/inputs.py).

The order comes on standard input; the answer, a line of JSON, goes to standard output, which is the log for all else that is
printed here.
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

from orchestrator.errors import KgorchError
from orchestrator.worker import entry

LONGEST = 300
"""Letters of an answer. It stands in a table."""


def asked_for(function: Callable[..., Any], args: dict[str, Any]) -> dict[str, Any]:
    """Those of the stage's arguments that the function names; all of them for `**kwargs`."""
    parameters = inspect.signature(function).parameters
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values()):
        return args
    return {name: value for name, value in args.items() if name in parameters}


def answered(name: str, args: dict[str, Any], workdir: str) -> dict[str, Any]:
    """`said`: the first line of what the function returned; or what it raised, with the line only where that is no KgorchError."""
    try:
        function = entry.function_of(name)
        given = asked_for(function, args)
        entry.check_arguments(function, given, name)
        said = function(**given)
        return {"said": next(iter(str("" if said is None else said).splitlines()), "passed")[:LONGEST]}
    except KgorchError as error:
        facts = [fact[:LONGEST] for fact in error.facts[:8]]
        return {"what": error.what[:1000], "facts": facts, "do": error.next_step or "", "line": ""}
    except BaseException as error:
        what = f"{type(error).__name__}: {error}"[:1000]
        return {"what": what, "facts": [], "do": "", "line": entry.line_of(error, workdir)}


def main() -> None:
    order = json.load(sys.stdin)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != order["parent"]:
        os._exit(1)
    if order["score"] is not None:  # who supervises is spared when memory runs out, this process is not
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text(str(order["score"]))
    with os.fdopen(os.dup(1), "w") as answer:
        os.dup2(2, 1)
        os.chdir(order["workdir"])
        sys.path.insert(0, order["workdir"])
        json.dump(answered(order["function"], order["args"], order["workdir"]), answer)
    os._exit(0)  # without unloading PyTorch, and whatever threads are left


if __name__ == "__main__":
    main()
