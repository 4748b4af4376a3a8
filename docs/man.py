"""Writes a man page for each verb, from its help.   python docs/man.py [build/man]

Needs click-man (`kgorch[release]`). To read one: man build/man/kgorch-start.1
To install them: copy them to ~/.local/share/man/man1
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import click
from click_man.core import write_man_pages

from kgorch import __version__
from kgorch.cli import cli

ROOT = Path(__file__).resolve().parents[1]


def load_verbs(group: click.Group) -> None:
    """Import the verbs: kgorch's groups load each when it is typed, click-man reads `commands`."""
    ctx = click.Context(group)
    for name in group.list_commands(ctx):
        command = group.get_command(ctx, name)
        assert command is not None
        group.commands[name] = command
        if isinstance(command, click.Group):
            load_verbs(command)


def write(folder: Path) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    load_verbs(cli)
    date = time.strftime("%Y-%m-%d", time.gmtime(int(os.environ.get("SOURCE_DATE_EPOCH", time.time()))))
    write_man_pages("kgorch", cli, version=__version__, target_dir=str(folder), date=date)
    return sorted(folder.glob("*.1"))


if __name__ == "__main__":
    pages = write(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build" / "man")
    print(f"{len(pages)} man pages in {pages[0].parent}")
