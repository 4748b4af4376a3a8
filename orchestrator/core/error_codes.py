"""The error code that each module's errors have: `KG203`, which names a topic of cli/error_codes.toml.

Areas: KG1xx plan and command line, KG2xx checkpoints and resume, KG3xx sessions and their limits,
KG4xx training program, KG5xx memory and disk, KG6xx state folder and database, KG7xx other machines, KG8xx services, KG9xx the
installation and bugs. A code is never given to another topic: people keep it in notes and look it up later.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

PATTERN = re.compile(r"KG[1-9]\d\d")

BY_MODULE: Mapping[str, str] = {
    # the nearest package or module counts; a class of errors or a raise site may have another code (kgorch/errors.py)
    "kgorch.admission": "KG303",
    "kgorch.admission.live_requests": "KG304",
    "kgorch.admission.moved_state": "KG604",
    "kgorch.admission.open_session": "KG301",
    "kgorch.admission.ownership": "KG604",
    "kgorch.admission.plan_changes": "KG105",
    "kgorch.admission.remote_sessions": "KG702",
    "kgorch.admission.removal": "KG607",
    "kgorch.admission.resolve_run": "KG105",
    "kgorch.admission.session_start": "KG303",
    "kgorch.admission.slurm_submission": "KG706",
    "kgorch.admission.source_run": "KG207",
    "kgorch.api": "KG401",
    "kgorch.checkpoint": "KG210",
    "kgorch.cli": "KG108",
    "kgorch.cli.commands.inspection.web": "KG803",
    "kgorch.cli.commands.plan.adopt": "KG407",
    "kgorch.cli.commands.storage.checkpoints": "KG210",
    "kgorch.cli.commands.storage.rm": "KG607",
    "kgorch.cli.commands.training": "KG306",
    "kgorch.cli.commands.unattended.daemon": "KG802",
    "kgorch.cli.commands.unattended.notify": "KG804",
    "kgorch.cli.commands.unattended.systemd": "KG801",
    "kgorch.cli.commands.unattended.track": "KG805",
    "kgorch.cli.display.check_tables": "KG503",
    "kgorch.cli.display.render": "KG503",
    "kgorch.cli.exposition": "KG803",
    "kgorch.cli.lookup": "KG109",
    "kgorch.cli.options": "KG102",
    "kgorch.cli.remote_errors": "KG701",
    "kgorch.db": "KG602",
    "kgorch.db.location": "KG606",
    "kgorch.db.postgres": "KG606",
    "kgorch.hardware": "KG305",
    "kgorch.launch": "KG206",
    "kgorch.launch.extension": "KG105",
    "kgorch.launch.inputs": "KG106",
    "kgorch.nodes": "KG707",
    "kgorch.notebook": "KG108",
    "kgorch.plan": "KG101",
    "kgorch.plan.entries": "KG103",
    "kgorch.plan.overrides": "KG104",
    "kgorch.plan.plan_file": "KG102",
    "kgorch.plan.user_config": "KG107",
    "kgorch.preflight.assumptions": "KG108",
    "kgorch.preflight": "KG402",
    "kgorch.remote": "KG702",
    "kgorch.remote.bundle": "KG703",
    "kgorch.remote.code_files": "KG703",
    "kgorch.remote.places": "KG701",
    "kgorch.remote.wheels": "KG703",
    "kgorch.report.metrics_file": "KG503",
    "kgorch.scheduler": "KG802",
    "kgorch.scheduler.slurm_job": "KG706",
    "kgorch.services.mirror": "KG212",
    "kgorch.services.notification_targets": "KG804",
    "kgorch.services.notifications": "KG804",
    "kgorch.services.trackers": "KG805",
    "kgorch.slurm": "KG706",
    "kgorch.slurm.batch_script": "KG705",
    "kgorch.slurm.commands": "KG704",
    "kgorch.system.sockets": "KG605",
    "kgorch.system.systemd_units": "KG801",
    "kgorch.web": "KG806",
    "kgorch.web.server": "KG803",
    "kgorch.worker": "KG403",
    "kgorch.worker.checkpoint.torch_export": "KG210",
    "kgorch.worker.data": "KG404",
    "kgorch.worker.data.value_cache": "KG204",
    "kgorch.worker.entry": "KG405",
    "kgorch.worker.foreign": "KG407",
    "kgorch.worker.memory": "KG502",
    "kgorch.worker.probe": "KG402",
    "kgorch.worker.ranks": "KG406",
}


def code_of_module(module: str) -> str:
    """The code of the errors that a module constructs; empty for a module that is not kgorch's."""
    while module and module not in BY_MODULE:
        module = module.rpartition(".")[0]
    return BY_MODULE.get(module, "")
