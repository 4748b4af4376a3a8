"""kgorch doctor"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click

from kgorch.cli.display import render
from kgorch.cli.lookup import find_run, open_state
from kgorch.cli.options import json_option, run_argument

SERIES = (("gpu", "gpu", 100), ("ranks", "ranks' cpu", 100), ("data_wait", "data wait", 1), ("host", "host cpu", 100))
"""Name of a series, its label, and the value of a full block of its sparkline."""


@click.command("doctor")
@run_argument
@json_option
def command(run: str | None, as_json: bool) -> int:
    """Show what slows RUN down and what to change (default: the newest run), and what this machine offers.

    \b
    Example:
      kgorch doctor surface-demo
    """
    from kgorch.db import runs
    from kgorch.hardware import inventory
    from kgorch.report import doctor

    _, home, engine = open_state()
    # without any run the machine is still described, so a missing run is an error only if it was named
    info = find_run(engine, run) if run or runs.all_runs(engine, limit=1) else None
    report: dict[str, Any] = {
        "machine": inventory.describe_host(home),
        "run": doctor.of_run(engine, info) if info else None,
    }
    if as_json:
        render.as_json(report)
        return 0
    render.labelled([*_machine(report["machine"]), *(_run(report["run"]) if report["run"] else ())])
    return 0


def _machine(host: dict[str, Any]) -> Iterator[tuple[str, str]]:
    devices = ", ".join(f"{gpu['name']} {render.size(gpu['memory'])}" for gpu in host["gpus"])
    yield "gpus", f"{devices}; driver {host['driver']}" if devices else "none (no NVIDIA driver, or it lists no device)"
    cgroup = ", limited by a cgroup" if host["cgroup_bounds"] else ""
    memory = f"{render.size(host['memory_free'])} free of {render.size(host['memory_total'])}{cgroup}"
    yield "host", f"{host['cores']} cores; memory {memory}; /dev/shm {render.size(host['shm_free'])} free"
    yield "snapshots", f"two copies of a state of up to {render.size(host['snapshot_room'])} fit in memory"
    yield "disk", f"{render.size(host['disk_free'])} free in {host['folder']}"
    py_spy = "installed" if host["py_spy"] else "not installed"
    may_trace = {True: "allowed", False: "not allowed here", None: "permission unknown"}[host["may_trace"]]
    yield "software", f"torch {host['torch'] or 'not installed'}; py-spy {py_spy}, {may_trace}"


def _run(report: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield "run", f"{report['run']}" + (f", session {report['session']}" if report["session"] else ", no session yet")
    yield from _sparklines(report["series"])
    usage = report["utilization"]
    if usage["band"]:
        device = "GPU" if usage["of"] == "gpu" else "CPU of the ranks"
        yield "utilization", f"{usage['band']}: {device} {usage['percent']:.0f}%"
    else:
        yield "utilization", "not measured yet"
    for finding in report["findings"]:
        saves = f" (saves {finding['saves']:.0%} of the time at most)" if finding["saves"] else ""
        yield finding["cause"].replace("_", " "), finding["what"]
        yield "  change", finding["change"] + saves
    if usage["band"] and not report["findings"]:
        yield "change", "nothing"
    for rung in report["rungs"]:
        yield "rung", f"step {rung['step']}: {rung['rung']} ({rung['why']})"
    for event in report["happened"]:
        times = f" {event['count']} times" if event["count"] > 1 else ""
        why = str(event["facts"].get("why") or event["facts"].get("cause") or event["facts"].get("what") or "")
        text = f"{render.words(event['kind'])}{times}, {render.clock(event['last_at'])} {render.printable(why)}"
        yield "event", text.rstrip()


def _sparklines(series: dict[str, Any]) -> Iterator[tuple[str, str]]:
    from kgorch.core.health.bottlenecks import sparkline

    for name, label, top in SERIES:
        if values := series.get(name):
            present = [value for value in values if value is not None]
            yield label, f"{sparkline(values, top=top)}  mean {sum(present) / len(present) / top:.0%}"
    if series["from"]:
        yield "", f"{render.clock(series['from'])} to {render.clock(series['to'])}"
