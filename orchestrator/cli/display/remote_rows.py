"""Sessions at another place as lines for people."""

from __future__ import annotations

from typing import Any

from kgorch.cli.display import render
from kgorch.core.codes import REMOTE_OPEN, RemoteState

View = dict[str, Any]
STATES = {
    "planned": "planned",
    "bundling": "planned: the bundle is made and stored",
    "pushing": "being pushed",
    "asking": "perhaps pushed: the place is asked whether it has it",
    "queued": "waits in the place's queue",
    "running": "running",
    "ended": "over: its record is fetched",
    "collected": "over, saved",
    "done": "over: the run is finished",
    "lost": "over, without a new verified checkpoint",
    "stopped": "stopped before it was pushed",
    "failed": "failed",
}
WAITS = {
    "login": "waits for a login",
    "client": "waits until the place's client is installed",
    "slots": "waits until the account may run one more session",
    "quota": "waits for the account's hours",
    "network": "the place does not answer",
}


def rows(view: View) -> list[tuple[str, str]]:
    """Where a run is, how it is there, and when it is looked at next."""
    lines = [("at", f"{view['place']}, session {view['session']} ({view['name']})")]
    if view["url"]:
        lines.append(("url", render.printable(view["url"])))
    lines.append(("remote", sentence(view)))
    if view["status"]:
        lines.append(("status", f"{view['status']}, as it said {render.ago(view['status_at'])}"))
    if reached := view["checkpoint"]:
        lines.append(
            ("reached", f"step {reached['step']} of {reached['stage']}, verified, in session {reached['session']}")
        )
    if view["stopped"] and view["next_at"]:
        lines.append(("stopped", "no session follows this one"))
    return lines


def sentence(view: View) -> str:
    """The state, and what it waits for."""
    is_left = view["state"] == RemoteState.STOPPED and view["pushed_at"]  # another run has taken the place of its run
    text = "no longer followed" if is_left else STATES[view["state"]]
    if view["wait"] and view["state"] in REMOTE_OPEN:
        text += f"; {WAITS[view['wait']]}"
    return text + (f": {render.printable(view['why'])}" if view["why"] else "")


def next_step(run: str, view: View, *, daemon_alive: bool) -> str:
    if view["state"] in REMOTE_OPEN:
        when = f"the next look is due {render.clock(view['next_at'])}"
        if daemon_alive:
            return f"the daemon carries it on; {when}"
        return f"kgorch daemon, or kgorch remote start PLAN --foreground ({when}, but no daemon is running that would look)"
    if view["state"] == RemoteState.DONE or view["checkpoint"]:
        fetch = f"kgorch remote fetch {run}"
        return (
            fetch
            if view["state"] == RemoteState.DONE
            else f"kgorch remote start PLAN continues it; {fetch} fetches what it has"
        )
    return "kgorch remote start PLAN"
