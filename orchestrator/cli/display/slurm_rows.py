"""The Slurm job of a run as lines for people."""

from __future__ import annotations

from typing import Any

from kgorch.cli.display import render
from kgorch.core.slurm.job_state import JobState

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
    job = view["job"] or view["name"]
    if not view["is_open"]:
        # its process closes it while Slurm still shows it as running
        state = f"over ({view['state']})" if JobState(view["state"]).is_over else "over"
        return render.printable(f"{job}: {state}; nothing follows it: {view['why']}")
    where = f" on {view['node']}" if view["node"] and JobState(view["state"]).is_running else ""
    text = f"{job}: {view['state']}{where}" + (f" ({view['reason']})" if view["reason"] else "")
    if view["starts_at"]:
        text += f", starts at {render.clock(view['starts_at'])}"
    if view["restarts"]:
        text += f", requeued {view['restarts']} time{'s' if view['restarts'] != 1 else ''}"
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
