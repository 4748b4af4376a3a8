"""A script that reports ever new names: it trains, saves and finishes, and a person is told."""

from __future__ import annotations

from kgorch.checkpoint.verify import verify_checkpoint
from kgorch.protocol.messages import MAX_METRICS


def test_a_training_that_reports_25_000_names_saves_and_finishes(kgorch):
    supervisor = kgorch.background("start", str(kgorch.plan("many_names.py", every="1s")))
    assert supervisor.wait(timeout=120) == 0, supervisor.communicate()[0]
    final = kgorch.checkpoints()[-1]
    metrics = verify_checkpoint(final).metrics
    assert final.name == "step-00000050-final" and len(metrics) == MAX_METRICS
    assert metrics["huge"] == float("inf") and metrics["�[2Jtitle"] == 1.0
    found = kgorch.status()
    assert found["state"] == "finished" and found["step"] == 50 and len(found["metrics"]) == MAX_METRICS
    [notice] = [text for text in found["notices"] if "metrics" in text]
    assert notice.startswith("metrics are not all kept: a loss of the layer") and "more than 1000 names" in notice
    assert len(kgorch.events("metrics_dropped")) == 1
    assert len(kgorch.events("attached")) == 1, "the rank was cut off and came again"
