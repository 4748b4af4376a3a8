"""The `[[stage]]` tables of a plan: which program runs, with which arguments, weights and inputs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from datetime import date, time
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from kgorch.core.program_command import FlagStyle, Launcher, flag_names, module_of
from kgorch.errors import nearest
from kgorch.plan.diagnostics import problem_at
from kgorch.plan.foreign import ForeignSection
from kgorch.plan.plan_table import PlanTable
from kgorch.plan.quantities import Name
from kgorch.plan.toml_document import KeyPath
from kgorch.plan.toml_values import format_value

FUNCTION_PATTERN = r"[A-Za-z_][\w.]*:[A-Za-z_]\w*"
"""`package.module:function`; nothing is imported to check more, see entries.py."""

_ENTRIES = 'expected "module:function" or the path of a script, "train.py", or "-m package.module"'

MAX_NODES = 1024

WEIGHTS_SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")
"""Files that PyTorch or safetensors read without running code from them. Other formats need a conversion."""


class WeightsSection(PlanTable):
    """Weights that a stage starts from where it has no checkpoint to resume.

    Attributes:
        file (str): path relative to the plan's folder.
        into (str | None): the tracked module that takes them, or a part of one, "model.encoder"; None for "model", or the
            only module that is tracked.
        prefix (str): only tensors whose names start so are loaded, under the rest of their names.
        strict (bool): False loads the tensors that fit and reports the others, instead of failing.
    """

    file: str
    into: str | None = None
    prefix: str = ""
    strict: bool = True

    @field_validator("file")
    @classmethod
    def _check_suffix(cls, value: str) -> str:
        if not value.endswith(WEIGHTS_SUFFIXES):
            raise ValueError(f"expected a weights file ({', '.join(WEIGHTS_SUFFIXES)})")
        return value


def _as_table(value: Any) -> Any:
    """`weights = "resnet.pth"` is short for `weights = { file = "resnet.pth" }`."""
    return {"file": value} if isinstance(value, str) else value


def _dates(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """TOML's dates and times in a value, which alone JSON cannot hold, and their places in it."""
    if isinstance(value, date | time):
        yield path, value
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from _dates(item, (*path, key))


