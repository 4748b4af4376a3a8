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
    "orchestrator.core",
    "orchestrator.errors",
    "orchestrator.untrusted_io",
    "orchestrator.protocol",
    "orchestrator.system",
}
"""What everything above may use."""

RANKS = {
    "orchestrator.core.codes",
    "orchestrator.protocol",
    "orchestrator.checkpoint.manifest",
    "orchestrator.checkpoint.folder",
    "orchestrator.checkpoint.verify",
    "orchestrator.checkpoint.safetensors_header",
    "orchestrator.untrusted_io",
    "orchestrator.errors",
    "orchestrator.system.attempt_files",
    "orchestrator.system.clock",
    "orchestrator.system.files",
}
"""What every part of the worker may use: little, for each rank loads it."""

# package → what of this project it may import; the rest of the world is checked below
MAY = {
    "orchestrator.core": {"orchestrator.core"},
    "orchestrator.platforms": {"orchestrator.platforms"},
    # the packages of the worker, the lowest first
    "orchestrator.worker.rng_state": {*RANKS, "orchestrator.worker.tagged_json"},
    "orchestrator.worker.tagged_json": RANKS,
    "orchestrator.worker.ranks": {
        "orchestrator.worker.ranks",
        "orchestrator.worker.rng_state",
        *RANKS,
    },
    "orchestrator.worker.telemetry": {
        "orchestrator.worker.telemetry",
        "orchestrator.core.metric_curve",
        *RANKS,
    },
    "orchestrator.worker.health": {
        "orchestrator.worker.health",
        "orchestrator.worker.telemetry",
        "orchestrator.core.training_health",
        *RANKS,
    },
    "orchestrator.worker.data": {
        "orchestrator.worker.data",
        "orchestrator.worker.ranks",
        "orchestrator.worker.telemetry",
        "orchestrator.worker.rng_state",
        "orchestrator.worker.tagged_json",
        *RANKS,
    },
    "orchestrator.worker.checkpoint": {
        "orchestrator.worker.checkpoint",
        "orchestrator.worker.ranks",
        "orchestrator.worker.telemetry",
        "orchestrator.worker.tagged_json",
        "orchestrator.core.retention",
        *RANKS,
    },
    "orchestrator.worker.memory": {
        "orchestrator.worker.memory",
        "orchestrator.worker.ranks",
        "orchestrator.worker.health",
        "orchestrator.worker.data.batches",
        "orchestrator.worker.checkpoint.state_codec",
        "orchestrator.worker.rng_state",
        "orchestrator.core.memory_ladder",
        *RANKS,
    },
    "orchestrator.worker.probe": {
        "orchestrator.worker.probe",
        "orchestrator.worker.data",
        "orchestrator.worker.memory",
        "orchestrator.worker.telemetry",
        *RANKS,
    },
    "orchestrator.worker": {
        *RANKS,
        "orchestrator.worker",
        "orchestrator.core.memory_ladder",  # the ranks choose rungs themselves, in the midst of a step
        "orchestrator.core.training_health",
        "orchestrator.core.metric_curve",
        "orchestrator.core.retention",  # which checkpoint of another stage is its best
        "orchestrator",
    },
    "db": {
        "db",
        "orchestrator.core.codes",
        "orchestrator.errors",
        "orchestrator.untrusted_io",
    },  # it reads a stranger's database, too
    "orchestrator.system": {
        "orchestrator.system",
        "orchestrator.errors",
        "orchestrator.protocol",
        "orchestrator.core.names",  # what a run may be called, which is a folder's name
    },
    "orchestrator.hardware": {
        "orchestrator.hardware",
        "orchestrator.system",
        "orchestrator.core",
        "orchestrator.protocol",
        "orchestrator.errors",
        "db.samples",
    },
    "orchestrator.snapshots": {*LOW, "orchestrator.snapshots", "orchestrator.checkpoint"},
    "orchestrator.services": {
        *LOW,
        "orchestrator.services",
        "orchestrator.checkpoint",
        "orchestrator.hardware",
        "orchestrator.plan",
        "db",
    },
    "orchestrator.limits": {
        *LOW,
        "orchestrator.limits",
        "orchestrator.hardware",
        "orchestrator.plan",
        "orchestrator.platforms",
        "db",
    },
    "orchestrator.launch": {
        *LOW,
        "orchestrator.launch",
        "orchestrator.checkpoint",
        "orchestrator.hardware",
        "orchestrator.plan",
        "orchestrator.services",
        "orchestrator.snapshots",
        "orchestrator",
        "db",
    },
    "orchestrator.supervisor": {
        *LOW,
        "orchestrator.supervisor",
        "orchestrator.checkpoint",
        "orchestrator.hardware",
        "orchestrator.launch",
        "orchestrator.limits",
        "orchestrator.plan",
        "orchestrator.services",
        "orchestrator.snapshots",
        "db",
    },
    "orchestrator.admission": {
        *LOW,
        "orchestrator.admission",
        "orchestrator.checkpoint",
        "orchestrator.hardware",
        "orchestrator.launch",
        "orchestrator.limits",
        "orchestrator.plan",
        "orchestrator.platforms",
        "orchestrator.services",
        "orchestrator.supervisor",
        "db",
    },
    "orchestrator.scheduler": {
        *LOW,
        "orchestrator.scheduler",
        "orchestrator.admission",
        "orchestrator.hardware",
        "orchestrator.launch",
        "orchestrator.platforms",
        "db",
    },
    "orchestrator.preflight": {
        *LOW,
        "orchestrator.preflight",
        "orchestrator.admission",
        "orchestrator.checkpoint",
        "orchestrator.hardware",
        "orchestrator.launch",
        "orchestrator.limits",
        "orchestrator.plan",
        "orchestrator.platforms",
        "orchestrator.snapshots",
        "db",
    },
    "orchestrator.report": {
        *LOW,
        "orchestrator.report",
        "orchestrator.admission",
        "orchestrator.checkpoint",
        "orchestrator.hardware",
        "orchestrator.launch",
        "orchestrator.limits",
        "orchestrator.plan",
        "orchestrator.platforms",
        "orchestrator.preflight",
        "orchestrator.snapshots",
        "orchestrator.supervisor",
        "db",
    },
    "orchestrator.cli": {"orchestrator", "db"},
    "orchestrator.errors": set(),
    "orchestrator.protocol": {"orchestrator.protocol"},
    "orchestrator.untrusted_io": {"orchestrator.errors"},
    "orchestrator.checkpoint.registry": {
        "orchestrator.checkpoint",
        "orchestrator.core.retention",
        "orchestrator.core.codes",
        "orchestrator.errors",
        "orchestrator.plan",
        "db",
    },
    "orchestrator.checkpoint.verifier": {
        "orchestrator.checkpoint",
        "orchestrator.errors",
        "orchestrator.protocol.snapshot_messages",
        "orchestrator.system.clock",
        "db.records",
    },
    "orchestrator.checkpoint": {  # ranks load it
        "orchestrator.checkpoint",
        "orchestrator.errors",
        "orchestrator.untrusted_io",
        "orchestrator.protocol.values",
        "orchestrator.system.files",
        "orchestrator.system.hashing",
    },
    "orchestrator.plan": {"orchestrator.plan", "orchestrator.core", "orchestrator.platforms", "orchestrator.errors"},
}
STANDARD_LIBRARY_ALONE = (
    "orchestrator.core",
    "orchestrator.protocol",
    "orchestrator.errors",
    "orchestrator.untrusted_io",
    "orchestrator.checkpoint.safetensors_header",
    "orchestrator.system.clock",
    "orchestrator.platforms",
    "orchestrator.system.files",
    "orchestrator.launch.shim",
)


