"""kgorch top"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

import click

from kgorch.cli.display import render
from kgorch.cli.lookup import open_state


@click.command("top")
@click.option(
    "-n", "--limit", metavar="N", default=200, show_default=True, type=click.IntRange(1, 1000), help="At most N runs."
)
def command(limit: int) -> int:
    """Show all runs on the whole screen, those that train first; q quits, Enter shows the chosen run. In a pipe: the table, once.

    \b
    Example:
      kgorch top | head -20
    """
    from kgorch.cli.display import top_screen
    from kgorch.cli.display.progress import mode_of

    read = _reader(limit)
    if mode_of("auto", sys.stdout) != "live":
        titles = [column.title for column in top_screen.COLUMNS]
        render.table(titles, [[column.text(view) for column in top_screen.COLUMNS] for view in read()])
        return 0
    with contextlib.suppress(KeyboardInterrupt):
        top_screen.show(read, _open_run)
    return 0


def _reader(limit: int) -> Callable[[], list[dict[str, Any]]]:
    """Reads all runs. A run whose rows have not changed is not read again for a while."""
    from kgorch.report import overview
    from kgorch.report.curves import CurveCache

    entries = overview.ListCache(CurveCache())

    def read() -> list[dict[str, Any]]:
        _, _, engine = open_state()
        try:
            runs = overview.listing(engine, limit=limit)
            return [entries.known(item) or entries.make(engine, item) for item in runs]
        finally:
            engine.dispose()

    return read


def _open_run(name: str) -> None:
    from kgorch.cli.commands.inspection import status
    from kgorch.cli.display import status_rows, watch

    watch.watch(status.reader(name), status_rows.rows, stays=True)
