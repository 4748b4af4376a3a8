"""kgorch web"""

from __future__ import annotations

import os
import sys

import click

from kgorch.cli.display import render
from kgorch.cli.lookup import open_state
from kgorch.errors import KgorchError

PASSWORD = "KGORCH_WEB_PASSWORD"
MIN_PASSWORD = 8


@click.command("web")
@click.option(
    "--host",
    metavar="ADDRESS",
    default="127.0.0.1",
    show_default=True,
    help="Where to listen; other addresses ask for a password.",
)
@click.option(
    "--port", metavar="N", type=click.IntRange(0, 65535), help="0 for any free one.  [default: 8642, or a free one]"
)
@click.option("--no-open", is_flag=True, help="Print the address only; open no browser.")
def command(host: str, port: int | None, no_open: bool) -> int:
    """Show all runs in a browser, and save, stop and resume them there. Runs until Ctrl-C; trainings do not depend on it.

    The page is for this machine alone, and its address holds a secret token. With --host other machines reach it, too: over plain
    HTTP, and with the password of the variable KGORCH_WEB_PASSWORD, or one that is asked for. From another machine rather use
    ssh -L 8642:127.0.0.1:8642. Needs kgorch[web].

    \b
    Example:
      kgorch web --no-open
    """
    try:
        from kgorch.web import access, server
        from kgorch.web.state import WebState
    except ModuleNotFoundError as error:
        if error.name not in ("starlette", "uvicorn", "jinja2"):
            raise
        raise KgorchError(
            f"kgorch web needs {error.name}", next_step="pip install 'kgorch[web]'", error_code="KG902"
        ) from None
    from kgorch.system import process_protection

    password = None if server.is_local(host) else access.Password(_password())
    profile, home, engine = open_state()
    bound = server.listen(host, port)
    # a session that is started from the page must find its files closed to others, as one that is started from a terminal
    process_protection.protect()
    gate = access.Gate(bound.getsockname()[1], (host,), password)
    url = server.url_of(bound, gate)
    if password:
        render.echo(
            f"warning: everyone who reaches {host} can try the password, and the connection is not encrypted;"
            " rather use ssh -L from the other machine",
            err=True,
        )

    def announce() -> None:
        render.echo(f"the page is at {url}")
        render.echo("Ctrl-C ends it; trainings go on", err=True)
        if not no_open:
            _open(url)

    server.make_server(WebState(engine, home, profile), gate, announce).run(sockets=[bound])
    return 0


def _password() -> str:
    """Of the environment, which children do not inherit, or as it is typed. Raises: KgorchError."""
    password = os.environ.pop(PASSWORD, "")
    if not password and render.is_terminal(sys.stdin):
        password = click.prompt("password for the page", hide_input=True, confirmation_prompt=True, err=True)
    if len(password) < MIN_PASSWORD:
        raise KgorchError(
            f"a page for other machines needs a password of at least {MIN_PASSWORD} characters",
            next_step=f"{PASSWORD}=… kgorch web --host ADDRESS",
        )
    return str(password)


def _open(url: str) -> None:
    """In the user's browser, if there is a display: a text browser would take the terminal."""
    import webbrowser

    if os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"):
        webbrowser.open(url)
