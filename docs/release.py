"""Walks the release checklist and stops at the first step that fails. It publishes nothing.

    python docs/release.py [--skip-tests]

Leaves wheel, sdist, man pages, an SBOM (CycloneDX) and SHA-256 sums in build/release, and prints what is left to type.
Needs `kgorch[release]`, an index for pip, and a clean checkout.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import man

from kgorch import __version__

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "build" / "release"
MAX_BYTES = 2_000_000
"""Of wheel and sdist, each."""


def run(*command: str | Path, cwd: Path = ROOT, **env: str) -> str:
    """Raises: SystemExit with the output where the command fails."""
    done = subprocess.run([*map(str, command)], cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}: exit status {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def demand(condition: object, otherwise: str) -> None:
    if not condition:
        raise SystemExit(otherwise)


def is_clean() -> None:
    changed = run("git", "status", "--porcelain")
    demand(not changed, f"the checkout has changes:\n{changed}")


def is_new_version() -> None:
    tag = f"v{__version__}"
    demand(not run("git", "tag", "--list", tag), f"{tag} exists: raise __version__ in orchestrator/__init__.py")
    heading = re.search(rf"^## {re.escape(__version__)} *(.*)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    demand(heading, f"CHANGELOG.md has no section {__version__}")
    demand(heading and "unreleased" not in heading[1], f"CHANGELOG.md: {__version__} is unreleased: write the date")


def is_checked() -> None:
    for words in (("ruff", "format", "--check", "."), ("ruff", "check", "."), ("mypy",)):
        run(sys.executable, "-m", *words)


def is_tested() -> None:
    run("make", "test")


def are_built() -> None:
    shutil.rmtree(OUT, ignore_errors=True)
    again = OUT / "again"
    epoch = run("git", "log", "-1", "--format=%ct").strip()
    for folder in (OUT, again):
        run(sys.executable, "-m", "build", "--outdir", folder, ".", SOURCE_DATE_EPOCH=epoch)
    for path in OUT.glob("kgorch-*"):
        demand(path.stat().st_size < MAX_BYTES, f"{path.name} has {path.stat().st_size:,} bytes")
    [wheel] = OUT.glob("*.whl")
    demand(wheel.read_bytes() == (again / wheel.name).read_bytes(), "two builds of the wheel differ")
    shutil.rmtree(again)


def is_installable() -> None:
    """The wheel with its own requirements, in a clean environment; from there comes the SBOM."""
    env = OUT / "environment"
    run(sys.executable, "-m", "venv", env)
    [wheel] = OUT.glob("*.whl")
    run(env / "bin" / "pip", "install", "--quiet", wheel)
    demand(__version__ in run(env / "bin" / "kgorch", "version", cwd=OUT), "the installed kgorch has another version")
    run(sys.executable, "-m", "cyclonedx_py", "environment", env, "--output-file", OUT / "kgorch.cdx.json")
    shutil.rmtree(env)


def are_documented() -> None:
    run("make", "site")
    pages = man.write(OUT / "man")
    shutil.make_archive(str(OUT / f"kgorch-{__version__}-man"), "gztar", OUT, pages[0].parent.name)
    shutil.rmtree(OUT / "man")


def are_summed() -> None:
    files = sorted(path for path in OUT.iterdir() if path.name != "SHA256SUMS")
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files]
    (OUT / "SHA256SUMS").write_text("".join(lines))


STEPS: dict[str, Callable[[], None]] = {
    "the checkout is clean": is_clean,
    "the version is new, and in the changelog": is_new_version,
    "format, lint, types": is_checked,
    "the tests pass": is_tested,
    "wheel and sdist are built, twice the same, within the budget": are_built,
    "the wheel installs into a clean environment; SBOM": is_installable,
    "site and man pages": are_documented,
    "checksums": are_summed,
}
LEFT = """left to type:
  git tag -s v{version} && git push origin v{version}
  python -m twine upload build/release/kgorch-{version}*.whl build/release/kgorch-{version}.tar.gz
  attach build/release/* to the release, with the section of CHANGELOG.md as its text
by hand, once a release: make soak; make storm MINUTES=60; make gpu where there is a GPU;
  the README from top to bottom on a new machine"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--skip-tests", action="store_true", help="they ran on this commit already")
    options = parser.parse_args()
    for number, (what, step) in enumerate(STEPS.items(), 1):
        if step is is_tested and options.skip_tests:
            print(f"{number}/{len(STEPS)}  skipped: {what}", flush=True)
            continue
        step()
        print(f"{number}/{len(STEPS)}  {what}", flush=True)
    print(LEFT.format(version=__version__))


if __name__ == "__main__":
    main()
