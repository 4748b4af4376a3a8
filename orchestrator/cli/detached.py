"""`--detach` of `kgorch start` and `resume`: the same command in a process session of its own, which outlives the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from kgorch.cli.display import render
from kgorch.cli.lookup import open_state


def start(words: Sequence[str], run: str, *, as_json: bool, verb: str = "start") -> int:
    """Start the verb with these words in the background; return once its session is open, or with its exit code.

    Args:
        run: the name of the run, whose status `as_json` prints.
    Raises: KgorchError: the child's error, as it printed it.
    """
    from kgorch.admission import background_start

    _, home, _ = open_state()
    child = background_start.start([verb, *words], home)
    if not child.is_open and not as_json:
        render.echo(child.output)
        return child.code or 0
    if as_json:
        from kgorch.cli.commands.inspection.status import print_status

        print_status(run, as_json=True)
    else:
        render.echo(f"supervising in the background as pid {child.pid}; its messages go to {child.log}")
        render.echo("next: kgorch status --watch, kgorch logs -f, kgorch stop")
    return child.code or 0
