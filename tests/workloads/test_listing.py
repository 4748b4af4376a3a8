"""workloads/common/listing.py: headers read once, in order, whatever order the threads read them in."""

from __future__ import annotations

import random
import threading
import time
from types import SimpleNamespace

import pytest

from kgorch.workloads.common import listing
from kgorch.workloads.common.files import DataError
from kgorch.workloads.common.listing import fingerprint, headers


class Kept:
    """A session of one rank that remembers, as kgorch.worker.data.value_cache does."""

    def __init__(self) -> None:
        self.values: dict[str, tuple[object, object]] = {}
        self.told: list[tuple[str, int, int]] = []

    def cached(self, name, compute, *, key):
        if name not in self.values or self.values[name][0] != key:
            self.values[name] = (key, compute())
        return self.values[name][1]

    def progress(self, what, done, total):
        self.told.append((what, done, total))


def look(item: int) -> list[int]:
    if item % 100 == 7:
        raise DataError(f"{item} is broken")
    return [item, 2 * item]


SOUND = [item for item in range(1000) if item % 100 != 7]


def test_headers_are_in_the_items_order_and_no_file_is_opened_twice(monkeypatch):
    session, opened = Kept(), []

    def slow(item: int) -> list[int]:
        opened.append(item)
        time.sleep(random.random() / 2000)
        return look(item)

    for _ in range(2):
        found = headers(session, "train", SOUND, slow, key="k")
        assert found.found == [[item, 2 * item] for item in SOUND] and not found.broken
    assert sorted(opened) == SOUND
    assert session.told[-1] == ("train", len(SOUND), len(SOUND))


def test_threads_read_at_the_same_time():
    meet = threading.Barrier(4, timeout=20)
    items = list(range(4 * listing.PORTION))
    assert headers(None, "train", items, lambda item: meet.wait() and None, key="k", threads=4).broken == {}


def test_what_is_broken_is_left_out_where_it_may_be_and_else_the_first_one_is_named():
    items = list(range(1000))
    found = headers(Kept(), "train", items, look, key="k", skip_broken=True)
    assert found.broken == {at: f"{at} is broken" for at in range(7, 1000, 100)}
    assert [at for at, item in enumerate(found.found) if item is None] == list(found.broken)


@pytest.mark.parametrize("threads", [1, 16])
def test_the_first_broken_one_in_the_items_order_is_named_and_little_is_read_behind_it(threads):
    opened = []

    def slowest_first(item: int) -> list[int]:
        opened.append(item)
        time.sleep(0.02 if item < 8 else 0.0)
        return look(item)

    with pytest.raises(DataError, match=r"^7 is broken"):
        headers(None, "train", list(range(100_000)), slowest_first, key="k", threads=threads)
    assert len(opened) < 50_000


def test_another_error_than_a_broken_file_ends_the_reading():
    def fails(item: int) -> None:
        raise MemoryError(item)

    with pytest.raises(MemoryError):
        headers(None, "train", list(range(500)), fails, key="k", skip_broken=True)


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        {"found": [1, 2]},
        {"found": [1], "broken": {}},
        {"found": [1, 2, 3], "broken": {"x": "y"}},
        {"found": [1, 2, 3], "broken": {"3": "y"}},
        {"found": [1, 2, 3], "broken": []},
    ],
)
def test_a_value_from_elsewhere_that_cannot_be_is_refused_with_what_to_do(value):
    session = SimpleNamespace(cached=lambda name, compute, *, key: value)
    with pytest.raises(DataError, match="not what was read") as refused:
        headers(session, "train", [1, 2, 3], look, key="k")
    assert "train.json" in str(refused.value)


def test_a_fingerprint_is_of_names_and_of_sizes_and_not_of_times(tmp_path):
    names = [f"{number}.png" for number in range(200)]
    for name in names:
        (tmp_path / name).write_bytes(b"x")
    first = fingerprint(tmp_path, names)
    (tmp_path / "0.png").touch()
    assert fingerprint(tmp_path, names) == first
    for change in (names[1:], [*names, "more.png"], ["other.png", *names[1:]], []):
        assert fingerprint(tmp_path, change) != first
    (tmp_path / "0.png").write_bytes(b"larger")
    assert fingerprint(tmp_path, names) != first
    (tmp_path / "0.png").unlink()
    assert fingerprint(tmp_path, names) != first
