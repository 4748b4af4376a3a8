"""kgorch systemd"""

from __future__ import annotations

import getpass
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kgorch.cli.display import render
from kgorch.cli.usage import Group
from kgorch.errors import KgorchError

if TYPE_CHECKING:
    from kgorch.system.systemd_units import Manager, UnitChange


@click.group("systemd", cls=Group)
def command() -> None:
    """Install the daemon as a systemd service: queued runs start, also after a reboot, while nobody is logged in.

    \b
    Example:
      kgorch systemd install --user --now
      systemctl --user status kgorch
    """


def _manager(ctx: click.Context, parameter: click.Parameter, value: str | None) -> str:
    return value or ("system" if os.geteuid() == 0 else "user")


def _manager_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """--user | --system. The default is the system manager for root, and the user's own for anybody else.

    By a callback: click before 8.3 takes any `default` of an option for that option's own flag value.
    """
    flags = {"user": "The user's own systemd.", "system": "The system's; default for root."}
    for name, help_text in flags.items():
        function = click.option(f"--{name}", "manager", flag_value=name, callback=_manager, help=help_text)(function)
    return function


def _unit_options(function: Callable[..., Any]) -> Callable[..., Any]:
    function = click.option(
        "--home",
        type=click.Path(path_type=Path, file_okay=False),
        help="The state folder; default: the one of the user that the unit runs as.",
    )(function)
    return click.option(
        "--as",
        "account",
        metavar="NAME",
        help="With --system: the user that the unit runs as; default: you, also under sudo.",
    )(function)


_into = click.option(
    "--into",
    type=click.Path(path_type=Path, file_okay=False),
    help="Write into another folder, of which systemd is not told.",
)


@command.command("print")
@click.argument("unit", type=click.Choice(["kgorch.service", "kgorch@.service"]), default="kgorch.service")
@_manager_option
@_unit_options
def print_unit(unit: str, manager: Manager, home: Path | None, account: str | None) -> int:
    """Print UNIT exactly as install writes it.

    \b
    Example:
      kgorch systemd print kgorch@.service --user
    """
    render.echo(_texts(manager, home, account)[unit], nl=False)
    return 0


@command.command("install")
@_manager_option
@_unit_options
@_into
@click.option("--now", is_flag=True, help="Start the daemon, too; a running one is restarted, training continues.")
@click.option("--dry-run", is_flag=True, help="Only list the files and commands; kgorch systemd print shows the units.")
def install(
    manager: Manager, home: Path | None, account: str | None, into: Path | None, now: bool, dry_run: bool
) -> int:
    """Write kgorch.service and kgorch@.service, and start the daemon at boot. A second time changes nothing.

    \b
    Example:
      kgorch systemd install --user --now
      sudo kgorch systemd install --system --as mira --home /srv/kgorch
    """
    from kgorch.system import systemd_units

    if into and now:
        raise click.UsageError("--into only writes files, --now starts the daemon: give one of them")
    changes = systemd_units.install(
        into or systemd_units.unit_folder(manager), _texts(manager, home, account), dry_run=dry_run
    )
    if dry_run:
        _print_dry_run(changes, [] if into else _systemctl_words(manager, now=now), manager)
        return 0
    _print(changes)
    if into:
        return 0
    if not systemd_units.is_booted(manager):
        render.echo(f"no {manager} systemd is running here: nothing was enabled")
        return 0
    for words in _systemctl_words(manager, now=now):
        systemd_units.systemctl(manager, *words)
    render.echo(f"{systemd_units.DAEMON_UNIT} starts at boot" + (" and is running" if now else ""))
    if manager == "user" and not systemd_units.has_linger(getpass.getuser()):
        render.echo("next: loginctl enable-linger    (otherwise systemd stops it when you log out)")
    elif not now:
        render.echo(f"next: systemctl --{manager} start kgorch")
    return 0


@command.command("uninstall")
@_manager_option
@_into
def uninstall(manager: Manager, into: Path | None) -> int:
    """Stop the daemon, which saves its sessions first, and remove the units. Runs are not removed.

    \b
    Example:
      kgorch systemd uninstall --user
    """
    from kgorch.system import systemd_units

    folder = into or systemd_units.unit_folder(manager)
    is_enabled = into is None and systemd_units.is_booted(manager) and (folder / systemd_units.DAEMON_UNIT).exists()
    # before anything is stopped: a unit that kgorch did not write is not its to remove
    systemd_units.refuse_foreign(folder)
    if is_enabled:
        systemd_units.systemctl(manager, "disable", "--now", systemd_units.DAEMON_UNIT)
    _print(systemd_units.uninstall(folder))
    if is_enabled:
        systemd_units.systemctl(manager, "daemon-reload")
    return 0


def _texts(manager: Manager, home: Path | None, account: str | None) -> dict[str, str]:
    from kgorch.platforms.detect import detect
    from kgorch.system import systemd_units
    from kgorch.system.paths import state_home

    if manager == "user" and account:
        raise KgorchError(
            "--as cannot be used with a user unit, which runs as the user who installs it",
            next_step="leave out --as, or give --system",
        )
    if manager == "system":
        account = account or os.environ.get("SUDO_USER") or getpass.getuser()
    folder = (home or state_home(detect().home, account=account)).expanduser().absolute()
    return {unit: systemd_units.unit_text(unit, manager, folder, account=account) for unit in systemd_units.UNITS}


def _systemctl_words(manager: Manager, *, now: bool) -> list[list[str]]:
    """The calls of systemctl that follow once the units are written."""
    from kgorch.system import systemd_units

    return [
        ["daemon-reload"],
        ["enable", systemd_units.DAEMON_UNIT],
        *([["restart", systemd_units.DAEMON_UNIT]] if now else []),
    ]


def _print_dry_run(changes: list[UnitChange], calls: list[list[str]], manager: Manager) -> None:
    from kgorch.system import systemd_units

    for change in changes:
        render.echo(f"{change.path}: {'' if change.what == 'unchanged' else 'would be '}{change.what}")
    would = "would run" if systemd_units.is_booted(manager) else "would not run, because systemd is not running here"
    for words in calls:
        render.echo(f"{would}: systemctl --{manager} {' '.join(words)}")
    render.echo("nothing was changed (--dry-run)")


def _print(changes: list[UnitChange]) -> None:
    for change in changes:
        render.echo(f"{change.path}: {change.what}")
