"""The systemd units: their text, filled in for this machine, and putting them where systemd reads them or taking them away.

The text lies in `systemd/`, commented, and ships with the package (`orchestrator/units` leads there).
"""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import sys
from importlib import resources
from pathlib import Path
from string import Template
from typing import Literal, NamedTuple

from orchestrator.errors import KgorchError

Manager = Literal["user", "system"]
DAEMON, ONE_PLAN = "kgorch.service", "kgorch@.service"
UNITS = (DAEMON, ONE_PLAN)
MARK = "# Written by `kgorch systemd install`; `kgorch systemd uninstall` takes it away."


class Change(NamedTuple):
    """`what` became of a file: written, replaced, removed; unchanged and absent say that nothing was to be done."""

    path: Path
    what: str


def folder_of(manager: Manager) -> Path:
    """Where the administrator's units, or the person's own, lie (systemd.unit(5))."""
    if manager == "system":
        return Path("/etc/systemd/system")
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config").absolute() / "systemd" / "user"


def text_of(unit: str, manager: Manager, home: Path, *, account: str | None = None) -> str:
    """The whole unit as it is written, its first line the mark by which we know it again.

    Args:
        home: the state folder that the daemon works on.
        account: whom a system unit runs as; trainings and their files are that person's.
    Raises: KgorchError when there is no such account.
    """
    system = manager == "system"
    hardening = [_piece("hardening.conf"), *([_piece("hardening.system.conf")] if system else [])]
    values = {
        "kgorch": " ".join(quoted(word) for word in _ourselves()),
        "home": quoted(str(home))[1:-1],
        "unit_lines": "Wants=network-online.target\nAfter=network-online.target remote-fs.target nvidia-persistenced.service\n"
        if system
        else "",
        "service_lines": f"User={_known(account)}\n" if system and account else "",
        "hardening": "".join(hardening),
        "wanted_by": "multi-user.target" if system else "default.target",
    }
    return MARK + "\n" + Template(_piece(unit)).substitute(values)


def quoted(word: str) -> str:
    """A word as units quote it: C escapes, and `%` doubled, since it begins a specifier (systemd.syntax(7)).

    Raises: KgorchError for a line break, for `$` which ExecStart and Environment read differently, and for what is no UTF-8.
    """
    try:
        word = os.fsencode(word).decode("utf-8")
        cannot = any(sign in word for sign in "\r\n$")
    except UnicodeError:
        cannot = True
    if cannot:
        raise KgorchError(
            f"a path with a line break, a $ or a letter that is no UTF-8 cannot stand in a unit: {word!r}",
            next_step="give the state folder another name: --home FOLDER",
        )
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{escaped}"'


def install(folder: Path, texts: dict[str, str], *, dry_run: bool = False) -> list[Change]:
    """Write each unit whole or not at all; in a dry run, only say what would be. Again with the same texts changes nothing.

    Raises: KgorchError for a file that we did not write, or a folder that cannot be written; then nothing is changed.
    """
    refuse_foreign(folder)
    changes = []
    for name, text in texts.items():
        path = folder / name
        before = path.read_text(encoding="utf-8", errors="replace") if path.exists() else None
        if before != text and not dry_run:
            _write(path, text)
        changes.append(Change(path, "unchanged" if before == text else "replaced" if before else "written"))
    return changes


def uninstall(folder: Path) -> list[Change]:
    """Remove what `install` wrote, and nothing else.

    Raises: KgorchError for a file that we did not write, or may not remove.
    """
    refuse_foreign(folder)
    changes = []
    for path in (folder / name for name in UNITS):
        there = path.exists()
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise _unwritable(path, error) from None
        changes.append(Change(path, "removed" if there else "absent"))
    return changes


def refuse_foreign(folder: Path) -> None:
    """Raises: KgorchError when a unit of our names lies there that we did not write."""
    for path in (folder / name for name in UNITS):
        try:
            foreign = path.is_symlink() or (
                path.exists() and not path.read_text(encoding="utf-8", errors="replace").startswith(MARK)
            )
        except OSError as error:
            raise _unwritable(path, error) from None
        if foreign:
            raise KgorchError(
                f"{path} was not written by kgorch, so it stays as it is",
                "expected as its first line: " + MARK,
                next_step=f"move it away and try again; systemctl cat {path.name} shows it",
            )


def is_booted(manager: Manager) -> bool:
    """Whether a manager of that kind runs here and can be asked."""
    if shutil.which("systemctl") is None or not Path("/run/systemd/system").is_dir():
        return False
    private = Path(os.environ.get("XDG_RUNTIME_DIR", "/nowhere"), "systemd", "private")
    try:
        return manager == "system" or private.exists()
    except PermissionError:  # after su the variable names another's folder
        return False


def systemctl(manager: Manager, *words: str) -> None:
    """Raises: KgorchError with what systemctl says."""
    command = ["systemctl", f"--{manager}", "--no-ask-password", *words]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        raise KgorchError(
            f"{' '.join(command)} left with {done.returncode}",
            *done.stderr.strip().splitlines(),
            next_step=f"journalctl --{manager} -u {DAEMON} -n 30",
        )


def lingers(account: str) -> bool:
    """Whether that person's services go on after they have logged out, and begin at boot (loginctl enable-linger)."""
    return Path("/var/lib/systemd/linger", account).exists()


def _ourselves() -> list[str]:
    """This kgorch by its absolute path. `-P`: the folder it is started in is not searched for modules."""
    script = Path(sys.executable).parent / "kgorch"
    return [str(script)] if script.exists() else [sys.executable, "-P", "-m", "orchestrator.cli"]


def _known(account: str) -> str:
    try:
        return pwd.getpwnam(account).pw_name
    except KeyError:
        raise KgorchError(f"there is no account {account!r}", next_step="--as NAME, one of `getent passwd`") from None


def _piece(name: str) -> str:
    return resources.files("orchestrator").joinpath("units", name).read_text(encoding="utf-8")


def _write(path: Path, text: str) -> None:
    aside = path.with_name(f".{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        aside.write_text(text, encoding="utf-8")  # whatever the locale: systemd reads no other
        aside.chmod(0o644)
        aside.replace(path)
    except OSError as error:
        raise _unwritable(path, error) from None


def _unwritable(path: Path, error: OSError) -> KgorchError:
    return KgorchError(
        f"{path} cannot be written",
        str(error),
        next_step="sudo kgorch systemd install --system, or --user for units of your own",
    )
