"""What a probe makes of what it has durations_s; what it sees is shown by tests/preflight/test_check.py."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from kgorch.worker.probe.probe import Probe, ProbeResult


class Scored(SimpleNamespace):
    """A loader of ten batches, of which a probe was given two."""

    def __len__(self):
        return 10


def test_what_the_first_evaluation_alone_takes_is_no_part_of_every_epoch():
    probe = Probe.__new__(Probe)
    probe.result, probe.loaders = ProbeResult(loops=[{"epochs": 5, "batches": 6}]), [Scored(durations_s=[3.0, 0.5])]
    probe._since_s = time.monotonic() - 3.5
    probe.epoch_over()
    assert probe.result.warm_up_s == pytest.approx(2.5)
    assert probe.result.evaluation_s == pytest.approx(10 * 0.5, abs=0.2)
