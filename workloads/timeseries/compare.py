"""The three networks side by side, from what their stages left in the run's output folder: comparison.json."""

from __future__ import annotations

import json

from orchestrator.errors import KgorchError
from orchestrator.worker import attach
from workloads import cli
from workloads.timeseries.model import MODELS


def main() -> None:
    """Write comparison.json: the networks' accuracy on the last part of the time, the best first."""
    with attach() as session:
        found = []
        for name in MODELS:
            path = session.output / f"{name}.json"
            if not path.exists():
                raise KgorchError(
                    f"there is no {path.name} in {path.parent}", next_step=f"train it first: --model {name}"
                )
            found.append(json.loads(path.read_text()))
        found.sort(key=lambda item: -item["test_accuracy"])
        (session.output / "comparison.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    cli.run(main)
