"""Wheels for a place's machine: kgorch's own, made of the code that runs here, and those of its dependencies.

    python -m kgorch.remote.wheels FOLDER      writes them into a folder, for a data set that notebooks install from

pip builds a wheel from sources alone, which an installation does not have, and takes an editable checkout's `build/` folder with
what was deleted since. So kgorch's own wheel is written here: a zip archive of the package as it is imported now.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from importlib import metadata
from pathlib import Path

import kgorch
from kgorch.errors import KgorchError

PYTHONS = ("3.11", "3.12", "3.13")
"""Versions that a place's image may have: kgorch's oldest, and the newest for which all dependencies have wheels."""

PLATFORMS = ("manylinux2014_x86_64", "manylinux_2_17_x86_64", "manylinux_2_28_x86_64")
IN_IMAGE = ("numpy",)
"""Never shipped: it must fit the image's PyTorch and what else is built against it."""

SUFFIXES = (".py", ".toml", ".md", ".sql", ".mako", ".service", ".conf", ".html", ".css", ".js", ".svg")
"""Of the package's files (pyproject.toml, package-data): what lies in a checkout beside them stays there."""

EPOCH = (1980, 1, 1, 0, 0, 0)
DOWNLOAD_S = 600


class DownloadFailed(KgorchError):
    """pip could not fetch wheels: no definite no, for an index that cannot be reached now may be reached later."""


def own_wheel(into: Path) -> Path:
    """Write kgorch's wheel into a folder; the same code gives the same bytes. Raises: KgorchError."""
    name = f"kgorch-{kgorch.__version__}"
    info = f"{name}.dist-info"
    files = {f"kgorch/{path.as_posix()}": content for path, content in _package_files()}
    files[f"{info}/METADATA"] = _metadata()
    files[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: kgorch\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files[f"{info}/entry_points.txt"] = b"[console_scripts]\nkgorch = kgorch.cli:main\n"
    rows = [f"{path},sha256={_record_digest(content)},{len(content)}" for path, content in sorted(files.items())]
    files[f"{info}/RECORD"] = "\n".join([*rows, f"{info}/RECORD,,", ""]).encode()
    wheel = into / f"{name}-py3-none-any.whl"
    # stored, not compressed: two versions of zlib compress alike in size, not in bytes
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_STORED) as archive:
        for path, content in sorted(files.items()):
            entry = zipfile.ZipInfo(path, EPOCH)
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, content)
    return wheel


def _package_files() -> list[tuple[Path, bytes]]:
    """Paths relative to the package. In a checkout `db` and `workloads` are links to folders beside it."""
    package = Path(kgorch.__file__).parent
    found = []
    for folder, folders, names in os.walk(package, followlinks=True):
        folders[:] = [name for name in folders if name.isidentifier() and name != "__pycache__"]
        found += [
            Path(folder, name) for name in names if Path(name).suffix in SUFFIXES or name in ("py.typed", "LICENSE")
        ]
    return [(path.relative_to(package), path.read_bytes()) for path in found]


def _metadata() -> bytes:
    try:
        found = metadata.distribution("kgorch")
        text = found.read_text("METADATA") or found.read_text("PKG-INFO") or ""  # the latter in a checkout
    except metadata.PackageNotFoundError:
        raise KgorchError(
            "kgorch is not installed here", next_step="pip install . (or --editable .)", error_code="KG903"
        ) from None
    return (text.partition("\n\n")[0] + "\n").encode()


def _record_digest(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")


def dependency_wheels(cache: Path, pythons: tuple[str, ...] = PYTHONS) -> list[Path]:
    """Wheels of kgorch's dependencies, and of theirs, for Linux on x86-64; downloaded once for a set of requirements.

    Args:
        cache: folder that outlives this call.
    Raises: DownloadFailed.
    """
    needs = [text for text in metadata.requires("kgorch") or [] if "extra ==" not in text and not _is_in_image(text)]
    # The versions that run here, so that the same kgorch always takes the same ones along, and none that was never tried. Not its
    # own, which is found once more where a checkout is in sys.path.
    found = {(item.name, item.version) for item in metadata.distributions() if item.name != "kgorch"}
    pins = sorted(f"{name}=={version}" for name, version in found if _is_plain(version))
    text = "\n".join([*needs, *pins, *pythons, *PLATFORMS])
    folder = cache / hashlib.sha256(text.encode()).hexdigest()[:16]
    if not folder.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="partial-", dir=cache) as name:
            made, constraints = Path(name, "wheels"), Path(name, "constraints.txt")
            made.mkdir()
            constraints.write_text("\n".join(pins))
            for python in pythons:
                _download(made, python, needs, constraints)
            with contextlib.suppress(OSError):  # another run's build was faster
                made.rename(folder)
    return sorted(folder.glob("*.whl"))


def _is_in_image(requirement: str) -> bool:
    return any(requirement.startswith(name) and not requirement[len(name)].isalnum() for name in IN_IMAGE)


def _is_plain(version: str) -> bool:
    """Whether an index can have it: "2.9.0+cpu" is a build of somebody's own."""
    return "+" not in version


def _download(into: Path, python: str, requirements: list[str], constraints: Path) -> None:
    tag = "cp" + python.replace(".", "")
    words = ["--dest", str(into), "--only-binary=:all:", "--implementation", "cp", "--python-version", python]
    words += [word for abi in (tag, "abi3", "none") for word in ("--abi", abi)]
    words += [word for platform in PLATFORMS for word in ("--platform", platform)]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input", *words]
    faults = ""
    # a version that is installed here may have no wheel for another Python
    for pinned in (["--constraint", str(constraints)], []):
        try:
            done = subprocess.run(
                [*command, *pinned, *requirements], capture_output=True, text=True, timeout=DOWNLOAD_S
            )
        except subprocess.TimeoutExpired:
            faults = f"not within {DOWNLOAD_S} s"
            continue
        if done.returncode == 0:
            return
        faults = done.stderr.strip()
    raise DownloadFailed(
        f"the wheels of kgorch's dependencies for Python {python} cannot be downloaded",
        *faults.splitlines()[-4:],
        next_step="see that pip works here (python -m pip --version) and reaches its index, then start again",
    )


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as cache:
        for wheel in dependency_wheels(Path(cache)):
            shutil.copy(wheel, folder)
    own_wheel(folder)
    print(f"{len(list(folder.glob('*.whl')))} wheels in {folder}, for Python {', '.join(PYTHONS)} on Linux (x86-64)")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "wheels"))
