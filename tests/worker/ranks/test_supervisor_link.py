"""A rank's connection to the supervisor: what is sent when it closes."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

from torch import nn

from kgorch.protocol import transport
from kgorch.protocol.codec import LineBuffer, decode
from kgorch.protocol.launch_spec import LaunchSpec
from kgorch.protocol.messages import Heartbeat, Hello
from kgorch.worker.checkpoint.tracked_objects import TrackedObjects
from kgorch.worker.checkpoint.training_position import TrainingPosition
from kgorch.worker.ranks import supervisor_link
from kgorch.worker.ranks.supervisor_link import SupervisorLink
from kgorch.worker.supervision import StatusReporter


class Board:
    def ask(self, request: int) -> None:
        raise AssertionError("nothing was ordered")


def test_the_status_at_the_close_arrives_however_long_its_making_takes(tmp_path):
    """The thread, which is in its own beat, is done before: told too early that this is the end, it would not wait for the last."""
    thread_asks, main_asks = threading.Event(), threading.Event()

    def status():
        if threading.current_thread() is threading.main_thread():
            main_asks.set()
            time.sleep(0.3)
            return [Heartbeat("1.1", 0, 7, 0, 0.1, 0.1)]
        thread_asks.set()
        main_asks.wait(5)
        return [Heartbeat("1.1", 0, 6, 0, 0.1, 0.1)]

    with transport.listen(tmp_path / "socket") as listener:
        launch = LaunchSpec("run", "id", "train", "1.1", "", "", "", 1, str(tmp_path / "socket"), "", "", "")
        link = SupervisorLink(launch, Board(), lambda: Hello("1.1", 0, 1, 0, 0), status)
        link.start()
        connection, _ = listener.accept()
        connection.settimeout(5)
        assert thread_asks.wait(5)
        link.send(Heartbeat("1.1", 0, 5, 0, 0.1, 0.1))
        link.close()
        link._thread.join(60)  # it waits two seconds
        assert not link._thread.is_alive()
        lines, steps = LineBuffer(), []
        while 7 not in steps:
            steps += [message.step for message in map(decode, lines.feed(connection.recv(65536)))]
        connection.close()


class HeldBack:
    """A socket whose reader waits."""

    def __init__(self, inner):
        self._inner, self.is_read, self.may_read = inner, threading.Event(), threading.Event()

    def fileno(self):
        return self._inner.fileno()

    def recv(self, size):
        self.is_read.set()
        self.may_read.wait(5)
        return self._inner.recv(size)


def test_a_close_whose_wake_up_was_read_with_an_earlier_one_does_not_wait_for_the_next_beat(tmp_path, monkeypatch):
    """The end of each session took up to a second longer, one out of two times."""
    monkeypatch.setattr(supervisor_link, "BEAT_S", 3600.0)
    with transport.listen(tmp_path / "socket") as listener:
        launch = LaunchSpec("run", "id", "train", "1.1", "", "", "", 1, str(tmp_path / "socket"), "", "", "")
        link = SupervisorLink(launch, Board(), lambda: Hello("1.1", 0, 1, 0, 0), list)
        link._wake_receiver = held = HeldBack(link._wake_receiver)
        link.start()
        connection, _ = listener.accept()
        link.send(Heartbeat("1.1", 0, 5, 0, 0.1, 0.1))
        assert held.is_read.wait(5)
        link.send(Heartbeat("1.1", 0, 6, 0, 0.1, 0.1))
        closing = threading.Thread(target=link.close)
        closing.start()
        assert link._closing.wait(5)
        time.sleep(0.1)  # its wake-up is in the socket, too
        held.may_read.set()
        closing.join()
        link._thread.join(60)
        assert not link._thread.is_alive(), "it waits for its next beat"
        connection.close()


def test_a_rank_that_restores_its_state_is_not_ready_yet():
    """Its first message may be sent at any moment of a restore: the supervisor would count on a state of 0 bytes."""
    tracked = TrackedObjects()
    state = SimpleNamespace(member=SimpleNamespace(rank=0), tracked=tracked, position=TrainingPosition())
    launch = LaunchSpec("run", "id", "train", "1.1", "", "", "", 1, "", "", "", "")
    reporter = StatusReporter(state, launch)
    tracked.set({"model": nn.Linear(1, 1)})
    assert not reporter.hello().ready
    tracked.measure(1)
    tracked.is_ready = True
    assert reporter.hello().ready and reporter.hello().state_bytes >= 8
