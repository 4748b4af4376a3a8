"""What the source of a training program says of how it saves and resumes, for `kgorch adopt`. The program is parsed and not run.

What cannot be found is left to the user, with a note: a wrong guess would be worse than a gap. Paths are followed through its names
(program_names.py).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from kgorch.core.program_command import FlagStyle, Launcher
from kgorch.plan.program_names import ProgramNames, called_name

_SAVES = {"save": 1, "save_file": 1, "save_checkpoint": 0, "save_pretrained": 0, "savez": 0, "save_state": 0}
"""Function → position of the path among its arguments; `save` is torch's."""

_WRITES = ("w", "wt", "w+")
"""Modes in which a file is written as text."""

SENTENCE_TRAINERS = {"SentenceTransformerTrainer", "CrossEncoderTrainer", "SparseEncoderTrainer"}

_RENAMES = ("rename", "replace", "move")
_SAYS = ("print", "echo", "write", "log", "debug", "info", "warning", "set_description", "set_postfix_str")
_PERCENT, _BRACES = re.compile(r"%[-+ #0-9.]*[a-zA-Z]"), re.compile(r"\{[^{}]*\}")
_POINTER = re.compile(r"(^|/)[^/.]*latest[^/.]*(\.txt)?$", re.IGNORECASE)
_STEP = re.compile(r"((?:global[_ ]?)?(?:step|iter(?:ation)?))(\W{1,4})$", re.IGNORECASE)
_LOSS = re.compile(r"(loss)(\W{1,4})$", re.IGNORECASE)

# what is written into the plan, for any format of a number: padded, negative, with an exponent, no number at all
_NUMBER = r"([-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|nan|inf))"
_COUNT = r"\s*(\d+)"


@dataclass(slots=True)
class ProgramFindings:
    """What was found.

    Attributes:
        library: that trains: "transformers", "lightning", "accelerate", "torch", "kgorch" for a script that calls attach(), or "".
        flags: how the program takes its flags.
        launcher: that suits the library.
        checkpoint: the place of its checkpoints; empty where none was found.
        incomplete: names of what is being written.
        again: words by which it continues.
        latest: ("file" or "link", path) of what names its newest checkpoint.
        stop: the signal that it handles; empty for none.
        step, loss: regular expressions for what it prints.
        step_file: (path, key) of a JSON file with its step.
        notes: what is left to the user.
    """

    library: str = ""
    flags: FlagStyle = FlagStyle.SPACE
    launcher: Launcher = Launcher.NONE
    checkpoint: str = ""
    incomplete: list[str] = field(default_factory=list)
    again: list[str] = field(default_factory=list)
    latest: tuple[str, str] | None = None
    stop: str = ""
    step: str = ""
    loss: str = ""
    step_file: tuple[str, str] | None = None
    notes: list[str] = field(default_factory=list)


def inspect(source: str, words: Sequence[str]) -> ProgramFindings:
    """Inspect a program. Raises: SyntaxError.

    Args:
        words: the command line that it is called with.
    """
    tree = ast.parse(source)
    modules = _modules(tree)
    names = ProgramNames(tree, words)
    found = ProgramFindings(library=_library(modules, tree), flags=_style(source, modules, words))
    found.launcher = _launcher(found.library, modules, source)
    found.stop = next((name for name in ("SIGTERM", "SIGUSR1", "SIGINT") if f"signal.{name}" in source), "")
    found.step, found.loss = _printed(tree)
    _find_checkpoint(tree, names, found)
    found.again = _again(tree, names, found)
    _by_library(names, found)
    found.latest = next((one for one in _pointers(tree, names) if not fnmatchcase(one[1], found.checkpoint)), None)
    if found.checkpoint.startswith("*/"):
        found.notes.append("checkpoint: in which folder? `*` is the name of one folder, and of no path")
    if not found.checkpoint:
        found.notes.append("checkpoint: where does it save? For example out/checkpoint-*")
    if not found.again and found.checkpoint:
        found.notes.append("again: the words by which it continues; without them it must find its checkpoint by itself")
    if not found.step and not found.step_file:
        found.notes.append("step: how does it print its step? For example { log = 'step (\\d+)' }")
    return found


