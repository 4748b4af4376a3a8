"""Every example that a verb's help shows is typed, word for word, in a folder that `kgorch init` has filled."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from answered import verbs
from harness import wait_until

from kgorch.errors import ExitCode

FIRST = ["init", "adopt", "explain", "help", "version", "check", "start"]
LAST = ["queue", "daemon", "systemd", "stop", "save", "rm"]
"""What begins, in its order, and what ends; the others look at the run between them."""

NOT_ZERO = {
    "kgorch checkpoints export my-run model.safetensors --step 400": {2},  # the small training has no such step
    "kgorch checkpoints drop my-run --step 200": {2},  # the same
    "kgorch checkpoints pin my-run --step 400": {2},  # the same
    "kgorch checkpoints unpin my-run --step 400": {2},  # the same
    "kgorch checkpoints verify my-run --replay 20": {0, 2},  # where only the final checkpoint is left
    "kgorch init --from workloads/timeseries mine && kgorch check mine/plan.toml": {0, 2, 20},  # its data are not there
    "kgorch logs my-run -f --rank 1": {0, 2},  # on a CPU there is one rank
    "kgorch notify test plan.toml": {2},  # the plan of init names nobody
    "kgorch quota set --used 12.5h": {2},  # no pool is known
    "kgorch remote fetch my-run": {2},  # it is trained here
    "kgorch rm my-run/1 my-run/2 --yes": {2},  # there is one
    "kgorch save my-run": {2},  # it is finished
    "kgorch systemd install --system --as mira --home /srv/kgorch --dry-run": {0, 2},  # nobody of that name
}


def examples() -> list[tuple[str, str]]:
    """Verb and line of each example, in an order that makes sense."""
    found = []
    for typed, command in verbs():
        for line in re.split(r"\bExample:\n", command.help or "")[1:]:
            for text in line.split("\n\n")[0].splitlines():
                words = text.strip().partition("    ")[0].removeprefix("sudo ").replace("surface-demo", "my-run")
                if words.startswith("kgorch "):
                    found.append((typed[0], words))
    order = {verb: number - len(FIRST) for number, verb in enumerate(FIRST)}
    order |= {verb: number + 1 for number, verb in enumerate(LAST)}
    return sorted(dict.fromkeys(found), key=lambda one: order.get(one[0], 0))


def without_harm(words: str) -> str:
    """This machine's systemd is left alone."""
    if words.startswith("kgorch systemd install"):
        return f"{words} --dry-run"
    return f"{words} --into units" if words.startswith("kgorch systemd uninstall") else words


@pytest.mark.timeout(900)
def test_every_example_of_the_help_does_what_the_help_says(kgorch, tmp_path):
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    (bin_folder / "kgorch").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m kgorch.cli "$@"\n')
    (bin_folder / "kgorch").chmod(0o755)
    env = kgorch.env() | {"KGORCH_TESTS_COMPILER": "1"}
    env["PATH"] = f"{bin_folder}:{Path(sys.executable).parent}:{env['PATH']}"
    typed = examples()
    assert len(typed) > 25 and typed[0] == ("init", "kgorch init && kgorch start plan.toml")
    seen = []
    for verb, line in typed:
        words = without_harm(line)
        if line.startswith("kgorch daemon --"):  # it lives until it is told to stop
            kgorch.background(*line.split()[1:])
            wait_until(lambda: '"pid"' in kgorch("daemon", "status", "--json").stdout)
            continue
        if line.startswith("kgorch web"):
            page = kgorch.background(*line.split()[1:])
            assert "the page is at http://127.0.0.1:" in wait_until(page.stdout.readline)
            page.terminate()
            assert page.wait(timeout=60) == 0
            continue
        done = subprocess.run(
            ["bash", "-o", "pipefail", "-c", words], cwd=kgorch.folder, env=env, capture_output=True, text=True,
            stdin=subprocess.DEVNULL, timeout=300,
        )  # fmt: skip
        told = f"{verb}: {words}\nexit {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        assert "Traceback" not in done.stderr, told
        known = words in NOT_ZERO or f"kgorch {verb}" in words
        assert known and done.returncode in NOT_ZERO.get(words, {int(ExitCode.DONE)}), told
        seen.append(words)
    assert {words for words in NOT_ZERO if "systemd" not in words} <= set(seen), "an example has gone from the help"
