"""The files of a plan's folder that go with a run to another place: what git would take, without state, links and credentials."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pathspec import GitIgnoreSpec

from kgorch.errors import KgorchError
from kgorch.remote.session.common import MARKER_NAME, RECORD_NAME

MAX_FILES, MAX_BYTES = 900, 200 << 20
"""Kaggle refused data sets of more than 1000 files (users' reports); a bundle is uploaded anew after each change of the code."""

MAX_LEVELS = 32
PEEK_BYTES = 4096
"""Of a file's head, in which credentials are looked for."""

_NEVER = """
    .git/ .hg/ .svn/ __pycache__/ *.pyc .ipynb_checkpoints/ node_modules/ *.egg-info/ .DS_Store
    .pytest_cache/ .mypy_cache/ .ruff_cache/ .hypothesis/
"""
NEVER = GitIgnoreSpec.from_lines(_NEVER.split())
"""What no training reads, whether or not a `.gitignore` names it."""

_CREDENTIALS = """
    .env .env.* *.env .envrc kaggle.json access_token access_token.* credentials credentials.* client_secret*.json
    service[-_]account*.json application_default_credentials.json id_rsa* id_dsa* id_ecdsa* id_ed25519* *.pem *.key *.p12 *.pfx
    *.kdbx *.ppk .netrc _netrc .pypirc .npmrc .pgpass .git-credentials .htpasswd .dockercfg .s3cfg .boto
    secrets secrets.* secret.* *.token
    .aws/ .ssh/ .gnupg/ .kaggle/ .docker/ .kube/ .azure/ gcloud/
"""
CREDENTIALS = GitIgnoreSpec.from_lines(_CREDENTIALS.split())
"""Names of files in which programs keep passwords, keys and tokens; compared in lower case."""

SECRET = re.compile(
    rb"-----BEGIN [A-Z ]*PRIVATE KEY-----"
    rb"|\bKGAT_[0-9A-Za-z]{16,}"
    rb'|^\s*\{\s*"username"\s*:\s*"[^"]+"\s*,\s*"key"\s*:\s*"[0-9a-f]{32}"'
    rb"|\b(ghp|gho|ghs|github_pat|hf|glpat)[_-][0-9A-Za-z_]{20,}|\bAKIA[0-9A-Z]{16}\b"
)
"""Keys and tokens that their issuers made recognizable."""

_Specs = Sequence[tuple[str, GitIgnoreSpec]]
"""Each `.gitignore` with its folder, the nearest last."""


@dataclass(frozen=True, slots=True)
class CodeFile:
    """A file that goes along. `path` is relative to the folder, with slashes."""

    path: str
    bytes: int
    executable: bool


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A file or folder that stays here, and why, for a person."""

    path: str
    reason: str


@dataclass(frozen=True, slots=True)
class CodeFiles:
    """Both in the order of their paths."""

    files: tuple[CodeFile, ...]
    left_out: tuple[LeftOut, ...]

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)


def collect(folder: Path, skip: Sequence[Path] = ()) -> CodeFiles:
    """The files below a folder.

    Args:
        skip: folders with state of kgorch.
    Raises: KgorchError where they are too many or too large.
    """
    root, files, left_out = folder.resolve(), list[CodeFile](), list[LeftOut]()
    places = {path.resolve() for path in skip}
    for found in _walk(root, "", _specs_above(root), places):
        if isinstance(found, LeftOut):
            left_out.append(found)
        else:
            files.append(found)
        if len(files) > MAX_FILES:
            raise _too_large(folder, f"has more than {MAX_FILES} files", files)
    if sum(file.bytes for file in files) > MAX_BYTES:
        raise _too_large(folder, f"has more than {MAX_BYTES >> 20} MiB", files)
    return CodeFiles(tuple(files), tuple(left_out))


def _too_large(folder: Path, what: str, files: Sequence[CodeFile]) -> KgorchError:
    largest = sorted(files, key=lambda file: -file.bytes)[:5]
    return KgorchError(
        f"the plan's folder {folder} {what}: it would be uploaded after each change",
        *(f"{file.path}: {file.bytes / 1e6:.1f} MB" for file in largest),
        next_step="put what the training does not read, or reads as a data set of the place, into a .gitignore of that folder",
    )


def _specs_above(root: Path) -> _Specs:
    """The `.gitignore` files that hold for `root`: from its repository's top on, as git does. Outside of a repository none.

    One that leaves out `root` itself does not hold: whoever starts a plan that lies there wants it.
    """
    top = next((path for path in (root, *root.parents) if (path / ".git").exists()), root)
    above = [path for path in reversed(root.parents) if path == top or top in path.parents]
    specs = [(f"{path}/", spec) for path in above if (spec := _spec(path))]
    return [item for item in specs if not _is_ignored(f"{root}/", [item])]


def _spec(folder: Path) -> GitIgnoreSpec | None:
    try:
        return GitIgnoreSpec.from_lines((folder / ".gitignore").read_text(errors="replace").splitlines())
    except OSError:
        return None


def _walk(root: Path, at: str, specs: _Specs, skip: set[Path], level: int = 0) -> Iterator[CodeFile | LeftOut]:
    """Everything below `at`, a path relative to `root`; a folder that is left out is named once."""
    if spec := _spec(root / at):
        specs = [*specs, (f"{root / at}/", spec)]
    for entry in sorted(os.scandir(root / at), key=lambda entry: entry.name):
        path, is_folder = f"{at}/{entry.name}".lstrip("/"), entry.is_dir(follow_symlinks=False)
        if is_folder and not NEVER.match_file(f"{entry.name}/"):
            reason = _reason_folder(Path(entry.path), specs, skip, level)
            if reason:
                yield LeftOut(f"{path}/", reason)
            else:
                yield from _walk(root, path, specs, skip, level + 1)
        elif not is_folder and not NEVER.match_file(entry.name):
            status = entry.stat(follow_symlinks=False)
            reason = _reason_file(Path(entry.path), path, specs, status)
            yield (
                LeftOut(path, reason) if reason else CodeFile(path, status.st_size, bool(status.st_mode & stat.S_IXUSR))
            )


def _reason_folder(folder: Path, specs: _Specs, skip: set[Path], level: int) -> str:
    """Why a folder is left out; empty if it is not."""
    if CREDENTIALS.match_file(f"{folder.name.lower()}/"):
        return "its name is that of a folder with credentials"
    if folder.resolve() in skip or any((folder / name).exists() for name in ("kgorch.db", RECORD_NAME, MARKER_NAME)):
        return "state of kgorch"
    if (folder / "pyvenv.cfg").exists():
        return "a virtual environment"
    if _is_ignored(f"{folder}/", specs):
        return ".gitignore"
    if not os.access(folder, os.R_OK | os.X_OK):
        return "it cannot be read"
    return "nested too deeply" if level >= MAX_LEVELS else ""


def _reason_file(file: Path, path: str, specs: _Specs, status: os.stat_result) -> str:
    """Why a file is left out; empty if it is not."""
    if stat.S_ISLNK(status.st_mode):
        return "a link"
    if not stat.S_ISREG(status.st_mode):
        return "not a regular file"
    if _is_ignored(str(file), specs):
        return ".gitignore"
    if CREDENTIALS.match_file(file.name.lower()):
        return "its name is that of a file with credentials"
    if not path.isprintable():
        return "its name cannot be stored everywhere"
    try:
        with open(file, "rb") as content:
            return "it contains a key or a token" if SECRET.search(content.read(PEEK_BYTES)) else ""
    except OSError:
        return "it cannot be read"


def _is_ignored(path: str, specs: _Specs) -> bool:
    """The `.gitignore` that is nearest to the file decides, as with git. `path` is absolute, a folder's with a slash at its end."""
    for base, spec in reversed(specs):
        if (included := spec.check_file(path.removeprefix(base)).include) is not None:
            return included
    return False
