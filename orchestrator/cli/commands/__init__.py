"""The verbs of `kgorch`, one module each: `kgorch save` is `commands/training/save.py`.

This table is all that help and completion need, so a verb's module is imported only when the verb is typed: `kgorch status` must
not pay for what `kgorch start` loads.
"""

from __future__ import annotations

TOPICS = {
    "Plan": {
        "init": "Write a commented plan.toml and a small train.py.",
        "adopt": "Write a plan for a program that saves by itself.",
        "explain": "Explain a key of the plan or the code of an error.",
        "check": "Test a plan and estimate its cost before it runs.",
    },
    "Training": {
        "start": "Start the run of a plan, or continue it.",
        "resume": "Continue a run by its stored plan.",
        "save": "Save a checkpoint now; training continues.",
        "stop": "Save a checkpoint, then end the session.",
    },
    "Inspection": {
        "status": "Show the state of a run, also without a supervisor.",
        "top": "Show all runs on the whole screen.",
        "logs": "Print the output of the ranks.",
        "history": "List the sessions or the events of a run.",
        "events": "Print the journal of a run, and follow it.",
        "metrics": "Show reported metrics as a table, CSV or plot.",
        "report": "Write a report of a run as a page, with curves.",
        "compare": "Compare the plans, results and curves of runs.",
        "doctor": "Find what slows a run down, and what to change.",
        "quota": "Show or correct the accelerator hours used.",
        "web": "Show all runs in a browser, and act on them.",
    },
    "Storage": {
        "checkpoints": "List, verify, prune, pin, drop or export checkpoints.",
        "rm": "Remove runs and their files.",
    },
    "Unattended": {
        "queue": "List or change the runs that wait to be started.",
        "daemon": "Start each queued run when it is due.",
        "fleet": "List the machines of a fleet and their runs.",
        "systemd": "Install the daemon as a systemd service.",
        "notify": "Send a test notification.",
        "prometheus": "Offer the state of all runs to Prometheus.",
        "track": "Send metrics to experiment trackers now.",
    },
    "Remote": {
        "remote": "Run the sessions of a plan at another place.",
        "slurm": "Run the sessions of a plan as Slurm jobs.",
    },
    "General": {
        "help": "Show what a verb does, and its options.",
        "version": "Show the versions of kgorch, Python and PyTorch.",
    },
}
"""Topic → verb → summary, in the order of `kgorch --help`. In lower case a topic is the folder of its verbs."""

VERBS = {verb: summary for verbs in TOPICS.values() for verb, summary in verbs.items()}


def module_of(verb: str) -> str:
    """The module that holds the verb's `command`. Raises: StopIteration for an unknown verb."""
    topic = next(topic for topic, verbs in TOPICS.items() if verb in verbs)
    return f"{__name__}.{topic.lower()}.{verb}"
