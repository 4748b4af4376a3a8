"""Saves of a session over several nodes: their parts become a checkpoint (nodes/partial_saves.py), and all keepers are asked at
once."""

from __future__ import annotations

import threading
import time
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
        live.nodes.on_lost = self._parts.give_up

    def take(self, message: Message, node: int) -> bool:
        """Whether that was for the parts alone. A failure concerns the session, too. Args: node: whose keeper or rank said it."""
        match message:
            case PartWritten():
                self._parts.on_part(message)
                return True
            case SaveFailure() if self._live.nodes.names():
                self._parts.on_failure(message, node)
        return False

    def persist(self, timeout_s: float, *, again: bool = False) -> None:
        """Have the newest snapshot written by the keepers of all nodes; return once it is on disk, or after `timeout_s`."""
        self._ask(
            "persist", lambda: keeper_client.persist(self._live.folder, timeout_s=timeout_s, again=again), timeout_s
        )

    def end(self, timeout_s: float) -> None:
        """The same, and end all keepers, and the agents of other nodes."""
        self._ask("end", lambda: keeper_client.end(self._live.folder, timeout_s=timeout_s), timeout_s)

    def _ask(self, what: str, ask_here: Callable[[], None], timeout_s: float) -> None:
        """Ask all keepers at once. One that is done writes no part, so what the others wrote without it is given up."""
        order = self._live.nodes.order(what)
        if order.is_for_nobody:
            ask_here()
            return
        here, until_s = threading.Thread(target=ask_here, daemon=True), time.monotonic() + timeout_s
        here.start()
        while (here.is_alive() or not order.is_done) and time.monotonic() < until_s:
            for node in [*order.done_by(), *([] if here.is_alive() else [0])]:
                self._parts.give_up(without=node)
            here.join(0.05 if here.is_alive() else 0)
            time.sleep(0.02)

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
