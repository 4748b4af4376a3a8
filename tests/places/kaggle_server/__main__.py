"""The stand-in by hand: `python -m places.kaggle_server FOLDER` prints what to export, then each request."""

from __future__ import annotations

import argparse
import shlex
import time
from pathlib import Path

from places.kaggle_server import KaggleServer, Rules


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--queue", type=float, default=1.0, help="seconds from push to start")
    parser.add_argument("--slots", type=int, default=2)
    options = parser.parse_args()
    with KaggleServer(options.folder, rules=Rules(queue_s=options.queue, slots=options.slots)) as server:
        for name, value in server.environment(options.folder / "home").items():
            if name not in ("PATH", "PYTHONPATH", "HOME"):
                print(f"export {name}={shlex.quote(value)}")
        print(f"# its account is {server.username}; end it with Ctrl-C", flush=True)
        shown = 0
        try:
            while True:
                for request in server.requests[shown:]:
                    shown += 1
                    print(
                        f"# {request.method} {request.body.get('kernelSlug') or request.body.get('slug') or ''}",
                        flush=True,
                    )
                time.sleep(0.2)
        except KeyboardInterrupt:
            pass


if __name__ == "__main__":
    main()
