"""A run that a daemon carries through three sessions at Kaggle, one of which is lost. Real: client, daemon, sessions, training.

    python docs/demo_remote.py [FOLDER] [--foreground]

Meanwhile the answer to a push gets lost, and the daemon is killed and started again. At the end the weights are compared with
those of the same training in one piece. `--foreground`: `kgorch remote start --foreground` in the daemon's place.
Kaggle's server is played by the stand-in of the tests (tests/places/kaggle_server), which executes what is pushed, as root in
namespaces. `make demo-remote` installs what it needs and runs it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from places.kaggle_server import Fault, KaggleServer, Rules  # noqa: E402

from kgorch.remote import wheels  # noqa: E402

PLAN = """
name = "digits"
[[stage]]
name = "train"
entry = "train.py"
ranks = 2
args = { pause = 0.5 }    # of each step, as if the model were larger
[checkpoint]
every = "3s"
[session]
margin = "3s"
[remote]
on = "kaggle"
accelerator = "none"      # "NvidiaTeslaT4" for two T4; the stand-in has no GPU
session = "50s"           # "11h"
poll = "2s"               # a minute, if not said
"""

TRAIN = """
import sys
import time

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from kgorch import attach

with attach(seed=0) as session:
    x = torch.randn(256, 16, generator=torch.Generator().manual_seed(1))
    data = torch.utils.data.TensorDataset(x, x[:, :1] - x[:, 1:2])
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    session.track(model=model, optimizer=optimizer)
    loader = session.loader(data, 32)
    for epoch in session.epochs(15):
        for batch in session.steps(loader):
            loss = session.backward(batch, lambda part: (model(part[0]) - part[1]).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            session.report(loss=loss)
            time.sleep(float(sys.argv[2]))  # --pause
"""
LIMIT_S = 900
SECRETS = "DB_PASSWORD=hunter2\n"


class Demo:
    """What the demo types and looks at.

    Attributes:
        env: variables in which kgorch finds the stand-in instead of Kaggle.
        carrier: words of the command that drives the run.
    """

    def __init__(self, folder: Path, server: KaggleServer, carrier: list[str]) -> None:
        self.folder, self.work, self.server, self.carrier = folder, folder / "work", server, carrier
        home = {"KGORCH_HOME": str(folder / "state"), "XDG_CONFIG_HOME": str(folder), "COLUMNS": "120"}
        self.env = {**os.environ, **server.environment(folder / "home"), **home}
        self.env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._requests = 0

    def kgorch(self, *words: str, code: int = 0) -> None:
        say(f"kgorch {' '.join(words)}", is_command=True)
        done = subprocess.run([sys.executable, "-m", "kgorch.cli", *words], cwd=self.work, env=self.env)
        if done.returncode != code:
            raise SystemExit(f"expected exit status {code}, got {done.returncode}")

    def carry(self) -> subprocess.Popen[bytes]:
        say(f"kgorch {' '.join(self.carrier)} &", is_command=True)
        with open(self.folder / "daemon.log", "ab") as log:
            words = [sys.executable, "-m", "kgorch.cli", *self.carrier]
            return subprocess.Popen(words, cwd=self.work, env=self.env, stdout=log, stderr=log)

    def status(self) -> dict[str, Any]:
        words = [sys.executable, "-m", "kgorch.cli", "status", "digits", "--json"]
        done = subprocess.run(words, cwd=self.work, env=self.env, capture_output=True, text=True)
        return json.loads(done.stdout) if done.returncode == 0 else {}

    def show_requests(self) -> None:
        """What the client has asked the server since the last call, but for what is only asked."""
        for request in self.server.requests[self._requests :]:
            if request.method in (
                "CreateDataset",
                "SaveKernel",
                "GetKernel",
                "ListKernelSessionOutput",
                "DeleteKernel",
            ):
                slug = request.body.get("slug") or request.body.get("kernelSlug") or ""
                print(f"{time.strftime('%H:%M:%S')}  server: {request.method} {slug}", flush=True)
        self._requests = len(self.server.requests)

    def wait(self, condition: Any, until: float) -> None:
        while not condition():
            self.show_requests()
            if time.monotonic() > until:
                raise SystemExit(f"not finished within {LIMIT_S} s; the daemon's log is {self.folder / 'daemon.log'}")
            time.sleep(0.5)
        self.show_requests()

    def slugs(self) -> list[str]:
        return [slug for slug, versions in list(self.server.kernels.kernels.items()) if versions]

    def trained(self, slug: str) -> bool:
        """Whether the session has printed an epoch."""
        return any("epoch" in event["data"] for event in self.server.session(slug).log)


def say(text: str, *, is_command: bool = False) -> None:
    print(f"\n\033[1m{'$' if is_command else '#'} {text}\033[0m", flush=True)


def run(demo: Demo, until: float) -> None:
    demo.kgorch("remote", "check", "plan.toml")
    if demo.carrier == ["daemon"]:
        demo.kgorch("remote", "start", "plan.toml")
    say("the answer to the first push will be lost: is there a session, or not?")
    demo.server.order("SaveKernel", Fault("cut", after=True))
    carrier = demo.carry()
    try:
        demo.wait(lambda: len(demo.slugs()) == 1 and demo.trained(demo.slugs()[0]), until)
        say("kill -9 of the process that drives the run; the session goes on, and ends by itself")
        carrier.send_signal(signal.SIGKILL)
        carrier.wait()
        demo.wait(lambda: demo.server.session(demo.slugs()[0]).is_over, until)
        carrier = demo.carry()
        demo.wait(lambda: len(demo.slugs()) == 2 and demo.trained(demo.slugs()[1]), until)
        demo.kgorch("status", "digits")
        say(f"Kaggle cancels the second session, {demo.slugs()[1]}: all that it has done is lost")
        demo.server.cancel(demo.slugs()[1])
        demo.wait(lambda: demo.status().get("state") == "finished" or demo.status().get("phase") == "finished", until)
    finally:
        carrier.terminate()
        carrier.wait()
    for slug in demo.slugs():
        session = demo.server.session(slug)
        say(f"{slug}: {session.status}, pushed {len(demo.server.kernels.kernels[slug])} time")
        lines = "".join(event["data"] for event in session.log).splitlines()
        print(
            textwrap.indent("\n".join(line for line in lines if "kgorch session:" in line or "found" in line), "    ")
        )


def compare(demo: Demo) -> None:
    """Raises: SystemExit where the weights differ from those of the same training in one piece."""
    demo.kgorch("remote", "fetch", "digits")
    demo.kgorch("checkpoints", "export", "digits", "remote.safetensors")
    demo.env["KGORCH_HOME"] = str(demo.folder / "alone")
    say("the same training in one piece, on this machine")
    demo.kgorch("start", "plan.toml", "--set", "stage.train.args.pause=0", "--progress", "none")
    demo.kgorch("checkpoints", "export", "digits", "alone.safetensors")
    files = [(demo.work / f"{name}.safetensors").read_bytes() for name in ("remote", "alone")]
    say("the weights are the same, bit for bit" if files[0] == files[1] else "THE WEIGHTS DIFFER")
    if files[0] != files[1]:
        raise SystemExit(1)


def prepare(folder: Path) -> None:
    """Write the plan and its script, and fetch wheels while there is a network: the stand-in knows no host but Kaggle's."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "work").mkdir(parents=True)
    for name, text in (("plan.toml", PLAN), ("train.py", TRAIN), (".env", SECRETS)):
        (folder / "work" / name).write_text(text.lstrip())
    say("the wheels of kgorch's dependencies, while there is a network")
    print(len(wheels.dependency_wheels(folder / "state" / "places" / "bundles" / "wheels")), "wheels")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, nargs="?", default=Path("demo-remote"))
    parser.add_argument("--foreground", action="store_true")
    options = parser.parse_args()
    folder = options.folder.absolute()
    prepare(folder)
    carrier = ["remote", "start", "plan.toml", "--foreground"] if options.foreground else ["daemon"]
    began = time.monotonic()
    with KaggleServer(folder / "server", rules=Rules(queue_s=1.0)) as server:
        demo = Demo(folder, server, carrier)
        run(demo, began + LIMIT_S)
        compare(demo)
        changes = {name: len(server.asked(name)) for name in ("CreateDataset", "SaveKernel")}
        say(f"{time.monotonic() - began:.0f} s; requests that changed something at Kaggle: {changes}")


if __name__ == "__main__":
    main()
