"""This machine as a member of a fleet: its row, and the id by which machines know that they share a state folder."""

from __future__ import annotations

import os
import socket
import uuid
from pathlib import Path
from typing import Any

from sqlalchemy import Engine

from kgorch import __version__
from kgorch.db import fleet
from kgorch.errors import StateUnusable
from kgorch.hardware import devices, nvml
from kgorch.system import process_identity

MAX_ID_BYTES = 64


def register(engine: Engine, home: Path, *, daemon_pid: int | None = None) -> None:
    """Write this machine's row; without a fleet nothing.

    Args:
        daemon_pid: of the daemon that registers it; a supervisor without a daemon leaves that of the row.
    Raises: StateUnusable where another machine of that name lives; SQLAlchemyError.
    """
    if (settings := fleet.settings(engine)) is None:
        return
    name, host = settings.machine, socket.gethostname()
    known = next((row for row in fleet.machines(engine) if row.name == name), None)
    if known and (known.host, known.home) != (host, str(home)) and fleet.is_machine_alive(engine, name):
        raise StateUnusable(
            f"another machine of the fleet is named {name!r}",
            f"host {known.host}, state folder {known.home}, seen at {known.seen_at:%H:%M:%S} UTC; here: {host}, {home}",
            next_step="give this one a name of its own: KGORCH_MACHINE, or fleet.machine of the configuration",
            error_code="KG606",
        )
    columns: dict[str, Any] = {
        "host": host, "boot_id": process_identity.boot_id(), "home": str(home), "state_id": state_id(home),
        "version": __version__, "gpus": _gpus(),
    }  # fmt: skip
    if daemon_pid is not None:
        columns["daemon_pid"] = daemon_pid
    fleet.register(engine, columns)


def state_id(home: Path) -> str:
    """A random id in the state folder, created at the first call. Raises: StateUnusable."""
    path = home / "state_id"
    try:
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            return path.read_bytes()[:MAX_ID_BYTES].decode("ascii", "replace").strip() or "empty"
        with os.fdopen(descriptor, "w") as file:
            made = uuid.uuid4().hex
            file.write(made + "\n")
        return made
    except OSError as error:
        raise StateUnusable(
            f"{path} cannot be read or written",
            str(error),
            next_step="point KGORCH_HOME at a folder that can be written",
        ) from None


def _gpus() -> list[str]:
    try:
        count = devices.visible_gpu_count(os.environ)
    except nvml.DriverUnresponsive:
        return ["unknown"]
    return [devices.model_name()] * count