class StageSection(PlanTable):
    """One program of the run. Stages run one after another.

    Attributes:
        name (str): also the name of the folder of its checkpoints.
        entry (str): "module:function", called with `args`; or a program, which gets them as flags: the path of a script,
            "-m package.module", or, with `foreign`, an executable.
        quick_test_of (str | None): another stage, of which this one does a single step, an evaluation over two batches and a
            save. It inherits that stage's entry, ranks, args one by one, weights, inputs and preflight, where it gives none
            of its own; with an entry of its own it inherits no args.
        ranks (int | "auto"): number of processes; "auto" for one per visible GPU.
        nodes (int | "auto" | str): machines that train together, each with `ranks` processes (docs/nodes.md): a number; "auto" for
            all of the allocation; "2..4" for as many of the allocation as answer, at least 2.
        args (dict): anything that JSON can hold, for it is passed on as JSON.
        argv (list[str]): words of a program's command line, before the flags.
        flags (str): how `args` become flags (core/program_command.py).
        launcher (str): what starts the processes; another one than torchrun only for a program that is `foreign`. "torchrun-cli"
            is the plain command, for a program that cannot be forked from a process that has imported PyTorch.
        integration ("auto" | "off"): whether a Trainer of a known library is carried without a change of the script.
        foreign (ForeignSection | None): the program saves and resumes by itself.
        weights (WeightsSection | None): what it starts from where there is nothing to resume; a path alone is short for `file`.
        inputs (list[str]): names of `args` whose files or folders must exist and not be empty before a session starts.
        preflight (str | None): "module:function", called before a session starts with those of the `args` that it names.
    """

    name: Name
    entry: str
    quick_test_of: Name | None = None
    ranks: Literal["auto"] | Annotated[int, Field(ge=1, le=1024)] = "auto"
    nodes: Literal["auto"] | Annotated[int, Field(ge=1, le=MAX_NODES)] | str = 1
    args: dict[str, Any] = {}
    argv: list[str] = []
    flags: Literal["--key value", "--key=value", "key=value"] = "--key value"
    launcher: Literal["torchrun", "torchrun-cli", "accelerate", "none"] = "torchrun"
    integration: Literal["auto", "off"] = "auto"
    foreign: ForeignSection | None = None
    weights: Annotated[WeightsSection | None, BeforeValidator(_as_table)] = None
    inputs: list[str] = []
    preflight: str | None = None

    @field_validator("nodes")
    @classmethod
    def _check_nodes(cls, value: int | str) -> int | str:
        if value != "auto" and node_bounds(value) is None:
            raise ValueError(f'expected a number from 1 to {MAX_NODES}, "auto", or a range such as "1..4"')
        return value

    @field_validator("args")
    @classmethod
    def _check_json(cls, value: dict[str, Any]) -> dict[str, Any]:
        try:
            json.dumps(value, allow_nan=True)
        except TypeError:
            path, found = next(_dates(value))
            expected = "expected strings, numbers, true, false, lists and tables (a date goes in quotes)"
            raise problem_at(f"{expected}; found {format_value(found)}", path) from None
        return value

    @field_validator("entry")
    @classmethod
    def _check_entry(cls, value: str) -> str:
        is_module = value.startswith("-m")
        if not value.strip() or "\0" in value or (module_of(value) == "" if is_module else value.startswith("-")):
            raise ValueError(_ENTRIES)
        return value

    @field_validator("argv")
    @classmethod
    def _check_argv(cls, value: list[str]) -> list[str]:
        if wrong := [word for word in value if "\0" in word]:
            raise ValueError(f"expected words without NUL; one is {wrong[0]!r:.80}")
        return value

    @field_validator("preflight")
    @classmethod
    def _check_preflight(cls, value: str | None) -> str | None:
        # no script: it is called in a process of its own, and its result is read
        if value is not None and not re.fullmatch(FUNCTION_PATTERN, value):
            raise ValueError('expected "module:function"')
        return value

    @model_validator(mode="after")
    def _check_program(self) -> StageSection:
        """What entry, launcher and foreign allow together."""
        is_function, is_program = re.fullmatch(FUNCTION_PATTERN, self.entry), self.is_script or module_of(self.entry)
        if self.foreign is None:
            if not is_function and not is_program:
                problem = f"{_ENTRIES}; found {format_value(self.entry)} (an executable needs [stage.foreign])"
                raise problem_at(problem, ("entry",))
            if Launcher(self.launcher) not in (Launcher.TORCHRUN, Launcher.TORCHRUN_CLI):
                problem = f"{format_value(self.launcher)} starts programs of [stage.foreign] only; others need torchrun"
                raise problem_at(problem, ("launcher",))
        elif is_function:
            problem = 'a program of [stage.foreign] is a script, "-m package.module" or an executable, not a function'
            raise problem_at(f"{problem}; found {format_value(self.entry)}", ("entry",))
        if is_function and self.argv:
            raise problem_at("a function takes no words: give them as args, by name", ("argv",))
        if self.foreign and self.nodes != 1:
            raise problem_at("a program of [stage.foreign] runs on one machine", ("nodes",))
        if self.foreign and self.weights:
            raise problem_at(
                "weights are loaded by the SDK; give the program its own flag for them, in args", ("weights",)
            )
        return self

    @model_validator(mode="after")
    def _check_flags(self) -> StageSection:
        """No flag is given twice: a parser would take the last one, and a person would look at the first."""
        given = dict.fromkeys(self.args, "args") if not re.fullmatch(FUNCTION_PATTERN, self.entry) else {}
        places: list[tuple[tuple[str, ...], list[str]]] = [(("argv",), self.argv)]
        if self.foreign:
            places += [(("foreign", "first"), self.foreign.first), (("foreign", "again"), self.foreign.again)]
        common = dict(given)
        for path, words in places:
            names = list(flag_names(words, self.flags))
            if twice := next((name for name in names if name in common), None):
                label = ".".join(path)
                shown = twice if FlagStyle(self.flags) is FlagStyle.BARE else f"--{twice}"
                raise problem_at(f"the flag {shown} is given twice: in {label} and in {common[twice]}", path)
            if path == ("argv",):
                common |= dict.fromkeys(names, "argv")
        return self

    @property
    def is_script(self) -> bool:
        """Whether the entry is the path of a Python script."""
        return self.entry.endswith(".py")

    @model_validator(mode="after")
    def _check_inputs(self) -> StageSection:
        for number, name in enumerate(self.inputs):
            if name not in self.args:
                names = ", ".join(self.args) or "none"
                text = f"args has no {format_value(name)}{nearest(name, self.args)}; args of this stage: {names}"
                raise problem_at(text, ("inputs", number))
            if not self.paths_of(name):
                value = format_value(self.args[name])
                text = f"expected the path of a file or folder, or a list of them; found {value}"
                raise problem_at(text, ("args", name))
        return self

    def paths_of(self, name: str) -> list[str]:
        """The paths that an argument holds, as the plan writes them; empty where it is neither a path nor a list of paths."""
        value = self.args[name]
        paths = value if isinstance(value, list) else [value]
        return paths if all(isinstance(path, str) and path for path in paths) else []


