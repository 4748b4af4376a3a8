"""Install kgorch from the bundle beside the packages of the place's image."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Callable

from kgorch.remote.session.common import Ended


def install(work: Path, run: Callable[..., int]) -> tuple[str, str]:
    """Install kgorch without touching the image: its own packages stay, and what they lack or have too old lies beside them.

    Returns: the interpreter, and the folder that must come first in its search path. Raises: Ended.
    """
    faults = []
    for way in (install_environment, install_target):
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(work / "env")
        try:
            python, folder = way(work, run)
            if run([python, "-m", "kgorch.cli", "version"], environment(folder)) == 0:
                return python, folder
            faults.append(f"{way.__name__}: kgorch does not start")
        except (OSError, ImportError, subprocess.SubprocessError) as error:
            faults.append(f"{way.__name__}: {error}")
    raise Ended("error", f"kgorch could not be installed on Python {sys.version.split()[0]}: {'; '.join(faults)}")


def install_environment(work: Path, run: Callable[..., int]) -> tuple[str, str]:
    """A virtual environment that sees the image's packages: pip adds only what those do not satisfy."""
    import venv

    # without ensurepip, which Debian's and Colab's Python lack; the image's pip installs into it
    venv.EnvBuilder(symlinks=True, with_pip=False).create(work / "env")
    python, folder = work / "env" / "bin" / "python", sorted((work / "env" / "lib").glob("python*/site-packages"))[0]
    # system_site_packages would lead to the base interpreter's, which is another where this one is a virtual environment itself
    paths = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (folder / "zz-image.pth").write_text("".join(f"import site; site.addsitedir({path!r})\n" for path in paths))
    pip = [sys.executable, "-m", "pip", "--python", str(python)]
    own = [str(path) for path in (work / "wheels").glob("kgorch-*.whl")]
    for words in (["--no-deps", "--ignore-installed", *own], ["kgorch"]):
        if run([*pip, *pip_install(work), *words], environment("")):
            raise OSError("pip failed")
    return str(python), str(folder)


def install_target(work: Path, run: Callable[..., int]) -> tuple[str, str]:
    """All wheels of the bundle in a folder before the image's: for a Python without `venv`, or with a pip from before 22.3."""
    names = sorted({path.name.split("-")[0] for path in (work / "wheels").glob("*.whl")})
    words = ["--no-deps", "--target", str(work / "env"), *names]
    if run([sys.executable, "-m", "pip", *pip_install(work), *words], environment("")):
        raise OSError("pip failed")
    return sys.executable, str(work / "env")


def pip_install(work: Path) -> list[str]:
    """`--isolated`: neither variables nor a configuration of the image lead pip elsewhere."""
    options = ["--isolated", "--disable-pip-version-check", "--no-input", "--quiet", "--no-compile", "--no-index"]
    return ["install", *options, "--find-links", str(work / "wheels")]


def environment(first: str) -> dict[str, str]:
    """Variables of a child; with `first` at the head of its search path, without it the search path of the image alone."""
    others = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    path = [first, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {**others, "PYTHONPATH": os.pathsep.join(path), "PYTHONUNBUFFERED": "1"} if first else others
