"""Rows of metric curves: the JSON lines that rank 0 of each attempt wrote (core/metrics/metric_curve.py), in pieces.

The file in the attempt's folder is read first where it exists; these rows go along when only the database is copied. A file only
grows, so an update rewrites its last piece and adds those after it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from sqlalchemy import Engine, delete, insert, select, update

from kgorch.db.tables import Attempt, Curve, SessionRow

PIECE_BYTES = 64 << 10
"""Of a row, about. The last row is rewritten whole whenever lines are added, so it should stay small."""


def pieces(lines: Iterable[str]) -> Iterator[str]:
    """The lines joined to pieces of at least PIECE_BYTES, the last one shorter."""
    piece: list[str] = []
    size = 0
    for line in lines:
        piece.append(line)
        size += len(line) + 1
        if size >= PIECE_BYTES:
            yield "\n".join(piece)
            piece, size = [], 0
    if piece:
        yield "\n".join(piece)


def write(engine: Engine, attempt_id: int, lines: Sequence[str]) -> None:
    """Store all lines of an attempt in one transaction. Pieces that are equal already are not written."""
    new = list(pieces(lines))
    with engine.begin() as connection:
        mine = Curve.attempt_id == attempt_id
        old = {row.number: row.lines for row in connection.execute(select(Curve.number, Curve.lines).where(mine))}
        for number, piece in enumerate(new):
            if number not in old:
                connection.execute(insert(Curve).values(attempt_id=attempt_id, number=number, lines=piece))
            elif old[number] != piece:
                connection.execute(update(Curve).where(mine, Curve.number == number).values(lines=piece))
        if len(old) > len(new):
            connection.execute(delete(Curve).where(mine, Curve.number >= len(new)))


def of_attempt(engine: Engine, attempt_id: int) -> str:
    """The lines, joined; empty where there are none."""
    with engine.connect() as connection:
        query = select(Curve.lines).where(Curve.attempt_id == attempt_id).order_by(Curve.number)
        return "\n".join(connection.scalars(query))


def attempts_with_curves(engine: Engine, run_id: str) -> set[int]:
    """Ids of the run's attempts that have rows here."""
    with engine.connect() as connection:
        query = select(Curve.attempt_id).join(Attempt).join(SessionRow).where(SessionRow.run_id == run_id)
        return set(connection.scalars(query.distinct()))
