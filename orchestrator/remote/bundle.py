"""A bundle: all that a session at a place needs, as a folder of plain files that is named by its contents.

Files are called `f0001` and so on, without a suffix: Kaggle unpacks archives that it knows by theirs, and takes no folders. The
marker file has their paths and hashes, and the session's program restores them (session/inputs.py).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import kgorch
from kgorch.errors import KgorchError
from kgorch.plan import Plan
from kgorch.remote import wheels
from kgorch.remote.code_files import CodeFile, CodeFiles, LeftOut, collect
from kgorch.remote.session.common import MARKER_NAME

PLAN_NAME = "kgorch-plan.toml"
MAX_KEPT, UNUSED_S = 3, 86400.0
"""Bundles that are kept at any rate, and seconds after which others go: an upload may go on, and runs share the folder."""


@dataclass(frozen=True, slots=True)
class BundleSource:
    """What a bundle is made of.

    Attributes:
        plan: as `plan_text` and `overrides` say.
        overrides: `KEY=VALUE` of --set.
        workdir: the plan's folder.
        pythons: versions of Python for which kgorch's dependencies are taken along; empty where the place has them.
    """

    plan: Plan
    plan_text: str
    overrides: Sequence[str]
    workdir: Path
    pythons: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Bundle:
    """A bundle on this disk.

    Attributes:
        name: `kgorch-` and the first 40 hexadecimal digits of the digest; a place stores it under this name.
        digest: SHA-256 of the marker without it.
        bytes: of all files.
        files: paths that the session restores, wheels included.
        left_out: what of the plan's folder stays here.
    """

    name: str
    digest: str
    folder: Path
    bytes: int
    files: tuple[str, ...]
    left_out: tuple[LeftOut, ...]


@dataclass(frozen=True, slots=True)
class BundleFile:
    """An entry of the marker. Attributes: stored: name in the bundle; path: in the session's folder."""

    stored: str
    path: str
    bytes: int
    sha256: str
    executable: bool


def preview(source: BundleSource) -> CodeFiles:
    """What of the plan's folder would be taken along; nothing is written.

    Raises: KgorchError where a place could not run it.
    """
    _check_plan(source.plan)
    own = os.environ.get("KGORCH_HOME")
    found = collect(source.workdir, [Path(own)] if own else [])
    _check_entries(source, found)
    return found


def build(source: BundleSource, into: Path) -> Bundle:
    """Make the bundle in a folder below `into`, unless it is there. Wheels are cached in `into`, too.

    Raises: wheels.DownloadFailed; KgorchError for what will not be otherwise the next time; OSError.
    """
    code = preview(source)
    into.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix="partial-", dir=into))  # of our own: runs share `into`
    try:
        return _build(source, code, partial, into)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _build(source: BundleSource, code: CodeFiles, partial: Path, into: Path) -> Bundle:
    (partial / "wheels").mkdir()
    paths = [wheels.own_wheel(partial / "wheels")]
    if source.pythons:
        paths += wheels.dependency_wheels(into / "wheels", source.pythons)
    (partial / PLAN_NAME).write_text(source.plan_text, encoding="utf-8")
    inputs = [(path, CodeFile(f"wheels/{path.name}", 0, False)) for path in paths]
    inputs += [(source.workdir / file.path, _below("code", file)) for file in code.files if file.path != PLAN_NAME]
    inputs.append((partial / PLAN_NAME, CodeFile(f"code/{PLAN_NAME}", 0, False)))
    files = [_store(path, partial / f"f{number:04}", file) for number, (path, file) in enumerate(inputs, 1)]
    content = {
        "format": 1,
        "kgorch": kgorch.__version__,
        "plan": PLAN_NAME,
        "overrides": list(source.overrides),
        "files": [asdict(file) for file in files],
    }
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    (partial / MARKER_NAME).write_text(json.dumps({**content, "digest": digest}, indent=1, sort_keys=True) + "\n")
    shutil.rmtree(partial / "wheels")
    (partial / PLAN_NAME).unlink()
    name = f"kgorch-{digest[:40]}"
    _rename(partial, into / name)
    total = sum(file.bytes for file in files)
    return Bundle(name, digest, into / name, total, tuple(file.path for file in files), code.left_out)


def _below(folder: str, file: CodeFile) -> CodeFile:
    return CodeFile(f"{folder}/{file.path}", file.bytes, file.executable)


def _store(source: Path, target: Path, file: CodeFile) -> BundleFile:
    """Copy and hash at once: a file that is edited meanwhile is hashed as it was copied."""
    digest, size = hashlib.sha256(), 0
    with open(source, "rb") as original, open(target, "xb") as copy:
        while chunk := original.read(1 << 20):
            digest.update(chunk)
            copy.write(chunk)
            size += len(chunk)
    return BundleFile(target.name, file.path, size, digest.hexdigest(), file.executable)


def _rename(partial: Path, folder: Path) -> None:
    """Give the bundle its name; one of that name has the same contents, since its marker is written last."""
    with contextlib.suppress(OSError):  # it is there
        partial.rename(folder)
    os.utime(folder)
    bundles = sorted(folder.parent.glob("kgorch-*"), key=lambda path: path.stat().st_mtime)
    for old in bundles[:-MAX_KEPT]:
        if time.time() - old.stat().st_mtime > UNUSED_S:
            shutil.rmtree(old, ignore_errors=True)


def _check_plan(plan: Plan) -> None:
    """Raises: KgorchError for what only this machine has."""
    if plan.checkpoint.dir:
        raise KgorchError(
            f"checkpoint.dir = {plan.checkpoint.dir!r}: a place keeps a session's output alone, and kgorch's state folder is in it",
            next_step="remove checkpoint.dir from the plan",
        )


def _check_entries(source: BundleSource, code: CodeFiles) -> None:
    """Raises: KgorchError for a script that would be missing in the session."""
    taken, reasons = {file.path for file in code.files}, {item.path: item.reason for item in code.left_out}
    for stage in source.plan.stage:
        if not stage.entry.endswith(".py"):
            continue
        path = os.path.normpath(stage.entry)
        if path not in taken:
            why = next((reason for left, reason in reasons.items() if path == left or path.startswith(left)), "")
            fact = f"it is left out: {why}" if why else f"it is not below the plan's folder {source.workdir}"
            raise KgorchError(
                f"the script of stage {stage.name!r}, {stage.entry}, would not be in the bundle",
                fact,
                next_step="put the script into the plan's folder, and out of what its .gitignore names",
            )
