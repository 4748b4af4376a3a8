"""The situations of the tests with Kaggle's real client: a stand-in for its server, and an account there."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from kgorch.core.remote.place_values import SessionOrder
from kgorch.remote.places.kaggle.place import KagglePlace

NEEDED = [name for name in ("kaggle", "six", "trustme") if importlib.util.find_spec(name) is None]
collect_ignore_glob = ["test_kaggle_place*", "test_kaggle_server*"] if NEEDED else []

ORDER = SessionOrder(
    name="kgorch-demo-000001-001", nonce="0123456789abcdef", run="demo", run_id="0123456789ab", number=1, bundle="ada/kgorch-none",
    source="", expected_step=-1, session_s=50, timeout_s=60, accelerator="", internet=False,
)  # fmt: skip


def pytest_report_header() -> str | None:
    return f"tests/places: without {', '.join(NEEDED)}, Kaggle's client is not tested" if NEEDED else None


def script_of(order: SessionOrder, body: str = "print('hello')") -> str:
    line = f"# kgorch-push: run={order.run} session={order.number} nonce={order.nonce}"
    return f"#!/usr/bin/env python3\n{line}\n{body}\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator:
    from places.kaggle_server import KaggleServer, Rules

    with KaggleServer(tmp_path_factory.mktemp("server"), rules=Rules(slots=100, cpu_slots=100, ready_s=0.0)) as made:
        yield made


@pytest.fixture(scope="module")
def place(server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KagglePlace]:
    """An account at the stand-in; its process stays from test to test, as in a daemon."""
    folder = tmp_path_factory.mktemp("place")
    with KagglePlace(folder / "place", server.environment(folder / "home")) as made:
        yield made


@pytest.fixture(scope="module")
def bundle(place: KagglePlace, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Reference of a bundle that is READY."""
    folder = tmp_path_factory.mktemp("bundle")
    (folder / "kgorch-bundle.json").write_text("{}")
    (folder / "f0001").write_bytes(b"\0" * 70_000)
    return place.store_bundle(folder, "kgorch-0123456789")


@pytest.fixture
def order(bundle: str, request: pytest.FixtureRequest) -> SessionOrder:
    """Of a session that no other test pushes."""
    return replace(ORDER, name=f"kgorch-{abs(hash(request.node.nodeid)) % 10**12:012}-001", bundle=bundle)


@pytest.fixture
def pushed(place: KagglePlace, server, order: SessionOrder) -> Callable[..., SessionOrder]:
    """Push a script and wait until its session is over."""

    def push(body: str = "print('hello')", **changes) -> SessionOrder:
        made = replace(order, **changes)
        place.push(made, script_of(made, body))
        server.wait_for(made.name)
        return made

    return push