def _modules(tree: ast.Module) -> set[str]:
    """Top packages that it imports, and the names that it imports from them, as `setfit.Trainer`."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            top = node.module.split(".")[0]
            found |= {top, *(f"{top}.{alias.name}" for alias in node.names)}
            found |= {alias.name for alias in node.names if alias.name in ("Trainer", "Seq2SeqTrainer")}
    return found


def _library(modules: set[str], tree: ast.Module) -> str:
    called = {called_name(node) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    if "kgorch" in modules and "attach" in called:
        return "kgorch"
    if "transformers" in modules and modules & {"Trainer", "Seq2SeqTrainer"}:
        return "transformers"
    if "trl" in modules:  # whose Trainers are descendants
        return "transformers"
    # their Trainers are descendants, too; most programs that import them compute with a model and train none
    descendants = [name for name in modules if name.startswith(("sentence_transformers.", "setfit."))]
    if any(name.endswith("Trainer") for name in descendants) or (
        "sentence_transformers" in modules and called & SENTENCE_TRAINERS
    ):
        return "transformers"
    if modules & {"lightning", "pytorch_lightning"} and not ("Fabric" in called and "Trainer" not in called):
        return "lightning"
    return "accelerate" if "accelerate" in modules else "torch" if "torch" in modules else ""


def _style(source: str, modules: set[str], words: Sequence[str]) -> FlagStyle:
    if modules & {"hydra", "omegaconf"}:
        return FlagStyle.BARE
    flags = [word for word in words if word.startswith("--") and len(word) > 2]
    if re.search(r"exec\(open\(", source) or (flags and all("=" in flag for flag in flags)):
        return FlagStyle.EQUALS
    is_bare = bool(words) and not flags and any(re.match(r"\w[\w.]*=", word) for word in words)
    return FlagStyle.BARE if is_bare else FlagStyle.SPACE


def _launcher(library: str, modules: set[str], source: str) -> Launcher:
    if library == "accelerate":
        return Launcher.ACCELERATE
    spawns = "mp.spawn(" in source or "multiprocessing.spawn(" in source or library == "lightning"
    is_distributed = "init_process_group" in source or library == "transformers"
    return Launcher.TORCHRUN if is_distributed and not spawns else Launcher.NONE


def _find_checkpoint(tree: ast.Module, names: ProgramNames, found: ProgramFindings) -> None:
    calls, repeated = list(_saves(tree, names)), _repeated(tree)
    saved, renamed = [path for path, _ in calls], dict(_renames(tree, names))
    for path in saved:
        final = next((new for old, new in renamed.items() if old == path or path.startswith(old + "/")), None)
        if final is not None:
            found.checkpoint = final
            found.incomplete = _incomplete(next(old for old, new in renamed.items() if new == final), final)
            return
    for path in saved:
        folder = path.rpartition("/")[0]
        if "*" in folder.rpartition("/")[2].replace("**", "*").strip("*") + "*" and re.search(
            r"[^/*]\*|\*[^/*]", folder
        ):
            found.checkpoint = folder  # a folder a checkpoint
            return
    if final := next((new for old, new in renamed.items() if old.startswith(new) and new), None):
        old = next(old for old, new in renamed.items() if new == final)
        found.checkpoint, found.incomplete = final, _incomplete(old, final)
    elif good := [(path, call) for path, call in calls if path.strip("*/.")]:
        # weights that are saved once, at the end, are no checkpoint to continue from
        found.checkpoint = max(good, key=lambda one: ("*" in one[0].rpartition("/")[2]) + (one[1] in repeated))[0]


def _incomplete(old: str, final: str) -> list[str]:
    """Names of what is being written, which is then renamed; none that the checkpoint has itself."""
    name, example = old.rpartition("/")[2], final.rpartition("/")[2].replace("*", "0")
    stem, _, suffix = name.rpartition(".")
    patterns = [f"*.{suffix}", name] if stem and "*" not in suffix else [name]
    return [pattern for pattern in patterns if not fnmatchcase(example, pattern)][:1]


def _saves(tree: ast.Module, names: ProgramNames) -> Iterator[tuple[str, ast.Call]]:
    """The path of each call that saves. A function of the program itself is none: what saves in it is."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (name := called_name(node)) in _SAVES and not [*names.functions_called(node)]:
            position = _SAVES[name]
            keywords = {item.arg: item.value for item in node.keywords}
            if len(node.args) > position:
                yield _clean(names.text(node.args[position])), node
            elif value := keywords.get("f") or keywords.get("output_dir") or keywords.get("filename"):
                yield _clean(names.text(value)), node


