"""A run through sessions at Kaggle with the real client. One ends in ERROR, one is killed at its limit, one was pushed by a request
whose answer was lost. It ends with the bits of the same training in one piece."""

from __future__ import annotations

import collections
import importlib.util
import time
from pathlib import Path
from types import ModuleType

import pytest
from harness import wait_until
from places.kaggle_server import Fault, KaggleServer, Rules
from places.kaggle_server.sandbox import has_namespaces

WITHIN_S, POLL_S = 400.0, 2.0


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
@pytest.mark.timeout(900)
def test_a_chain_with_an_error_a_kill_at_the_limit_and_a_lost_answer_has_the_same_bits(demo, tmp_path):
    if not has_namespaces():
        pytest.skip("the stand-in needs root and namespaces for a session that sees what one at Kaggle sees")
    folder = tmp_path / "chain"
    demo.prepare(folder)
    with KaggleServer(folder / "server", rules=Rules(queue_s=0.5, ready_s=0.0)) as server:
        typed = demo.Demo(folder, server, ["daemon"])
        typed.kgorch("remote", "start", "plan.toml")
        server.order("SaveKernel", Fault("cut", after=True))
        daemon, began_s = typed.carry(), time.monotonic()
        try:
            wait_for_session(typed, 1)
            server.wait_for(typed.slugs()[0], "COMPLETE", within_s=WITHIN_S)
            wait_for_session(typed, 2)
            server.crash(typed.slugs()[1])
            assert server.wait_for(typed.slugs()[1]).status == "ERROR"
            server.rules.killed_after_s = 25.0
            wait_for_session(typed, 3)
            server.rules.killed_after_s = None
            assert server.wait_for(typed.slugs()[2]).status == "CANCEL_ACKNOWLEDGED"
            wait_until(lambda: typed.status().get("state") == "finished", within_s=WITHIN_S, what="the run's end")
        finally:
            daemon.terminate()
            daemon.wait()
        lasted_s = time.monotonic() - began_s
        counts = collections.Counter(request.method for request in server.requests)
        uploads = counts["StartBlobUpload"] + counts["PUT"]  # of the bundle, once
        # The visit in progress has made requests that count against the polls to come; a push and its search are six.
        assert counts.total() - uploads <= lasted_s / POLL_S + 6, counts
        pushes = {slug: len(versions) for slug, versions in server.kernels.kernels.items()}
        assert len(pushes) >= 4 and set(pushes.values()) == {1}, "each session was pushed once"
        texts = ["".join(event["data"] for event in server.session(slug).log) for slug in typed.slugs()]
        assert [
            slug for slug, text in zip(typed.slugs(), texts, strict=True) if "a new run begins" in text
        ] == typed.slugs()[:1]
        demo.compare(typed)


def wait_for_session(typed, number: int) -> None:
    """Until the session with this number trains."""

    def trains() -> bool:
        return len(typed.slugs()) >= number and typed.trained(typed.slugs()[number - 1])

    wait_until(trains, within_s=WITHIN_S, what=f"an epoch of session {number} ({time.ctime()})")
