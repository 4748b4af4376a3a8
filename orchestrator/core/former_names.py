"""Former module names in plans: a run keeps its plan, which may name a reference training as `workloads.vqa.train`."""

from __future__ import annotations


def current_name(module: str) -> str:
    """The name of today of a module or of an entry `module:function`; any other name as it is.

    Try the name as it stands first: a person may have a package `workloads` beside the plan.
    """
    return f"kgorch.{module}" if module.startswith("workloads.") else module
