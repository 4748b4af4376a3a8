"""Saves of a session over several nodes: their parts become a checkpoint (nodes/partial_saves.py), and all keepers are asked at
once."""

from __future__ import annotations

from collections.abc import Callable

from kgorch.checkpoint.verifier import Verifier
from kgorch.nodes.partial_saves import PartialSaves
from kgorch.protocol.messages import Message
from kgorch.protocol.snapshot_messages import CheckpointWritten, PartWritten, SaveConclusion, SaveFailure
from kgorch.snapshots import keeper_client
from kgorch.supervisor.live_session import LiveSession


class NodeSaves:
    """Of one session. Methods may be called from any thread.

    Args:
        post: hands a job to the loop.
    """

    def __init__(self, live: LiveSession, verifier: Verifier, post: Callable[[Callable[[], None]], None]) -> None:
        self._live, self._verifier = live, verifier
        self._parts = PartialSaves(self._conclude, self._report, live.nodes.are_all_here)

    def take(self, message: Message, node: int) -> bool:
        """Whether that was for the parts alone. A failure concerns the session, too. Args: node: whose keeper or rank said it."""
        match message:
            case PartWritten():
                self._parts.on_part(message)
                return True
            case SaveFailure() if self._live.nodes.names():
                self._parts.on_failure(message, node)
        return False

    def close(self) -> None:
        """Wait for what is written."""
        self._parts.close()

    def _conclude(self, node: int, conclusion: SaveConclusion) -> None:
        if node == 0:
            keeper_client.conclude(self._live.folder, conclusion)
        else:
            self._live.nodes.tell(node, conclusion)

    def _report(self, result: CheckpointWritten | SaveFailure) -> None:
        if isinstance(result, CheckpointWritten):
            self._verifier.submit(lambda: self._verifier.verify(result))
        else:
            self._verifier.submit(lambda: self._verifier.report_failure(result.error))


def persist(live: LiveSession, timeout_s: float, *, again: bool = False) -> None:
    """Have the newest snapshot written by the keepers of all nodes; return once it is on disk, or after `timeout_s`."""
    wait = live.nodes.order("persist")
    keeper_client.persist(live.folder, timeout_s=timeout_s, again=again)
    wait(timeout_s)


def end(live: LiveSession, timeout_s: float) -> None:
    """The same, and end all keepers, and the agents of other nodes."""
    wait = live.nodes.order("end")
    keeper_client.end(live.folder, timeout_s=timeout_s)
    wait(timeout_s)
