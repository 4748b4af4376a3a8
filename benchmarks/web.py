"""How fast the page of kgorch web is.   python benchmarks/web.py [--quick] [--json FILE] [--docs]

Over 200 runs, 1,000 sessions of one of them, and 10⁷ samples:

- the first paint of each page in a real Chromium (target ≤ 1 s), the caches of the server empty for the list of runs
- an update: from a commit of a supervisor until the changed parts are made (target ≤ 100 ms; a stream looks once a second)
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "tests"), str(HERE.parent / "tests/web")]

import page  # noqa: E402
import scale  # noqa: E402
import test_browser  # noqa: E402

from kgorch.db import sessions  # noqa: E402
from kgorch.db.engine import open_database  # noqa: E402
from kgorch.platforms.detect import detect  # noqa: E402
from kgorch.web import fragments, texts  # noqa: E402
from kgorch.web.state import WebState  # noqa: E402

RUNS, SESSIONS, SAMPLES = 200, 1000, 10**7
PAGES = {
    "the list of runs": "/",
    "a run of 1,000 sessions": "/runs/mine/1",
    "its metrics": "/runs/mine/1/metrics",
    "its telemetry": "/runs/mine/1/system",
}
PAINT = "return performance.getEntriesByName('first-contentful-paint')[0]?.startTime"


def row(name: str, group: str, values_ms: list[float]) -> dict[str, Any]:
    return {
        "name": f"kgorch web: {name}",
        "group": group,
        "value": round(statistics.median(values_ms), 1),
        "unit": "ms",
        "better": "lower",
        "spread": [round(min(values_ms), 1), round(max(values_ms), 1)],
    }


def paints(home: Path, rounds: int) -> list[dict[str, Any]]:
    """Each round has a server and a browser of its own, so nothing is cached in either."""
    found: dict[str, list[float]] = {name: [] for name in PAGES}
    for _ in range(rounds):
        with test_browser.serving(home, dict(os.environ)) as url, test_browser.chromium() as driver:
            driver.get(url.split("?")[0])  # the browser has started, and has loaded nothing of the page but its style
            driver.get(url)
            for name, path in PAGES.items():
                driver.get(url.split("/login")[0] + path)
                found[name].append(float(test_browser.wait_until(lambda: driver.execute_script(PAINT))))
    return [row(name, "first paint", values) for name, values in found.items()]


def updates(home: Path, rounds: int) -> list[dict[str, Any]]:
    state = WebState(open_database(home), home, detect())
    parts = fragments.Parts(state, texts.templates())
    while not parts.runs()["complete"]:
        pass
    last = sessions.last(state.engine, "mine")
    assert last is not None

    def measured(make: Callable[[], object]) -> list[float]:
        times = []
        for number in range(rounds + 1):
            sessions.update_session(state.engine, last.id, step=20_000 + number)
            for key in [key for key in state._kept if key == "runs" or (isinstance(key, tuple) and key[0] == "run")]:
                del state._kept[key]  # a second later: quota, machine and advice are looked at less often
            began = time.perf_counter()
            make()
            times.append(1000 * (time.perf_counter() - began))
        return times[1:]

    return [
        row("the list of runs", "update", measured(parts.runs)),
        row("the head of a run", "update", measured(lambda: parts.of_run("mine", 1, "metrics"))),
        row("the overview of a run", "update", measured(lambda: parts.of_run("mine", 1, "overview"))),
    ]


def measure(*, quick: bool) -> dict[str, Any]:
    rounds, samples = (2, 10**5) if quick else (5, SAMPLES)
    with tempfile.TemporaryDirectory(prefix="kgorch-web-") as place:
        home = Path(place) / "home"
        home.mkdir(mode=0o700)
        engine = open_database(home)
        scale.fill(engine, others=RUNS - 1, past=SESSIONS)
        scale.fill_samples(engine, samples, SAMPLES // SESSIONS + 1)
        engine.dispose()
        rows = [*paints(home, rounds), *updates(home, 3 * rounds)]
    return page.results(
        "web",
        rows,
        packages=("starlette", "uvicorn"),
        title=f"The page over {RUNS} runs, {SESSIONS} sessions, {samples:,} samples",
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="10⁵ samples, two rounds")
    page.add_options(parser)
    options = parser.parse_args()
    page.run(options, lambda: measure(quick=options.quick))
    return 0


if __name__ == "__main__":
    sys.exit(main())
