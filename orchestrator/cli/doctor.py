"""kgorch doctor"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click

from orchestrator.cli import render
from orchestrator.cli.common import find_run, json_option, run_argument, state

PICTURES = (("gpu", "gpu", 100), ("ranks", "ranks' cpu", 100), ("data_wait", "data wait", 1), ("host", "host cpu", 100))
"""A row of the series, its label, and what fills a block."""


@click.command("doctor")
@run_argument
@json_option
def command(run: str | None, as_json: bool) -> int:
    """What slows RUN down and what to change (the newest run by default), and what this machine offers.

    \b
    Example:
      kgorch doctor surface-demo
    """
    from db import runs
    from orchestrator.hardware import inventory
    from orchestrator.report import doctor

    _, home, engine = state()
    known = find_run(engine, run) if run or runs.everyone(engine, limit=1) else None
    found: dict[str, Any] = {
        "machine": inventory.describe_host(home),
        "run": doctor.of_run(engine, known) if known else None,
    }
    if as_json:
        render.as_json(found)
        return 0
    render.labelled([*_machine(found["machine"]), *(_run(found["run"]) if found["run"] else ())])
    return 0


def _machine(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    devices = ", ".join(f"{gpu['name']} {render.size(gpu['memory'])}" for gpu in found["gpus"])
    yield "gpus", f"{devices}; driver {found['driver']}" if devices else "none that a driver tells of"
    bounded = ", bounded by a control group" if found["cgroup_bounds"] else ""
    memory = f"{render.size(found['memory_free'])} free of {render.size(found['memory_total'])}{bounded}"
    yield "host", f"{found['cores']} cores; memory {memory}; /dev/shm {render.size(found['shm_free'])} free"
    yield "snapshots", f"a state of up to {render.size(found['snapshot_room'])} can be held in memory twice"
    yield "disk", f"{render.size(found['disk_free'])} free in {found['folder']}"
    spy = "installed" if found["py_spy"] else "not installed"
    allowed = {True: "allowed", False: "not allowed here", None: "whether it is allowed is not known"}
    yield "software", f"torch {found['torch'] or 'not installed'}; py-spy {spy}, {allowed[found['may_trace']]}"


def _run(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield "run", f"{found['run']}" + (f", session {found['session']}" if found["session"] else ", no session yet")
    yield from _pictures(found["series"])
    used = found["utilization"]
    if used["band"]:
        yield (
            "utilization",
            f"{used['band']}: {'GPU' if used['of'] == 'gpu' else 'CPU of the ranks'} {used['percent']:.0f}%",
        )
    else:
        yield "utilization", "not measured yet"
    for finding in found["findings"]:
        saves = f" (saves {finding['saves']:.0%} of the time at most)" if finding["saves"] else ""
        yield finding["cause"].replace("_", " "), finding["what"]
        yield "  change", finding["change"] + saves
    if used["band"] and not found["findings"]:
        yield "change", "nothing"
    for rung in found["rungs"]:
        yield "rung", f"step {rung['step']}: {rung['rung']} ({rung['why']})"
    for event in found["happened"]:
        times = f" {event['count']} times" if event["count"] > 1 else ""
        said = str(event["facts"].get("why") or event["facts"].get("cause") or event["facts"].get("what") or "")
        yield (
            "happened",
            f"{render.words(event['kind'])}{times}, {render.clock(event['last_at'])} {render.printable(said)}".rstrip(),
        )


def _pictures(series: dict[str, Any]) -> Iterator[tuple[str, str]]:
    from orchestrator.core.bottlenecks import sparkline

    for name, label, top in PICTURES:
        if values := series.get(name):
            known = [value for value in values if value is not None]
            yield label, f"{sparkline(values, top=top)}  mean {sum(known) / len(known) / top:.0%}"
    if series["from"]:
        yield "", f"{render.clock(series['from'])} to {render.clock(series['to'])}"
