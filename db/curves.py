"""Verbs on the curves of metrics: the lines that rank 0 of each attempt wrote (core/metric_curve.py), in pieces.

The file in the attempt's folder comes first where it still is; these rows travel with the database. As a file only grows, an
import writes its last piece anew and adds those after it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from sqlalchemy import Engine, delete, insert, select, update

from db.tables import Attempt, Curve, Session

PIECE_BYTES = 64 << 10


def pieces(lines: Iterable[str]) -> Iterator[str]:
    """Whole lines, so many together as make a row."""
    held: list[str] = []
    size = 0
    for line in lines:
        held.append(line)
        size += len(line) + 1
        if size >= PIECE_BYTES:
            yield "\n".join(held)
            held, size = [], 0
    if held:
        yield "\n".join(held)


def write(engine: Engine, attempt_id: int, lines: Sequence[str]) -> None:
    """All lines of an attempt, in place of what was known of it; again to no effect. One transaction."""
    wanted = list(pieces(lines))
    with engine.begin() as connection:
        mine = Curve.attempt_id == attempt_id
        known = {row.number: row.lines for row in connection.execute(select(Curve.number, Curve.lines).where(mine))}
        for number, piece in enumerate(wanted):
            if number not in known:
                connection.execute(insert(Curve).values(attempt_id=attempt_id, number=number, lines=piece))
            elif known[number] != piece:
                connection.execute(update(Curve).where(mine, Curve.number == number).values(lines=piece))
        if len(known) > len(wanted):
            connection.execute(delete(Curve).where(mine, Curve.number >= len(wanted)))


def of_attempt(engine: Engine, attempt_id: int) -> str:
    """The lines as they were written; empty when there are none."""
    with engine.connect() as connection:
        chosen = select(Curve.lines).where(Curve.attempt_id == attempt_id).order_by(Curve.number)
        return "\n".join(connection.scalars(chosen))


def attempts_with_any(engine: Engine, run_id: str) -> set[int]:
    """Attempts of a run, by id, whose curve is known here."""
    with engine.connect() as connection:
        chosen = select(Curve.attempt_id).join(Attempt).join(Session).where(Session.run_id == run_id)
        return set(connection.scalars(chosen.distinct()))
