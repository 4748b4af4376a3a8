"""A script that has a value computed once, and writes down who did it."""

import argparse
import functools
import time
from pathlib import Path

import no_compiler  # noqa: F401

from kgorch import attach


def main(keys: list[str], sleep: float, fails: bool) -> None:
    with attach() as session:

        def compute(key: str) -> dict[str, object]:
            with (session.output / "computed").open("a") as file:
                file.write(f"{session.rank} {key}\n")
            for number in range(5):
                time.sleep(sleep)
                session.progress("headers", number + 1, 5)
            if fails:
                raise RuntimeError("the list is gone")
            return {"sizes": [(256, 256)] * 3, "key": key}

        for key in keys:
            found = session.cached("headers", functools.partial(compute, key), key={"list": key})
            print(f"found {found}", flush=True)
        while Path("hold").exists():
            time.sleep(0.05)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--keys", type=lambda text: text.split("_"), required=True)
    parser.add_argument("--sleep", type=float, default=0.0)
    parser.add_argument("--fails", action="store_true")
    options = parser.parse_args()
    main(options.keys, options.sleep, options.fails)
