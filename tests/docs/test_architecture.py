"""The house as ARCHITECTURE.md draws it: who may import whom, and what stays unloaded."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted([*ROOT.glob("orchestrator/**/*.py"), *ROOT.glob("db/**/*.py")])

LOW = {
    "kgorch.core",
    "kgorch.errors",
    "kgorch.untrusted_io",
    "kgorch.protocol",
    "kgorch.system",
}
"""What everything above may use."""

RANKS = {
    "kgorch.core.codes",
    "kgorch.protocol",
    "kgorch.checkpoint.manifest",
    "kgorch.checkpoint.folder",
    "kgorch.checkpoint.verify",
    "kgorch.checkpoint.safetensors_header",
    "kgorch.checkpoint.sharding",
    "kgorch.worker.local_tensors",
    "kgorch.worker.object_variables",
    "kgorch.worker.script_code",
    "kgorch.worker.wrappers",
    "kgorch.untrusted_io",
    "kgorch.errors",
    "kgorch.system.attempt_files",
    "kgorch.system.clock",
    "kgorch.system.files",
    "kgorch.system.frame_stack",
    "kgorch.system.process_identity",
}
"""What every part of the worker may use: little, for each rank loads it."""

# package → what of this project it may import; the rest of the world is checked below
MAY = {
    # the packages of core, the lowest first; what is left are modules of its own
    "kgorch.core.checkpoint": {"kgorch.core.checkpoint"},
    "kgorch.core.metrics": {"kgorch.core.metrics", "kgorch.core.codes"},
    "kgorch.core.health": {"kgorch.core.health"},
    "kgorch.core.memory": {"kgorch.core.memory", "kgorch.core.codes"},
    "kgorch.core.limits": {"kgorch.core.limits", "kgorch.core.codes"},
    "kgorch.core.forecast": {"kgorch.core.forecast"},
    "kgorch.core.remote": {"kgorch.core.remote", "kgorch.core.backoff", "kgorch.core.codes"},
    "kgorch.core.session": {
        "kgorch.core.session",
        "kgorch.core.checkpoint",
        "kgorch.core.health",
        "kgorch.core.limits",
        "kgorch.core.memory",
        "kgorch.core.codes",
    },
    "kgorch.core.slurm": {"kgorch.core.slurm", "kgorch.core.scheduling", "kgorch.core.codes"},
    "kgorch.core": {"kgorch.core.backoff", "kgorch.core.codes", "kgorch.core.former_names"},
    "kgorch.platforms": {"kgorch.platforms"},
    # the packages of the worker, the lowest first
    "kgorch.worker.rng_state": {*RANKS, "kgorch.worker.tagged_json"},
    "kgorch.worker.local_tensors": RANKS,
    "kgorch.worker.script_code": RANKS,
    "kgorch.worker.object_variables": {*RANKS, "kgorch.worker.script_code"},
    "kgorch.worker.wrappers": RANKS,
    "kgorch.worker.tagged_json": RANKS,
    "kgorch.worker.ranks": {
        "kgorch.worker.ranks",
        "kgorch.worker.rng_state",
        *RANKS,
    },
    "kgorch.worker.telemetry": {
        "kgorch.worker.telemetry",
        "kgorch.core.metrics.metric_curve",
        *RANKS,
    },
    "kgorch.worker.health": {
        "kgorch.worker.health",
        "kgorch.worker.telemetry",
        "kgorch.core.health.training_health",
        *RANKS,
    },
    "kgorch.worker.data": {
        "kgorch.worker.data",
        "kgorch.worker.ranks",
        "kgorch.worker.telemetry",
        "kgorch.worker.rng_state",
        "kgorch.worker.tagged_json",
        *RANKS,
    },
    "kgorch.worker.checkpoint": {
        "kgorch.worker.checkpoint",
        "kgorch.worker.ranks",
        "kgorch.worker.telemetry",
        "kgorch.worker.tagged_json",
        "kgorch.core.checkpoint.retention",
        *RANKS,
    },
    "kgorch.worker.memory": {
        "kgorch.worker.memory",
        "kgorch.worker.ranks",
        "kgorch.worker.health",
        "kgorch.worker.data.batches",
        "kgorch.worker.checkpoint.state_codec",
        "kgorch.worker.rng_state",
        "kgorch.core.memory.memory_ladder",
        *RANKS,
    },
    "kgorch.worker.audit": {
        "kgorch.worker.audit",
        "kgorch.worker.checkpoint.state_codec",
        "kgorch.worker.data",
        "kgorch.worker.memory.microbatch",
        "kgorch.worker.optimizer_steps",
        "kgorch.worker.session_state",
        *RANKS,
    },
    "kgorch.worker.foreign": {
        "kgorch.worker.foreign",
        "kgorch.worker.ranks",
        "kgorch.worker.telemetry",
        "kgorch.checkpoint.foreign_contents",
        "kgorch.core.checkpoint.foreign_checkpoint",
        "kgorch.core.checkpoint.log_order",
        "kgorch.core.metrics.metric_curve",
        "kgorch.core.program_command",
        "kgorch.system.file_hash",
        "kgorch",  # its version
        *RANKS,
    },
    "kgorch.worker.probe": {
        "kgorch.worker.probe",
        "kgorch.worker.data",
        "kgorch.worker.memory",
        "kgorch.worker.telemetry",
        *RANKS,
    },
    "kgorch.worker.standby_server": {
        "kgorch.launch.shim",
        "kgorch.launch.standby",
        "kgorch.system.process_title",
        "kgorch.worker.elastic_agent",
    },
    "kgorch.worker": {
        *RANKS,
        "kgorch.system.process_identity",
        "kgorch.system.process_title",
        "kgorch.core.former_names",
        "kgorch.core.program_command",
        "kgorch.worker",
        "kgorch.core.memory.memory_ladder",  # the ranks choose rungs themselves, in the midst of a step
        "kgorch.core.health.training_health",
        "kgorch.core.metrics.metric_curve",
        "kgorch.core.checkpoint.retention",  # which checkpoint of another stage is its best
        "kgorch",
    },
    "kgorch.db": {
        "kgorch.db",
        "kgorch.core.codes",
        "kgorch.core.durations",
        "kgorch.core.names",
        "kgorch.errors",
        "kgorch.untrusted_io",
    },  # it reads a stranger's database, too
    "kgorch.system": {
        "kgorch.system",
        "kgorch.errors",
        "kgorch.protocol",
        "kgorch.core.names",  # what a run may be called, which is a folder's name
    },
    "kgorch.hardware": {
        "kgorch.hardware",
        "kgorch.system",
        "kgorch.core",
        "kgorch.protocol",
        "kgorch.errors",
        "kgorch.db.samples",
    },
    "kgorch.snapshots": {*LOW, "kgorch.snapshots", "kgorch.checkpoint"},
    "kgorch.services": {
        *LOW,
        "kgorch.services",
        "kgorch.checkpoint",
        "kgorch.hardware",
        "kgorch.plan",
        "kgorch.db",
    },
    "kgorch.limits": {
        *LOW,
        "kgorch.limits",
        "kgorch.hardware",
        "kgorch.plan",
        "kgorch.platforms",
        "kgorch.db",
    },
    "kgorch.slurm": {*LOW, "kgorch.slurm", "kgorch.db"},
    "kgorch.launch": {
        *LOW,
        "kgorch.launch",
        "kgorch.checkpoint",
        "kgorch.hardware",
        "kgorch.plan",
        "kgorch.services",
        "kgorch.snapshots",
        "kgorch",
        "kgorch.db",
    },
    "kgorch.nodes": {
        *LOW,
        "kgorch.nodes",
        "kgorch.hardware",
        "kgorch.launch",
        "kgorch.plan",
        "kgorch.snapshots",
        "kgorch",  # its version
    },
    "kgorch.supervisor": {
        *LOW,
        "kgorch.supervisor",
        "kgorch.nodes",
        "kgorch.checkpoint",
        "kgorch.hardware",
        "kgorch.launch",
        "kgorch.limits",
        "kgorch.plan",
        "kgorch.services",
        "kgorch.snapshots",
        "kgorch.db",
    },
    "kgorch.admission": {
        *LOW,
        "kgorch.nodes",
        "kgorch.admission",
        "kgorch.slurm",
        "kgorch.checkpoint",
        "kgorch.hardware",
        "kgorch.launch",
        "kgorch.limits",
        "kgorch.plan",
        "kgorch.platforms",
        "kgorch.services",
        "kgorch.supervisor",
        "kgorch.db",
        "kgorch",  # its version
    },
    "kgorch.scheduler": {
        *LOW,
        "kgorch.scheduler",
        "kgorch.slurm",
        "kgorch.admission",
        "kgorch.hardware",
        "kgorch.launch",
        "kgorch.limits",
        "kgorch.platforms",
        "kgorch.supervisor.ending_files",
        "kgorch.db",
    },
    "kgorch.preflight": {
        *LOW,
        "kgorch.nodes",
        "kgorch.preflight",
        "kgorch.admission",
        "kgorch.checkpoint",
        "kgorch.hardware",
        "kgorch.launch",
        "kgorch.limits",
        "kgorch.plan",
        "kgorch.platforms",
        "kgorch.snapshots",
        "kgorch.db",
    },
    "kgorch.remote.places.kaggle": {
        "kgorch.remote.places.kaggle",
        "kgorch.remote.place",
        "kgorch.core.remote",
        "kgorch.system.redaction",
        "kgorch.untrusted_io",
    },
    "kgorch.remote.place": {"kgorch.core.remote"},
    "kgorch.remote.session": {"kgorch.remote.session"},
    "kgorch.remote": {
        *LOW,
        "kgorch.remote",
        "kgorch.slurm",
        "kgorch.admission",
        "kgorch.checkpoint",
        "kgorch.limits",
        "kgorch.plan",
        "kgorch.platforms",
        "kgorch.services",
        "kgorch.db",
        "kgorch",  # its version
    },
    "kgorch.report": {
        *LOW,
        "kgorch.report",
        "kgorch.slurm",
        "kgorch.admission",
        "kgorch.checkpoint",
        "kgorch.hardware",
        "kgorch.launch",
        "kgorch.limits",
        "kgorch.plan",
        "kgorch.platforms",
        "kgorch.preflight",
        "kgorch.snapshots",
        "kgorch.supervisor",
        "kgorch.db",
        "kgorch",  # its version
    },
    "kgorch.trackers": {
        *LOW,
        "kgorch.trackers",
        "kgorch.plan",
        "kgorch.report",
        "kgorch.db",
    },
    "kgorch.api": {*LOW, "kgorch.cli.lookup", "kgorch.plan", "kgorch.report", "kgorch.db"},
    "kgorch.notebook": {
        *LOW,
        "kgorch.notebook",
        "kgorch.api",
        "kgorch.cli.display",
        "kgorch.cli.lookup",
        "kgorch.report",
        "kgorch",  # of which it is a part
    },
    "kgorch.web": {
        "kgorch.slurm",
        *LOW,
        "kgorch.web",
        "kgorch.admission",
        "kgorch.checkpoint",
        "kgorch.hardware",
        "kgorch.platforms",
        "kgorch.report",
        "kgorch.scheduler",
        "kgorch.db",
    },
    "kgorch.cli": {"kgorch"},
    "kgorch.errors": {"kgorch.core.error_codes"},
    "kgorch.protocol": {"kgorch.protocol"},
    "kgorch.untrusted_io": {"kgorch.errors"},
    "kgorch.checkpoint.registry": {
        "kgorch.checkpoint",
        "kgorch.core.checkpoint.retention",
        "kgorch.core.codes",
        "kgorch.errors",
        "kgorch.plan",
        "kgorch.db",
    },
    "kgorch.checkpoint.foreign_contents": {
        "kgorch.checkpoint",
        "kgorch.core.checkpoint.foreign_checkpoint",
        "kgorch.errors",
        "kgorch.system.file_hash",
    },
    "kgorch.checkpoint.verifier": {
        "kgorch.checkpoint",
        "kgorch.errors",
        "kgorch.protocol.snapshot_messages",
        "kgorch.system.clock",
        "kgorch.db.rows",
    },
    "kgorch.checkpoint": {  # ranks load it
        "kgorch.checkpoint",
        "kgorch.errors",
        "kgorch.untrusted_io",
        "kgorch.protocol.values",
        "kgorch.system.files",
        "kgorch.system.file_hash",
    },
    "kgorch.plan": {"kgorch.plan", "kgorch.core", "kgorch.platforms", "kgorch.errors"},
}
STANDARD_LIBRARY_ALONE = (
    "kgorch.core",
    "kgorch.protocol",
    "kgorch.errors",
    "kgorch.untrusted_io",
    "kgorch.checkpoint.safetensors_header",
    "kgorch.system.clock",
    "kgorch.platforms",
    "kgorch.system.files",
    "kgorch.launch.shim",
    "kgorch.remote.session",
)


def _module(path: Path) -> str:
    top, *rest = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(["kgorch", *([] if top == "orchestrator" else [top]), *rest]).removesuffix(".__init__")


def _imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inside = (ROOT / Path(*node.module.split("."))).is_dir()
            found |= {f"{node.module}.{alias.name}" if inside else node.module for alias in node.names}
    return found


def _below(name: str, parent: str) -> bool:
    return name == parent or name.startswith(parent + ".")


@pytest.mark.parametrize("path", FILES, ids=_module)
def test_imports_point_one_way(path):
    module, imports = _module(path), _imports(path)
    package = next((name for name in MAY if _below(module, name)), None)
    ours = {name for name in imports if name.split(".")[0] == "kgorch"}
    if package:
        allowed = MAY[package]
        for name in ours:
            bare = (
                name
                in {
                    "kgorch.__version__",
                    *(f"kgorch.{name}" for name in ("attach", "untrusted_io", "worker")),
                }
                or name == "kgorch"
            )
            fits = any(_below(name, parent) for parent in allowed if parent != "kgorch")
            assert fits or ("kgorch" in allowed and (bare or package == "kgorch.cli")), f"{module} imports {name}"
    if any(_below(module, alone) for alone in STANDARD_LIBRARY_ALONE):
        strangers = {name for name in imports - ours if name.split(".")[0] not in sys.stdlib_module_names}
        assert not strangers, f"{module} imports {strangers}"
    # importing Kaggle's client asks the network, and makes configuration of the environment
    kaggle = [name for name in imports if name.split(".")[0] in ("kaggle", "kagglesdk")]
    assert not kaggle or module == "kgorch.remote.places.kaggle.client_process", f"{module} imports {kaggle}"
    # they start threads, take seconds to import, and may hang: in the process of one tracker alone (services/trackers.py)
    heavy = [name for name in imports if name.split(".")[0] in ("tensorboard", "wandb", "mlflow")]
    assert not heavy or _below(module, "kgorch.trackers"), f"{module} imports {heavy}"
    # the package itself hands out names of the worker, lazily: test_package.py
    if module != "kgorch" and not _below(module, "kgorch.worker"):
        assert not [name for name in imports if name.split(".")[0] == "torch"], f"{module} imports torch"
        assert not [name for name in ours if _below(name, "kgorch.worker")], f"{module} imports the worker"


PACKAGES = [path.parent for path in FILES if path.name == "__init__.py" and ROOT / "orchestrator" in path.parents[1:]]


@pytest.mark.parametrize("folder", PACKAGES, ids=lambda folder: folder.name)
def test_each_package_says_what_it_is_for_and_its_imports_are_bounded(folder):
    module = _module(folder / "__init__.py")
    assert any(_below(module, name) for name in MAY), f"{module}: say in MAY what it may import"
    said = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    assert said, f"{module} says nothing of itself"


def _loaded_by(statement: str) -> set[str]:
    program = f"import sys; {statement}; print(*sys.modules)"
    return set(
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    )


def test_the_workers_door_is_cheap():
    loaded = _loaded_by("import kgorch.worker")
    assert not loaded & {"torch", "sqlalchemy", "click", "pydantic", "numpy", "rich"}


def test_command_line_and_supervisor_never_load_torch():
    loaded = _loaded_by(
        "import kgorch.cli.commands.training.start, kgorch.cli.commands.storage.checkpoints,"
        " kgorch.admission.session_start, kgorch.checkpoint.export"
    )
    assert "torch" not in loaded and "numpy" not in loaded
    assert "apscheduler" in loaded


def test_status_does_not_pay_for_what_start_needs():
    loaded = _loaded_by("import kgorch.cli.commands.inspection.status, kgorch.report.run_view, kgorch.db.engine")
    assert not loaded & {
        "pydantic",
        "alembic",
        "apscheduler",
        "torch",
        "psutil",
        "rich",
        "kgorch.core.session.lifecycle",
    }


def test_a_daemon_that_waits_keeps_in_memory_what_it_needs():
    loaded = _loaded_by("import kgorch.cli.commands.unattended.daemon, kgorch.scheduler.daemon, kgorch.db.engine")
    assert not loaded & {
        "pydantic",
        "alembic",
        "torch",
        "rich",
        "kgorch.plan",
        "kgorch.admission.session_start",
    }


def test_the_shim_stays_small():
    loaded = _loaded_by("import kgorch.launch.shim")
    assert not loaded & {"torch", "sqlalchemy", "psutil", "pydantic", "apscheduler"}


SCREENS = {"render", "screen", "import_progress", "check_tables"}
"""Modules that have a rich console: tables, a whole screen, a bar of copying, and a page that is a file. What they are given has
passed the door."""


@pytest.mark.parametrize("path", sorted(ROOT.glob("orchestrator/cli/**/*.py")), ids=lambda path: path.stem)
def test_the_command_line_prints_through_one_door(path):
    """render.echo and what calls it: no text reaches a terminal with what a terminal would obey."""
    if path.stem == "render":
        return
    for node in ast.walk(ast.parse(path.read_text())):
        called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        assert called not in ("print", "click.echo", "click.secho", "click.echo_via_pager"), (
            f"{path}:{node.lineno}: {called}"
        )
        assert not re.match(r"sys\.(__)?std(out|err)", called), f"{path}:{node.lineno}: {called}"
        assert called != "error.show" or node.args, f"{path}:{node.lineno}: an error of click's goes into a text first"
        assert path.stem in SCREENS or not called.endswith("Console"), f"{path}:{node.lineno}: {called}"
