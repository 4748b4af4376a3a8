"""Files that several processes of a run share: their names, and how a rank or the shim writes its record of an attempt."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from orchestrator.protocol import sockets
from orchestrator.protocol.launch_spec import LaunchSpec
from orchestrator.protocol.messages import DeferredFile
from orchestrator.system.durable_files import replace_json

KEEPER_SOCKET = "keeper.sock"
"""The snapshot server's socket, in the run's folder."""

CACHE_FOLDER = "cached"
"""Values that the run computes once (worker/cached.py), in the run's folder."""

MAX_CACHED_BYTES = (64 << 20) + 1000
"""Of one such value, with the line before it."""

CACHE_COMPLETE_FILE = "whole.json"
"""In the folder of a data cache, as long as its copy is complete."""


def write_attempt_file(launch: LaunchSpec, name: str, content: dict[str, Any]) -> None:
    """Write how a rank or torchrun ended into the attempt's folder, complete or not at all.

    Where the disk is full or read-only the content goes to the supervisor instead, which writes it later.
    """
    try:
        replace_json(Path(launch.folder) / name, content)
    except OSError:
        with contextlib.suppress(OSError), sockets.connect(launch.socket) as supervisor:
            sockets.send(supervisor, DeferredFile(launch.attempt, name, content))
