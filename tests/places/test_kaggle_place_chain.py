"""A run through sessions at Kaggle with the real client. One ends in ERROR, one is killed at its limit, one was pushed by a request
whose answer was lost. It ends with the bits of the same training in one piece."""

from __future__ import annotations

import collections
import importlib.util
import json
import time
from pathlib import Path
from types import ModuleType

import pytest
from click.testing import CliRunner
from harness import wait_until
from places.kaggle_server import Fault, KaggleServer, Rules
from places.kaggle_server.sandbox import has_namespaces

from kgorch.cli import cli

WITHIN_S, POLL_S = 900.0, 2.0
# Of a start a crowded machine makes most of the demo's 50 s: a session must get on there, and the first must not finish here.
LONGER = {'session = "50s"': 'session = "100s"', "pause = 0.5": "pause = 1.2"}


@pytest.fixture
def demo() -> ModuleType:
    """docs/demo_remote.py, which types the commands of such a run."""
    path = Path(__file__).parents[2] / "docs" / "demo_remote.py"
    spec = importlib.util.spec_from_file_location("demo_remote", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_chain_with_an_error_a_kill_at_the_limit_and_a_lost_answer_has_the_same_bits(demo, tmp_path, monkeypatch):
    if not has_namespaces():
        pytest.skip("the stand-in needs root and namespaces for a session that sees what one at Kaggle sees")
    folder = tmp_path / "chain"
    for short, longer in LONGER.items():
        assert short in demo.PLAN
        monkeypatch.setattr(demo, "PLAN", demo.PLAN.replace(short, longer))
    demo.prepare(folder)
    with KaggleServer(folder / "server", rules=Rules(queue_s=0.5, ready_s=0.0)) as server:
        typed = demo.Demo(folder, server, ["daemon"])
        typed.kgorch("remote", "start", "plan.toml")
        server.order("SaveKernel", Fault("cut", after=True))
        daemon, began_s = typed.carry(), time.monotonic()
        try:
            server.wait_for(pushed(typed, 1), "COMPLETE", within_s=WITHIN_S)
            second = pushed(typed, 2)
            wait_until(lambda: typed.trained(second), within_s=WITHIN_S, what="an epoch of the second session")
            server.rules.killed_after_s = 25.0
            server.crash(second)
            assert server.wait_for(second).status == "ERROR"
            third = pushed(typed, 3)
            assert server.wait_for(third).status == "CANCEL_ACKNOWLEDGED"
            server.rules.killed_after_s = None
            wait_until(lambda: is_finished(typed), within_s=WITHIN_S, what="the run's end")
        finally:
            daemon.terminate()
            daemon.wait()
        lasted_s = time.monotonic() - began_s
        counts = collections.Counter(request.method for request in server.requests)
        uploads = counts["StartBlobUpload"] + counts["PUT"]  # of the bundle, once
        # The visit in progress has made requests that count against the polls to come; a push and its search are six.
        assert counts.total() - uploads <= lasted_s / POLL_S + 6, counts
        # The driver has deleted sessions that nothing goes on from.
        pushes = collections.Counter(request.body["newTitle"] for request in server.asked("SaveKernel"))
        assert len(pushes) >= 4 and set(pushes.values()) == {1}, "each session was pushed once"
        for slug in typed.slugs():
            log = "".join(event["data"] for event in server.session(slug).log)
            assert "a new run begins" not in log or slug.endswith("-001"), log
        demo.compare(typed)


def is_finished(typed) -> bool:
    """In this process: a command for each look would take a third of a core."""
    done = CliRunner().invoke(cli, ["status", "digits", "--json"], env=typed.env, catch_exceptions=False)
    return bool(json.loads(done.stdout)["state"] == "finished")


def pushed(typed, number: int) -> str:
    """The name of the session with this number, once it was pushed."""

    def find() -> str:
        return next((slug for slug in typed.slugs() if slug.endswith(f"-{number:03d}")), "")

    slug: str = wait_until(find, within_s=WITHIN_S, what=f"session {number}")
    return slug
