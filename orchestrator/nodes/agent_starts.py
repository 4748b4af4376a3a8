"""Starts the agents of other nodes: the file with the secret, the command of the plan, the log; and what is compared at first."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
import time
from pathlib import Path

from kgorch.errors import KgorchError
from kgorch.nodes import allocation, versions
from kgorch.plan.nodes import SRUN, NodesSection
from kgorch.protocol.node_messages import NodeHello

SHARED_S = 10.0
"""Seconds until a file that an agent has written must be seen here."""

EXIT_S = 5.0
"""Seconds that an agent, whose connection is closed, may take to end."""


class AgentStarts:
    """Of one session.

    Args:
        folder: of the run, on the file system that the nodes share.
    """

    def __init__(self, folder: Path, run_id: str, section: NodesSection) -> None:
        self._run_folder, self._run_id, self._section = folder, run_id, section
        self.folder = folder / "nodes"

    def start(self, number: int, host: str, address: str, port: int) -> tuple[bytes, subprocess.Popen[bytes]]:
        """Start an agent. Returns its secret, and the command that was started. Raises: KgorchError, OSError."""
        secret = secrets.token_bytes(32)
        self.folder.mkdir(mode=0o700, exist_ok=True)
        told = {
            "node": number, "address": address, "port": port, "secret": secret.hex(), "run_id": self._run_id,
            "folder": str(self._run_folder), "probe": f".probe-{number}-{secrets.token_hex(8)}",
        }  # fmt: skip
        path = self._file(number)
        path.unlink(missing_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump(told, file)
            file.flush()
            os.fsync(file.fileno())
        words = [sys.executable, "-m", "kgorch.nodes.agent", str(path)]
        command = allocation.command_on(host, words, self._section.start or SRUN)
        with open(self._log(number), "ab") as log:
            try:
                return secret, subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
                )
            except OSError as error:
                raise KgorchError(
                    f"the command that starts an agent on {host} cannot be run: {error}",
                    next_step='set the command in the plan: [nodes] start, for example ["ssh", "{host}", "{command}"]',
                ) from None

    def check(self, hello: NodeHello, host: str) -> None:
        """Compare a node with this one, and look for what it has written. Raises: KgorchError."""
        if differences := versions.differences(hello, host):
            raise KgorchError(
                f"{host} has other versions than this node",
                *differences,
                next_step="install the same versions on all nodes, best in a folder that they share",
            )
        probe = self._run_folder / hello.probe
        until_s = time.monotonic() + SHARED_S
        while not probe.exists():
            if time.monotonic() > until_s:
                raise KgorchError(
                    f"files that {host} writes into {self._run_folder} are not visible on this node",
                    "the state folder must lie on a file system that all nodes share",
                    next_step="set KGORCH_HOME to a folder there",
                )
            time.sleep(0.1)
        probe.unlink(missing_ok=True)

    def failure(self, number: int, host: str) -> str:
        """Why an agent has not answered, in one line: the last one of its log."""
        log = self._log(number)
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        return f"{host}: {next((line for line in reversed(lines) if line.strip()), 'it has not connected')[:500]}"

    def end(self, number: int, process: subprocess.Popen[bytes] | None) -> None:
        """Wait for an agent that was let go, and kill the command that started it should it stay."""
        if process:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=EXIT_S)
            if process.poll() is None:
                process.kill()
                process.wait()
        self._file(number).unlink(missing_ok=True)

    def _file(self, number: int) -> Path:
        return self.folder / f"node{number}.json"

    def _log(self, number: int) -> Path:
        return self.folder / f"node{number}.log"