def node_bounds(nodes: int | str) -> tuple[int, int] | None:
    """The least and the most machines of a stage that names a number or a range; None for anything else."""
    if isinstance(nodes, int):
        return nodes, nodes
    match = re.fullmatch(r"([1-9]\d{0,3})\.\.([1-9]\d{0,3})", nodes)
    bounds = (int(match[1]), int(match[2])) if match else (0, 0)
    return bounds if 1 <= bounds[0] <= bounds[1] <= MAX_NODES else None


_INHERITED = (
    "entry",
    "ranks",
    "nodes",
    "args",
    "argv",
    "flags",
    "launcher",
    "integration",
    "weights",
    "inputs",
    "preflight",
)


def inherit_quick_tests(stages: list[Any]) -> list[Any]:
    """Complete the quick tests among the stages of an unvalidated plan.

    This comes before validation, because a quick test without an entry of its own would otherwise lack a required key.
    A stage of a wrong type is returned as it is: validation reports it.

    Raises: PydanticCustomError for a quick test of no other stage, or of another quick test.
    """
    by_name = {
        stage["name"]: stage for stage in stages if isinstance(stage, dict) and isinstance(stage.get("name"), str)
    }
    return [_completed(stage, number, by_name) for number, stage in enumerate(stages)]


def _completed(stage: Any, number: int, by_name: Mapping[str, Any]) -> Any:
    tested_name = stage.get("quick_test_of") if isinstance(stage, dict) else None
    if not isinstance(tested_name, str):
        return stage
    tested = by_name.get(tested_name)
    if tested is None or tested is stage or "quick_test_of" in tested:
        others = [name for name, other in by_name.items() if other is not stage and "quick_test_of" not in other]
        raise problem_at(
            f"{format_value(tested_name)} is not a stage that can be tested{nearest(tested_name, others)}; "
            f"stages of the plan: {', '.join(others) or 'none'}",
            ("stage", number, "quick_test_of"),
        )
    if tested.get("foreign") is not None:
        raise problem_at(
            f"{format_value(tested_name)} is a program of [stage.foreign], which takes no single step for a test;"
            " kgorch check runs it briefly",
            ("stage", number, "quick_test_of"),
        )
    completed = {key: tested[key] for key in _INHERITED if key in tested} | stage
    inherited_args, own_args = tested.get("args"), stage.get("args")
    if "entry" not in stage and isinstance(inherited_args, dict) and isinstance(own_args, dict):
        completed["args"] = inherited_args | own_args
    inputs, args = completed.get("inputs"), completed.get("args")
    if "inputs" not in stage and isinstance(inputs, list) and isinstance(args, dict):
        # another entry may have fewer arguments; an input that names none would be refused
        completed["inputs"] = [name for name in inputs if isinstance(name, str) and name in args]
    return completed
