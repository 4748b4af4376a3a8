"""Whether the files that a plan names exist: scripts, modules with their functions, weights, data to be cached.

Modules are parsed and not imported: the import of a training script may load PyTorch, take a minute, or do anything else.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import shutil
from pathlib import Path

from kgorch.core.former_names import current_name
from kgorch.core.program_command import module_of
from kgorch.errors import PlanError, nearest
from kgorch.plan.model import Plan


def check_entries(plan: Plan, workdir: Path) -> None:
    """Check that all files and functions that the plan names exist.

    Args:
        workdir: the plan's folder.
    Raises: PlanError naming the stage, what is missing, and the nearest name that exists.
    """
    for source in plan.data.cache if plan.data.cache != "auto" else ():
        if not (workdir / source).exists():
            raise PlanError(
                f"data.cache: there is no {workdir / source}", next_step="give it relative to the plan's folder"
            )
    for stage in plan.stage:
        if stage.weights and not (workdir / stage.weights.file).is_file():
            raise PlanError(
                f"stage {stage.name!r}: there is no weights file {workdir / stage.weights.file}",
                next_step="give weights relative to the plan's folder",
            )
        if module := module_of(stage.entry):
            _check_module(stage.name, module, workdir)
        elif stage.is_script:
            if not (workdir / stage.entry).is_file():
                raise PlanError(
                    f"stage {stage.name!r}: there is no script {workdir / stage.entry}",
                    next_step="give entry relative to the plan's folder",
                )
        elif stage.foreign:
            _check_executable(stage.name, stage.entry, workdir)
        else:
            _check_function(stage.name, "entry", stage.entry, workdir)
        if stage.preflight:
            _check_function(stage.name, "preflight", stage.preflight, workdir)


def _check_module(stage: str, module: str, workdir: Path) -> None:
    """Check that `python -m module` finds a file: a module, or a package with __main__.py. Raises: PlanError."""
    if program_of_module(module, workdir) is not None:
        return
    path = _module_file(module, workdir)
    if path is not None:
        raise PlanError(
            f"stage {stage!r}: {module!r} is a package without a __main__.py, so -m cannot run it",
            f"found {path}",
            next_step="name a module of it in the stage's entry",
        )
    raise PlanError(
        f"stage {stage!r}: there is no module {module!r}",
        f"searched {workdir} and the installed packages",
        next_step="correct the stage's entry",
    )


def _check_executable(stage: str, entry: str, workdir: Path) -> None:
    """Check that a program exists and may be run: below the plan's folder, else on PATH. Raises: PlanError."""
    path = workdir / entry
    if path.is_file():
        if not os.access(path, os.X_OK):
            raise PlanError(f"stage {stage!r}: {path} is not executable", next_step=f"chmod +x {path}")
    elif "/" in entry or shutil.which(entry) is None:
        raise PlanError(
            f"stage {stage!r}: there is no program {entry!r}",
            f"searched {workdir}" + ("" if "/" in entry else " and the folders of PATH"),
            next_step="give entry relative to the plan's folder; its arguments go into argv",
        )


def _check_function(stage: str, key: str, value: str, workdir: Path) -> None:
    """Check that `value`, a "module:function", exists. Raises: PlanError."""
    module, _, function = value.partition(":")
    path = _module_file(module, workdir) or _module_file(current_name(module), workdir)
    if path is None:
        raise PlanError(
            f"stage {stage!r}: there is no module {module!r}",
            f"searched {workdir} and the installed packages",
            next_step=f"correct the stage's {key}",
        )
    names = _bound_names(path)
    if names is not None and function not in names:
        raise PlanError(
            f"stage {stage!r}: {path} has no {function!r}{nearest(function, names)}",
            next_step=f"correct the stage's {key}",
        )


def program_of_module(module: str, workdir: Path) -> Path | None:
    """The file that `python -m module` runs: the module, or of a package its __main__.py. None where there is none.

    Args:
        workdir: the plan's folder.
    """
    path = _module_file(module, workdir)
    if path is None:  # a folder without __init__.py is a package, too, which _module_file does not know
        path = workdir.joinpath(*module.split("."), "__init__.py")
    path = path.with_name("__main__.py") if path.name == "__init__.py" else path
    return path if path.is_file() else None


def _module_file(module: str, workdir: Path) -> Path | None:
    """The file of a module, below the plan's folder or else as installed; None where there is none.

    Only its top package is looked up by importlib, because find_spec of a submodule imports the packages above it.
    """
    top, *rest = module.split(".")
    roots = [workdir / top]
    try:
        if (spec := importlib.util.find_spec(top)) is not None:
            roots += [Path(place) for place in spec.submodule_search_locations or []] or [
                Path(spec.origin or "").with_suffix("")
            ]
    except (ImportError, ValueError):  # ValueError: a module that is loaded without a spec, as __main__
        pass
    # the plan's folder comes first, as in sys.path of the ranks
    for root in roots:
        base = root.joinpath(*rest)
        for candidate in (base.with_suffix(".py"), base / "__init__.py"):
            if candidate.is_file():
                return candidate
    return None


def _bound_names(path: Path) -> set[str] | None:
    """The names that a module may bind; None where they are not known: `import *`, a syntax error, an unreadable file.

    Names bound within functions and classes are among them: a mistake may be missed, but no existing function is refused.
    """
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return None
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom | ast.Import):
            if any(alias.name == "*" for alias in node.names):  # binds what the other module decides
                return None
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names