def _repeated(tree: ast.Module) -> set[ast.AST]:
    """What stands in a loop, or in a function of the program that is called in one."""
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    found: set[ast.AST] = set()
    waiting: list[ast.AST] = [node for node in ast.walk(tree) if isinstance(node, ast.For | ast.While)]
    while waiting:
        for node in ast.walk(waiting.pop()):
            if node not in found and isinstance(node, ast.Call) and called_name(node) in functions:
                waiting.append(functions[called_name(node)])
            found.add(node)
    return found


def _renames(tree: ast.Module, names: ProgramNames) -> Iterator[tuple[str, str]]:
    """(old, new) of os.replace, shutil.move and the like, and of pathlib's methods. `replace` of a text has two arguments."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or called_name(node) not in _RENAMES:
            continue
        owner = node.func.value if isinstance(node.func, ast.Attribute) else None
        is_function = owner is None or (isinstance(owner, ast.Name) and owner.id in ("os", "shutil"))
        if is_function and len(node.args) == 2:
            yield _clean(names.text(node.args[0])), _clean(names.text(node.args[1]))
        elif owner is not None and len(node.args) == 1:
            old, new = _clean(names.text(owner)), _clean(names.text(node.args[0]))
            if old and new:
                yield old, new


def _pointers(tree: ast.Module, names: ProgramNames) -> Iterator[tuple[str, str]]:
    """Files without a format that the program writes, and links that it makes, whose name has "latest" in it."""
    for node in ast.walk(tree):
        place, kind = None, "file"
        match node:
            case ast.Call(args=[path, ast.Constant(value=str(mode)), *_]) if (
                called_name(node) == "open" and mode in _WRITES
            ):
                place = path
            case ast.Call(func=ast.Attribute(value=owner, attr="write_text")):
                place = owner
            case ast.Call(func=ast.Attribute(value=ast.Name(id="os"), attr="symlink"), args=[_, path, *_]):
                place, kind = path, "link"
            case ast.Call(func=ast.Attribute(value=owner, attr="symlink_to")):
                place, kind = owner, "link"
        path_text = _clean(names.text(place)) if place is not None else ""
        if _POINTER.search(path_text) and "*" not in path_text:
            yield kind, path_text


def _clean(path: str) -> str:
    """A place as the plan takes it; empty for one outside of the plan's folder."""
    path = re.sub(r"/+", "/", re.sub(r"\*+", "*", path)).removeprefix("./")
    path = path if path == "/" else path.removesuffix("/")
    return "" if path.startswith(("/", "../")) or "/../" in path or path in ("", "*", ".") else path


def _again(tree: ast.Module, names: ProgramNames, found: ProgramFindings) -> list[str]:
    resumes = sorted((name for name in names.options if re.search(r"resume|ckpt_path|restore", name)), key=len)
    if resumes:
        call = names.options[resumes[0]]
        option = next(
            item.value
            for item in call.args
            if isinstance(item, ast.Constant)
            and isinstance(item.value, str)
            and item.value.lstrip("-").replace("-", "_") == resumes[0]
        )
        action = next((item.value for item in call.keywords if item.arg in ("action", "is_flag")), None)
        if action is not None:
            return [str(option)]
        return [f"{option}={{checkpoint}}"] if found.flags is FlagStyle.EQUALS else [str(option), "{checkpoint}"]
    if "init_from" in names.nodes and found.flags is FlagStyle.EQUALS:
        return ["--init_from=resume"]
    settings = sorted(key for key in names.nodes if "resume" in key)
    if found.flags is FlagStyle.BARE and settings:
        return [f"{settings[0]}={{checkpoint}}"]
    texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    words = sorted(text for text in texts if re.fullmatch(r"--[\w-]*resume[\w-]*=", text))
    return [f"{words[0]}{{checkpoint}}"] if words else []


