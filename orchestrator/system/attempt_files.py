"""JSON files in an attempt's folder, by which ranks and guard process leave word of how they ended."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kgorch.protocol import transport
from kgorch.protocol.launch_spec import LaunchSpec
from kgorch.protocol.messages import DeferredFile
from kgorch.system import files

EXIT_FILE = "exit.json"
"""How torchrun ended, from its shim."""


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file complete or not at all; not flushed to disk, because it describes processes of this boot.

    Raises: OSError.
    """
    files.write(path, json.dumps(content).encode())


def write_attempt_file(launch: LaunchSpec, name: str, content: dict[str, Any]) -> None:
    """Write how a rank ended into the attempt's folder, or how torchrun ended into its node's.

    Where the disk is full or read-only the content goes to the supervisor instead, which writes it once there is room. Never
    fails: the process that calls this is about to end.
    """
    folder = launch.own_folder if name == EXIT_FILE else Path(launch.folder)
    try:
        write_json(folder / name, content)
    except OSError:
        with contextlib.suppress(OSError), transport.connect(launch.socket) as supervisor:
            transport.send(supervisor, DeferredFile(launch.attempt, name, content))
