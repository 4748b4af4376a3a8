"""What `start`, `resume` and `remote fetch` print while they fetch or import a run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kgorch.cli.display import render
from kgorch.cli.display.progress import mode_of

if TYPE_CHECKING:
    from kgorch.checkpoint.manifest import Manifest


class ImportProgress:
    """A `requests.ImportWatcher` that prints on stderr, with a progress bar on a terminal.

    Without a terminal there is no bar: a log or a notebook would keep every state of it.
    """

    def __enter__(self) -> ImportProgress:
        self._bar: Any = None
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()

    def note(self, text: str) -> None:
        render.echo(f"note: {text}", err=True)

    def copy_progress(self, done_bytes: int, total_bytes: int) -> None:
        if mode_of("auto", sys.stderr) != "live":
            return
        if self._bar is None:
            from rich.console import Console
            from rich.progress import Progress, TextColumn, TransferSpeedColumn

            columns = [TextColumn("copying {task.description}"), TransferSpeedColumn()]
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task("", total=total_bytes)
            self._bar.start()
        if done_bytes < self._bar.tasks[0].completed:  # another file
            self._bar.reset(self._task)
        size = render.size(total_bytes or done_bytes)
        text = f"{100 * done_bytes // total_bytes}% of {size}" if total_bytes else size
        self._bar.update(self._task, completed=done_bytes, total=total_bytes or None, description=text)

    def checkpoint_copied(self, manifest: Manifest, folder: Path) -> None:
        size = render.size(manifest.total_bytes)
        render.echo(f"found step {manifest.step} of stage {manifest.stage} in {folder}, {size}, verified", err=True)
