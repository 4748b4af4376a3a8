"""kgorch systemd"""

from __future__ import annotations

import getpass
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from orchestrator.cli import render
from orchestrator.cli.usage import Group
from orchestrator.errors import KgorchError

if TYPE_CHECKING:
    from orchestrator.system.systemd_units import Manager, UnitChange


@click.group("systemd", cls=Group)
def command() -> None:
    """Let systemd run the daemon: due sessions begin, and go on after a reboot, with nobody logged in.

    \b
    Example:
      kgorch systemd install --user --now
      systemctl --user status kgorch
    """


def _whose(function: Callable[..., Any]) -> Callable[..., Any]:
    """--user | --system; neither is the system's for root and one's own for anybody else."""
    manager = "system" if os.geteuid() == 0 else "user"
    function = click.option("--user", "manager", flag_value="user", help="Your own systemd.")(function)
    return click.option(
        "--system", "manager", flag_value="system", default=manager, help="The machine's. Default for root."
    )(function)


def _filled_in(function: Callable[..., Any]) -> Callable[..., Any]:
    function = click.option(
        "--home",
        type=click.Path(path_type=Path, file_okay=False),
        help="The state folder; default: where kgorch status looks, for whom a system unit runs as.",
    )(function)
    return click.option(
        "--as", "account", metavar="NAME", help="Whom a system unit runs as; default: you, also with sudo."
    )(function)


_into = click.option(
    "--into", type=click.Path(path_type=Path, file_okay=False), help="Another folder; systemd is not told of it."
)


@command.command("print")
@click.argument("unit", type=click.Choice(["kgorch.service", "kgorch@.service"]), default="kgorch.service")
@_whose
@_filled_in
def print_unit(unit: str, manager: Manager, home: Path | None, account: str | None) -> int:
    """Print UNIT exactly as install would write it.

    \b
    Example:
      kgorch systemd print kgorch@.service --user
    """
    render.echo(_texts(manager, home, account)[unit], nl=False)
    return 0


@command.command("install")
@_whose
@_filled_in
@_into
@click.option("--now", is_flag=True, help="Start the daemon, too; one that runs is begun anew, training goes on.")
@click.option(
    "--dry-run", is_flag=True, help="Only say what would be written and run; kgorch systemd print shows the units."
)
def install(
    manager: Manager, home: Path | None, account: str | None, into: Path | None, now: bool, dry_run: bool
) -> int:
    """Write kgorch.service and kgorch@.service and have the daemon begin at boot. Again changes nothing.

    \b
    Example:
      kgorch systemd install --user --now
      sudo kgorch systemd install --system --as mira --home /srv/kgorch
    """
    from orchestrator.system import systemd_units

    if into and now:
        raise click.UsageError("--into only writes files, --now starts the daemon: give one of them")
    changes = systemd_units.install(
        into or systemd_units.unit_folder(manager), _texts(manager, home, account), dry_run=dry_run
    )
    if dry_run:
        _say_what_would_be(changes, [] if into else _steps(manager, now=now), manager)
        return 0
    _say(changes)
    if into:
        return 0
    if not systemd_units.is_booted(manager):
        render.echo(f"no {manager} systemd runs here: nothing was enabled")
        return 0
    for words in _steps(manager, now=now):
        systemd_units.systemctl(manager, *words)
    render.echo(f"{systemd_units.DAEMON_UNIT} begins at boot" + (" and runs now" if now else ""))
    if manager == "user" and not systemd_units.has_linger(getpass.getuser()):
        render.echo("next: loginctl enable-linger    (else it ends when you log out)")
    elif not now:
        render.echo(f"next: systemctl --{manager} start kgorch")
    return 0


@command.command("uninstall")
@_whose
@_into
def uninstall(manager: Manager, into: Path | None) -> int:
    """Stop the daemon (sessions are saved first) and remove the units that install wrote; state stays.

    \b
    Example:
      kgorch systemd uninstall --user
    """
    from orchestrator.system import systemd_units

    folder = into or systemd_units.unit_folder(manager)
    asked = into is None and systemd_units.is_booted(manager) and (folder / systemd_units.DAEMON_UNIT).exists()
    systemd_units.refuse_foreign(folder)
    if asked:
        systemd_units.systemctl(manager, "disable", "--now", systemd_units.DAEMON_UNIT)
    _say(systemd_units.uninstall(folder))
    if asked:
        systemd_units.systemctl(manager, "daemon-reload")
    return 0


def _texts(manager: Manager, home: Path | None, account: str | None) -> dict[str, str]:
    from orchestrator.platforms.detect import detect
    from orchestrator.system import systemd_units
    from orchestrator.system.paths import state_home

    if manager == "user" and account:
        raise KgorchError("a user unit runs as the one who installs it", next_step="leave --as away, or take --system")
    if manager == "system":
        account = account or os.environ.get("SUDO_USER") or getpass.getuser()
    folder = (home or state_home(detect().home, account=account)).expanduser().absolute()
    return {unit: systemd_units.unit_text(unit, manager, folder, account=account) for unit in systemd_units.UNITS}


def _steps(manager: Manager, *, now: bool) -> list[list[str]]:
    """What systemctl is asked for once the units are there."""
    from orchestrator.system import systemd_units

    return [
        ["daemon-reload"],
        ["enable", systemd_units.DAEMON_UNIT],
        *([["restart", systemd_units.DAEMON_UNIT]] if now else []),
    ]


def _say_what_would_be(changes: list[UnitChange], steps: list[list[str]], manager: Manager) -> None:
    from orchestrator.system import systemd_units

    for change in changes:
        render.echo(
            f"{change.path}: would be {change.what}" if change.what != "unchanged" else f"{change.path}: unchanged"
        )
    runs_here = systemd_units.is_booted(manager)
    for words in steps:
        render.echo(
            f"would {'run' if runs_here else 'not run, no systemd is here'}: systemctl --{manager} {' '.join(words)}"
        )
    render.echo("nothing was changed (--dry-run)")


def _say(changes: list[UnitChange]) -> None:
    for change in changes:
        render.echo(f"{change.path}: {change.what}")
