"""Render the script of a session: its order, and the program of `session/`, in one file without any dependency."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from importlib import resources

from kgorch.core.names import NAME_PATTERN
from kgorch.core.remote.place_values import SessionOrder

MODULES = ("common", "inputs", "installation", "output", "program")
"""Of `session/`, each after those that it imports."""

PUSH_LINE = "# kgorch-push: run={run} session={number} nonce={nonce}"
"""The second line, by which a push is found again after a lost answer."""


def render(order: SessionOrder) -> str:
    """The script: pure ASCII, the same for the same order.

    Raises: ValueError for an order that could break out of the second line, or that would begin anew by mistake.
    """
    _check(order)
    head = [
        "# A training session of kgorch. It ends by itself; its record is in kgorch-session.json.",
        PUSH_LINE.format(run=order.run, number=order.number, nonce=order.nonce),
        "from __future__ import annotations",
    ]
    # JSON within JSON: the inner text is ASCII, and the outer escapes, of quotes and backslashes, are also Python's
    literal = json.dumps(json.dumps(asdict(order)))
    return "\n".join([*head, *(_body(name) for name in MODULES), f"main({literal})", ""])


def _check(order: SessionOrder) -> None:
    if not re.fullmatch(NAME_PATTERN, order.run) or not re.fullmatch(r"[0-9a-f]{8,64}", order.nonce):
        raise ValueError(f"not the name of a run, or no nonce: {order.run!r:.80}, {order.nonce!r:.80}")
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,32}", order.run_id) or order.number < 1:
        raise ValueError(f"no session of a run: {order.run_id!r:.80}, number {order.number}")
    if order.expected_step >= 0 and not order.source:
        raise ValueError(f"step {order.expected_step} is expected, and no source is named that has it")
    if not 0 < order.session_s < order.timeout_s:
        raise ValueError(f"a session of {order.session_s} s does not end before its limit of {order.timeout_s} s")


def _body(name: str) -> str:
    """A module without what holds for the whole script alone, and without imports of the modules that stand before it."""
    text = resources.files("kgorch.remote.session").joinpath(f"{name}.py").read_text(encoding="utf-8")
    text = re.sub(r"^from kgorch\.[\w.]+ import (\([^)]*\)|[^\n(]+)\n", "", text, flags=re.MULTILINE)
    return text.replace("from __future__ import annotations\n", "", 1)