def _module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


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
    ours = {name for name in imports if name.split(".")[0] in ("orchestrator", "db", "workloads")}
    if package:
        allowed = MAY[package]
        for name in ours:
            bare = (
                name
                in {
                    "orchestrator.__version__",
                    *(f"orchestrator.{name}" for name in ("untrusted_io", "worker")),
                }
                or name == "orchestrator"
            )
            fits = any(_below(name, parent) for parent in allowed if parent != "orchestrator")
            assert fits or ("orchestrator" in allowed and (bare or package == "orchestrator.cli")), (
                f"{module} imports {name}"
            )
    if any(_below(module, alone) for alone in STANDARD_LIBRARY_ALONE):
        strangers = {name for name in imports - ours if name.split(".")[0] not in sys.stdlib_module_names}
        assert not strangers, f"{module} imports {strangers}"
    if not _below(module, "orchestrator.worker"):
        assert not [name for name in imports if name.split(".")[0] == "torch"], f"{module} imports torch"
        assert not [name for name in ours if _below(name, "orchestrator.worker")], f"{module} imports the worker"


PACKAGES = sorted(path.parent for path in ROOT.glob("orchestrator/*/**/__init__.py"))


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
    loaded = _loaded_by("import orchestrator.worker")
    assert not loaded & {"torch", "sqlalchemy", "click", "pydantic", "numpy", "rich"}


def test_command_line_and_supervisor_never_load_torch():
    loaded = _loaded_by(
        "import orchestrator.cli.start, orchestrator.admission.session_start, orchestrator.cli.checkpoints,"
        " orchestrator.checkpoint.export"
    )
    assert "torch" not in loaded and "numpy" not in loaded
    assert "apscheduler" in loaded


def test_status_does_not_pay_for_what_start_needs():
    loaded = _loaded_by("import orchestrator.cli.status, orchestrator.report.run_view, db.engine")
    assert not loaded & {
        "pydantic",
        "alembic",
        "apscheduler",
        "torch",
        "psutil",
        "rich",
        "orchestrator.core.lifecycle",
    }


def test_a_daemon_that_waits_keeps_in_memory_what_it_needs():
    loaded = _loaded_by("import orchestrator.cli.daemon, orchestrator.scheduler.daemon, db.engine")
    assert not loaded & {
        "pydantic",
        "alembic",
        "torch",
        "rich",
        "orchestrator.plan",
        "orchestrator.admission.session_start",
    }


def test_the_shim_stays_small():
    loaded = _loaded_by("import orchestrator.launch.shim")
    assert not loaded & {"torch", "sqlalchemy", "psutil", "pydantic", "apscheduler"}


SCREENS = {"render", "watch", "foreground", "check"}
"""Modules that have a rich console: tables, a whole screen, a bar of copying, and a page that is a file. What they are given has
passed the door."""


@pytest.mark.parametrize("path", sorted(ROOT.glob("orchestrator/cli/*.py")), ids=lambda path: path.stem)
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
