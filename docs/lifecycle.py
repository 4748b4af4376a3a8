"""Draw the lifecycle's table as the diagram in ARCHITECTURE.md: `python docs/lifecycle.py` (or `make docs`)."""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path

from kgorch.core.codes import OVER, Phase
from kgorch.core.session.lifecycle import TRANSITIONS

PAGE = Path(__file__).parents[1] / "ARCHITECTURE.md"
BEGIN, END = "<!-- lifecycle: drawn by docs/lifecycle.py -->", "<!-- end of lifecycle -->"


def diagram() -> str:
    """Mermaid, and below it a line for each phase with what leaves it unchanged."""
    moves: dict[tuple[Phase, Phase], list[str]] = defaultdict(list)
    for (phase, event), row in TRANSITIONS.items():
        moves[phase, row.to].append(event.__name__)
    lines = ["```mermaid", "stateDiagram-v2", "    [*] --> queued"]
    for (phase, to), events in moves.items():
        if phase is not to:
            lines.append(f"    {phase} --> {to}: {', '.join(sorted(events))}")
    lines += [f"    {phase} --> [*]" for phase in Phase if phase in OVER] + ["```"]
    stays = [
        f"`{phase}` takes without leaving: {', '.join(sorted(moves[phase, phase]))}."
        for phase in Phase
        if moves[phase, phase]
    ]
    return "\n".join(lines + [""] + stays)


def drawn_into(text: str) -> str:
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n{diagram()}\n{END}{tail}"


if __name__ == "__main__":
    PAGE.write_text(drawn_into(PAGE.read_text()))
    print(f"drawn into {PAGE.name}", file=sys.stderr)
