"""The systemd units: their text, filled in for this machine; installation and removal.

The templates are in `systemd/`, commented, and ship with the package (`orchestrator/system/units` is a link to that folder).
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

from kgorch.errors import KgorchError
from kgorch.system import files

Manager = Literal["user", "system"]
DAEMON_UNIT, PLAN_UNIT = "kgorch.service", "kgorch@.service"
UNITS = (DAEMON_UNIT, PLAN_UNIT)
MARK = "# Written by `kgorch systemd install`; `kgorch systemd uninstall` takes it away."


class UnitChange(NamedTuple):
    """What was done to a file.

    Attributes:
        path: of the unit.
        what: written, replaced, removed, unchanged (it had that text), or absent (there was none to remove).
    """

    path: Path
    what: str


def unit_folder(manager: Manager) -> Path:
    """Folder of the administrator's units, or of the user's own (systemd.unit(5))."""
    if manager == "system":
        return Path("/etc/systemd/system")
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config").absolute() / "systemd" / "user"


def unit_text(unit: str, manager: Manager, home: Path, *, account: str | None = None) -> str:
    """The whole unit file; its first line is the mark by which we recognize it.

    Args:
        home: the state folder that the daemon works on.
        account: user that a system unit runs as; trainings and their files belong to that user.
    Raises: KgorchError when there is no such account.
    """
    system = manager == "system"
    hardening = [_template("hardening.conf"), *([_template("hardening.system.conf")] if system else [])]
    values = {
        "kgorch": " ".join(quote(word) for word in _command()),
        "home": quote(str(home))[1:-1],
        "unit_lines": "Wants=network-online.target\nAfter=network-online.target remote-fs.target nvidia-persistenced.service\n"
        if system
        else "",
        "service_lines": f"User={_account_name(account)}\n" if system and account else "",
        "hardening": "".join(hardening),
        "wanted_by": "multi-user.target" if system else "default.target",
    }
    return MARK + "\n" + Template(_template(unit)).substitute(values)


def quote(word: str) -> str:
    """Quote a word for a unit: C escapes, and `%` doubled, since it begins a specifier (systemd.syntax(7)).

    Raises: KgorchError for a line break, for `$` which ExecStart and Environment read differently, and for what is no UTF-8.
    """
    try:
        word = os.fsencode(word).decode("utf-8")
        cannot = any(sign in word for sign in "\r\n$")
    except UnicodeError:
        cannot = True
    if cannot:
        raise KgorchError(
            f"a systemd unit cannot contain a line break, a $ or a byte that is not UTF-8: {word!r}",
            next_step="give the state folder another name: --home FOLDER",
        )
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{escaped}"'


def install(folder: Path, texts: dict[str, str], *, dry_run: bool = False) -> list[UnitChange]:
    """Write each unit atomically; a dry run only reports what would be done. Repeating it with the same texts changes nothing.

    Raises: KgorchError for a file that we did not write, or a folder that cannot be written; then nothing has changed.
    """
    refuse_foreign(folder)
    changes = []
    for name, text in texts.items():
        path = folder / name
        before = path.read_text(encoding="utf-8", errors="replace") if path.exists() else None
        if before != text and not dry_run:
            _write(path, text)
        changes.append(UnitChange(path, "unchanged" if before == text else "replaced" if before else "written"))
    return changes


def uninstall(folder: Path) -> list[UnitChange]:
    """Remove what `install` wrote, and nothing else.

    Raises: KgorchError for a file that we did not write, or may not remove.
    """
    refuse_foreign(folder)
    changes = []
    for path in (folder / name for name in UNITS):
        existed = path.exists()
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise _write_error(path, error) from None
        changes.append(UnitChange(path, "removed" if existed else "absent"))
    return changes


def refuse_foreign(folder: Path) -> None:
    """Raises: KgorchError when the folder has a unit of one of our names that we did not write."""
    for path in (folder / name for name in UNITS):
        # `systemctl mask` makes a link to /dev/null: the administrator's, too
        try:
            foreign = path.is_symlink() or (
                path.exists() and not path.read_text(encoding="utf-8", errors="replace").startswith(MARK)
            )
        except OSError as error:
            raise _write_error(path, error) from None
        if foreign:
            raise KgorchError(
                f"{path} was not written by kgorch, so it is left unchanged",
                "expected first line: " + MARK,
                next_step=f"move it away and try again; systemctl cat {path.name} shows it",
            )


def is_booted(manager: Manager) -> bool:
    """Whether a systemd manager of that kind runs here and can be called."""
    if shutil.which("systemctl") is None or not Path("/run/systemd/system").is_dir():
        return False
    private = Path(os.environ.get("XDG_RUNTIME_DIR", "/nowhere"), "systemd", "private")
    try:
        return manager == "system" or private.exists()
    except PermissionError:  # after su the variable names another's folder
        return False


def systemctl(manager: Manager, *words: str) -> None:
    """Run systemctl. Raises: KgorchError with its error output."""
    command = ["systemctl", f"--{manager}", "--no-ask-password", *words]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        raise KgorchError(
            f"{' '.join(command)} failed with exit status {done.returncode}",
            *done.stderr.strip().splitlines(),
            next_step=f"journalctl --{manager} -u {DAEMON_UNIT} -n 30",
        )


def has_linger(account: str) -> bool:
    """Whether that user's services run without a login session, from boot on (loginctl enable-linger)."""
    return Path("/var/lib/systemd/linger", account).exists()


def _command() -> list[str]:
    """The command line of this kgorch, absolute. `-P`: the working directory is not searched for modules."""
    script = Path(sys.executable).parent / "kgorch"
    return [str(script)] if script.exists() else [sys.executable, "-P", "-m", "kgorch.cli"]


def _account_name(account: str) -> str:
    try:
        return pwd.getpwnam(account).pw_name
    except KeyError:
        raise KgorchError(
            f"there is no account {account!r}", next_step="give --as NAME; `getent passwd` lists the accounts"
        ) from None


def _template(name: str) -> str:
    return resources.files("kgorch.system").joinpath("units", name).read_text(encoding="utf-8")


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # whatever the locale: systemd reads UTF-8 alone
        files.write(path, text.encode(), suffix=".tmp", mode=0o644)
    except OSError as error:
        raise _write_error(path, error) from None


def _write_error(path: Path, error: OSError) -> KgorchError:
    return KgorchError(
        f"{path} cannot be written",
        str(error),
        next_step="sudo kgorch systemd install --system, or --user for units of your own",
    )
