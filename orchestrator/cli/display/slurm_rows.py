"""The Slurm job of a run as lines for people."""

from __future__ import annotations

from typing import Any

from kgorch.cli.display import render

View = dict[str, Any]


def rows(view: View) -> list[tuple[str, str]]:
    """The job, its state and reason in Slurm's words, and what it waits for."""
    lines = [("job", f"{sentence(view)}")]
    if view["stop_at"] and view["is_open"]:
        lines.append(("stopped", f"it was asked to stop {render.ago(view['stop_at'])}; nothing follows it"))
    if view["trouble"]:
        lines.append(("slurm", render.printable(f"does not answer: {view['trouble']}; its state is {_age(view)}")))
    return lines


def sentence(view: View) -> str:
    """`12: PENDING (Resources), starts at 18:30`."""
    where = f" on {view['node']}" if view["node"] and view["is_open"] and view["state"] != "PENDING" else ""
    text = f"{view['job'] or view['name']}: {view['state']}{where}" + (f" ({view['reason']})" if view["reason"] else "")
    if view["starts_at"]:
        text += f", starts at {render.clock(view['starts_at'])}"
    if view["restarts"]:
        text += f", requeued {view['restarts']} time{'s' if view['restarts'] != 1 else ''}"
    if not view["is_open"]:
        text += f"; nothing follows it: {view['why']}"
    return render.printable(text)


def next_step(view: View) -> str:
    if view["state"] in ("PENDING", "REQUEUED", "SUBMITTING"):
        return "Slurm starts the next session"
    return (
        "the job continues the run"
        if view["requeue"]
        else "this job ends the chain: it was submitted with --no-requeue"
    )


def _age(view: View) -> str:
    return f"from {render.ago(view['seen_at'])}"