def _by_library(names: ProgramNames, found: ProgramFindings) -> None:
    """What a library does by itself, where the source does not say otherwise."""
    out = _clean(names.given.get("output_dir", ""))
    if found.library == "transformers":
        if out:
            found.checkpoint, found.incomplete = f"{out}/checkpoint-*", []
            found.step_file = (f"{out}/checkpoint-*/trainer_state.json", "global_step")
        found.again = found.again or ["--resume_from_checkpoint", "{checkpoint}"]
        found.loss = found.loss or r"'loss': '?" + _NUMBER
    elif found.library == "lightning":
        found.checkpoint = found.checkpoint or "lightning_logs/*/checkpoints/*.ckpt"
    elif found.library == "accelerate" and out:
        shape = "epoch_*" if names.given.get("checkpointing_steps") == "epoch" else "step_*"
        found.checkpoint, found.incomplete = f"{out}/{shape}", []


def _printed(tree: ast.Module) -> tuple[str, str]:
    """Regular expressions for the step and the loss, from the texts that the program puts together. What it prints goes first."""
    said = {
        part
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and called_name(node) in _SAYS
        for part in ast.walk(node)
    }
    step = loss = ""
    for node in sorted(ast.walk(tree), key=lambda node: node not in said):
        parts = _parts(node)
        if _is_name_of_file(parts):
            continue
        for number, text in enumerate(parts[:-1]):
            if text is None or parts[number + 1] is not None:
                continue
            if not step and (match := _STEP.search(text)):
                total = parts[number + 2 : number + 4] == ["/", None]
                step = re.escape(match[0]).replace(r"\ ", " ") + _COUNT + (r"\s*/" + _COUNT if total else "")
            if not loss and (match := _LOSS.search(text)):
                loss = re.escape(match[0]).replace(r"\ ", " ") + r"\s*" + _NUMBER
    return step, loss


def _parts(node: ast.AST) -> list[str | None]:
    """The fixed parts of a text that is put together, with None for each value; [] for any other expression."""
    match node:
        case ast.JoinedStr(values=values):
            return [str(part.value) if isinstance(part, ast.Constant) else None for part in values]
        case ast.BinOp(left=ast.Constant(value=str(text)), op=ast.Mod()):
            return _split(_PERCENT, text)
        case ast.Call(func=ast.Attribute(value=ast.Constant(value=str(text)), attr="format")):
            return _split(_BRACES, text)
        case ast.Call(args=[ast.Constant(value=str(text)), _, *_]) if called_name(node) in _SAYS and "%" in text:
            return _split(_PERCENT, text)
        case ast.Call(args=[_, _, *_] as words) if called_name(node) == "print":
            return [f"{word.value!s} " if isinstance(word, ast.Constant) else None for word in words]
    return []


def _split(values: re.Pattern[str], text: str) -> list[str | None]:
    fixed: list[str | None] = [None]
    return [part for piece in values.split(text) for part in (piece, *fixed)][:-1]


def _is_name_of_file(parts: Sequence[str | None]) -> bool:
    """As f"out/step-{step}.pt": nobody prints it alone."""
    texts = [text for text in parts if text is not None]
    return not any(re.search(r"\s", text) for text in texts) and bool(texts and re.search(r"\.[a-z]\w*$", texts[-1]))


def is_carried(found: ProgramFindings) -> bool:
    """Whether the program needs no [stage.foreign], because it calls attach() or its library's Trainer is carried
    (worker/integrations).

    A loop around Accelerate that can continue by itself does so more exactly than from outside: its plain variables come back.
    """
    return found.library in ("transformers", "lightning", "kgorch") or (
        found.library == "accelerate" and not found.again
    )


def why_foreign(found: ProgramFindings) -> str:
    """Why a program that kgorch could carry is left to save and resume by itself; empty for any other program."""
    if found.library != "accelerate" or is_carried(found):
        return ""
    flag = found.again[0].partition("=")[0]
    return (
        f"this loop around Accelerate continues by itself ({flag}), and is left to do so: that is more exact than from outside,"
        " where of its plain variables only numbers come back. For kgorch to carry it all the same (level 1), delete launcher"
        " and [stage.foreign] from the plan"
    )
