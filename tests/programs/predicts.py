"""A stage that writes down which weights another one has left it, and which stage of the run was the first to ask for a value."""

import argparse
import json
import time
from pathlib import Path

import no_compiler  # noqa: F401
import torch

from kgorch import attach


def main(hold: str, out: str) -> None:
    with attach() as session:
        while hold and Path(hold).exists():
            time.sleep(0.05)
        found, last = session.weights("train"), session.weights("train", which="final")
        print(f"weights: {found.label}")
        norm, last_norm = (
            float(torch.cat([weight.double().flatten() for weight in weights.values()]).norm())
            for weights in (found, last)
        )
        first = session.cached("first", lambda: out, key="the same")
        made = {"weights": found.facts, "norm": norm, "last_norm": last_norm, "first": first}
        (session.output / out).write_text(json.dumps(made))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--hold", default="")
    parser.add_argument("--out", required=True)
    options = parser.parse_args()
    main(options.hold, options.out)
