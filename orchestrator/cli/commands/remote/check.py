"""kgorch remote check"""

from __future__ import annotations

import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kgorch.cli.display import render
from kgorch.cli.lookup import load_plan, open_state
from kgorch.cli.options import json_option, on_option, plan_argument, set_option

if TYPE_CHECKING:
    from kgorch.remote.place import Place

MAX_FILES = 12


@click.command("check")
@plan_argument
@set_option
@on_option
@click.option(
    "--probe",
    "probes",
    is_flag=True,
    help="Ask the place what nobody has said, with four small sessions without an accelerator. A few minutes.",
)
@json_option
def command(plan: Path, overrides: tuple[str, ...], place: str | None, probes: bool, as_json: bool) -> int:
    """Show what a start of PLAN at its place would do: account, hours, sessions, and the files that would be sent.

    Pushes nothing and stores nothing. With --probe it pushes sessions of its own, and deletes them; then the exit code is 1 where
    the place does not do what kgorch counts on.

    \b
    Example:
      kgorch remote check plan.toml --on local
    """
    from kgorch.admission import resolve_run
    from kgorch.admission.requests import StartRequest
    from kgorch.cli.remote_errors import place_errors
    from kgorch.remote import check
    from kgorch.remote.places.registry import open_place

    typed = (*overrides, *([f'remote.on="{place}"'] if place else []))
    _, text = load_plan(plan, typed)
    request = StartRequest(text, plan, typed)
    loaded = resolve_run.load_requested_plan(request)
    _, home, engine = open_state()
    report = check.preview(loaded, request)
    opened = open_place(report.settings.place, home)
    try:
        with place_errors(opened.name):
            view = check.view(engine, report, opened)
            if probes:
                view["probe"] = _probe(opened)
    finally:
        opened.close()
    if as_json:
        render.as_json(view)
    else:
        render.labelled(_rows(view))
    return int(not all(finding["agrees"] for finding in view.get("probe", ())))


def _probe(place: Place) -> list[dict[str, Any]]:
    from kgorch.remote.probe import PlaceProbe

    with tempfile.TemporaryDirectory(prefix="kgorch-probe-") as folder:
        probe = PlaceProbe(place, Path(folder), lambda line: render.echo(f"probe: {line}", err=True))
        return [asdict(finding) for finding in probe.run()]


def _rows(view: dict[str, Any]) -> list[tuple[str, str]]:
    quota, bundle = view["quota"], view["bundle"]
    rows = [("place", view["place"]), ("account", render.printable(f"{view['account']} ({view['means']})"))]
    if quota:
        left = f"{render.duration(quota['left_s'])} left of {render.duration(quota['allowed_s'])}"
        rows.append(("hours", f"{left}, renewed {render.printable(quota['refreshes_at']) or 'at an unknown time'}"))
        rows.append(("cost", f"{view['factor']:g} h for an hour of a session"))
    if view["running"] is not None:
        rows.append(("sessions", f"{view['running']} run or wait there now"))
    rows.append(("session", f"{render.duration(view['session_s'])} each; accelerator {view['accelerator'] or 'none'}"))
    if view["waits"]:
        rows.append(("waits", render.printable(view["waits"])))
    rows.append(("bundle", f"{render.size(bundle['bytes'])} in {len(bundle['files'])} files of the plan's folder"))
    rows += [("", render.printable(path)) for path in bundle["files"][:MAX_FILES]]
    if more := len(bundle["files"]) - MAX_FILES:
        rows += [("", f"and {more} more (--json lists all)")] if more > 0 else []
    rows += [("left out", render.printable(text)) for text in bundle["left_out"][:MAX_FILES]]
    for finding in view.get("probe", ()):
        answer = finding["answer"] if finding["agrees"] else f"{finding['answer']}; kgorch needs: {finding['needed']}"
        rows.append(("probe" if finding["agrees"] else "PROBE", render.printable(f"{finding['question']}: {answer}")))
    rows.append(("next", "kgorch remote start PLAN" + f" --on {view['place']}"))
    return rows
