"""A probe asks a place with real sessions, and says where it does not do what kgorch counts on."""

from __future__ import annotations

import json

import pytest

from kgorch.core.remote.place_values import PlaceError, RemoteStatus, Sighting, Trouble
from kgorch.remote.places.local.place import LocalPlace
from kgorch.remote.probe import PlaceFinding, PlaceProbe


@pytest.fixture
def place(tmp_path):
    return LocalPlace(tmp_path / "place")


def answers(findings: list[PlaceFinding]) -> dict[str, str]:
    return {finding.question: finding.answer for finding in findings}


def test_a_probe_of_the_local_place_finds_what_kgorch_counts_on_and_leaves_nothing(kgorch, monkeypatch):
    monkeypatch.setattr("kgorch.remote.probe.LIMIT_S", 6)
    monkeypatch.setattr("kgorch.remote.probe.SESSION_S", 5)
    monkeypatch.setattr("kgorch.remote.probe.POLL_S", 0.2)
    plan = kgorch.plan()
    view = kgorch.look("remote", "check", str(plan), "--on", "local", "--probe")
    assert all(item["agrees"] for item in view["probe"]), json.dumps(view["probe"], indent=1)
    said = {item["question"]: item["answer"] for item in view["probe"]}
    assert said["how a script that ends by itself is called"] == "complete"
    assert said["how a session that ran over its limit is called"].startswith("killed")
    assert said["the output of a session that was complete, as an input"] == "is attached"
    assert said["the output of a session that failed, as an input"].startswith("is refused")
    assert not list((kgorch.home / "places" / "local" / "sessions").glob("kgorch-*"))


class Calls:
    """A place some of whose answers are others."""

    def __init__(self, place, **others) -> None:
        self._place, self._others = place, others

    def __getattr__(self, name):
        return self._others.get(name) or getattr(self._place, name)


def test_an_end_that_is_called_an_error_is_said_to_be_none_that_kgorch_can_use(place, tmp_path, monkeypatch):
    monkeypatch.setattr("kgorch.remote.probe.LIMIT_S", 6)
    monkeypatch.setattr("kgorch.remote.probe.SESSION_S", 5)

    def look(name):
        seen = place.look(name)
        return Sighting(RemoteStatus.ERROR, "ERROR", "gone wrong") if seen.status.is_over else seen

    found = PlaceProbe(Calls(place, look=look), tmp_path / "probe", poll_s=0.1).run()
    assert [item.question for item in found if not item.agrees] == ["how a script that ends by itself is called"]
    assert answers(found)["how a script that ends by itself is called"] == "ERROR (gone wrong)"


def test_a_place_that_stops_to_answer_ends_the_probe_and_what_was_pushed_is_deleted(place, tmp_path):
    deleted = []

    def collect(*_):
        raise PlaceError(Trouble.UNANSWERED, "no network")

    calls = Calls(place, collect=collect, delete=deleted.append)
    with pytest.raises(PlaceError, match="no network"):
        PlaceProbe(calls, tmp_path / "probe", poll_s=0.1).run()
    assert len(deleted) == 1
