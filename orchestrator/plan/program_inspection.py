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
from kgorch.plan import printed_lines, program_modules
from kgorch.plan.program_modules import NONE_OF_ITS_OWN, OwnModules
from kgorch.plan.program_names import DIFFERS, UNKNOWN, ProgramNames, called_name, is_switch, spellings

_SAVES = {"save": 1, "save_file": 1, "save_checkpoint": 0, "save_pretrained": 0, "savez": 0, "save_state": 0}
"""Function → position of the path among its arguments; `save` is torch's."""

_KERAS = "ModelCheckpoint"
"""Its callback, which saves again and again."""

_SAVES_IN_NAME = re.compile(f"save|^dump$|seriali[sz]e|^{_KERAS}$")
_PLACES = ("f", "output_dir", "filename", "filepath", "path", "checkpoint_id", "save_directory")
"""Names of that argument."""

_WRITES = ("w", "wt", "w+")
"""Modes in which a file is written as text."""

SENTENCE_TRAINERS = {"SentenceTransformerTrainer", "CrossEncoderTrainer", "SparseEncoderTrainer"}

_FILE_OF_WEIGHTS = re.compile(r"\.(pt|pth|ckpt|tar|bin|safetensors|npz|pkl|joblib|h5|hdf5|keras|eqx|msgpack)$")
_DISTRIBUTED = {"init_process_group", "DistributedDataParallel", "DistributedSampler"}
_RENAMES = ("rename", "replace", "move")
_POINTER = re.compile(r"(^|/)[^/.]*latest[^/.]*(\.txt)?$", re.IGNORECASE)
_RESUME = re.compile(
    r"(auto_?)?resume(_(from|path|ckpt|checkpoint|file|training|model)\w*)?"
    r"|restore(_(from|path|ckpt|checkpoint|file|model)\w*)?|ckpt_path|continue(_train\w*)?"
)
"""Of the name of an option by which a program continues, and not of one that merely has to do with it."""

_OTHERS = re.compile(r"best|last|latest|final", re.IGNORECASE)
"""Of the name of a file beside a checkpoint, which need not be kept with it."""


@dataclass(slots=True)
class ProgramFindings:
    """What was found.

    Attributes:
        library: that trains: "transformers", "lightning", "accelerate", "torch", "kgorch" for a script that calls attach(), or "".
        flags: how the program takes its flags.
        launcher: that suits the library.
        checkpoint: the place of its checkpoints; empty where none was found.
        is_off: with these flags it saves none, it seems.
        takes_next: it takes its batches by `next(…)` in a loop.
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
    is_off: bool = False
    takes_next: bool = False
    incomplete: list[str] = field(default_factory=list)
    again: list[str] = field(default_factory=list)
    latest: tuple[str, str] | None = None
    stop: str = ""
    step: str = ""
    loss: str = ""
    step_file: tuple[str, str] | None = None
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _SaveCall:
    """A call that saves.

    Attributes:
        path: as the plan takes it; empty for one that is not known, or lies outside of the plan's folder.
        is_outside: it is known, and lies there.
        is_off: the flags keep it from being reached.
        is_repeated: it stands in a loop: weights that are saved once, at the end, are no checkpoint to continue from.
    """

    path: str
    is_outside: bool
    is_off: bool
    is_repeated: bool


def inspect(source: str, words: Sequence[str], own: OwnModules = NONE_OF_ITS_OWN) -> ProgramFindings:
    """Inspect a program. Raises: SyntaxError.

    Args:
        words: the command line that it is called with.
        own: modules of its own, of which counts what it calls (program_modules.py).
    """
    tree = ast.parse(source)
    modules = _modules(tree)
    tree = program_modules.joined(tree, own)
    names = ProgramNames(tree, words, own.names)
    found = ProgramFindings(library=_library(modules, tree), flags=_style(source, modules, words))
    found.launcher = _launcher(found.library, modules, tree, source)
    found.stop = _handled(tree)
    found.step, found.loss = printed_lines.step_and_loss(tree)
    found.takes_next = _takes_next(tree)
    saves = list(_saves(tree, names))
    _find_checkpoint(saves, {old: new for old, new in _renames(tree, names) if old and new}, found)
    found.again = _again(tree, names, found)
    _by_library(names, found)
    found.latest = next((one for one in _pointers(tree, names) if not fnmatchcase(one[1], found.checkpoint)), None)
    _note_gaps(saves, found)
    return found


def _note_gaps(saves: Sequence[_SaveCall], found: ProgramFindings) -> None:
    """What is left to the user."""
    if found.checkpoint.startswith("*/"):
        found.notes.append("checkpoint: in which folder? `*` is the name of one folder, and of no path")
    if found.is_off:
        found.notes.append(f"checkpoint: with these flags it does not save {found.checkpoint}, it seems")
    if not found.checkpoint and any(save.is_outside for save in saves):
        found.notes.append("checkpoint: where does it save? In a folder outside of the plan's: give it one below that")
    elif not found.checkpoint:
        found.notes.append("checkpoint: where does it save? For example out/checkpoint-*")
    if not found.again and found.checkpoint:
        found.notes.append("again: the words by which it continues; without them it must find its checkpoint by itself")
    if not found.step and not found.step_file:
        found.notes.append("step: how does it print its step? For example { log = 'step (\\d+)' }")
    if found.library == "accelerate" and found.takes_next and not found.again:
        found.notes.append(
            "library: it takes its batches by next(…), and such a loop around Accelerate is not carried (level 1);"
            " one that says `for batch in loader` is"
        )


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
    if "accelerate" in modules or "Accelerator" in called:
        return "accelerate"
    return "torch" if "torch" in modules else ""


def _style(source: str, modules: set[str], words: Sequence[str]) -> FlagStyle:
    if modules & {"hydra", "omegaconf"}:
        return FlagStyle.BARE
    flags = [word for word in words if word.startswith("--") and len(word) > 2]
    if re.search(r"exec\(open\(", source) or (flags and all("=" in flag for flag in flags)):
        return FlagStyle.EQUALS
    is_bare = bool(words) and not flags and any(re.match(r"\w[\w.]*=", word) for word in words)
    return FlagStyle.BARE if is_bare else FlagStyle.SPACE


def _launcher(library: str, modules: set[str], tree: ast.Module, source: str) -> Launcher:
    if library == "accelerate":
        return Launcher.ACCELERATE
    spawns = "mp.spawn(" in source or "multiprocessing.spawn(" in source or library == "lightning"
    spawns |= "detectron2.launch" in modules
    used = {node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "") for node in ast.walk(tree)}
    is_distributed = library == "transformers" or "deepspeed" in modules or bool(used & _DISTRIBUTED)
    return Launcher.TORCHRUN if is_distributed and not spawns else Launcher.NONE


def _handled(tree: ast.Module) -> str:
    """The signal that it handles; empty for none, and for one that it ignores."""
    ignored, is_handled = set[ast.AST](), False
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and called_name(node) in ("signal", "add_signal_handler"):
            is_ignored = any("SIG_" in ast.unparse(word) for word in node.args[1:2])
            ignored |= set(ast.walk(node)) if is_ignored else set()
            is_handled |= not is_ignored and len(node.args) > 1
    named = {
        node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
        for node in ast.walk(tree)
        if node not in ignored
    }
    return next((name for name in ("SIGTERM", "SIGUSR1", "SIGINT") if is_handled and name in named), "")


def _find_checkpoint(saves: Sequence[_SaveCall], renamed: dict[str, str], found: ProgramFindings) -> None:
    """What is saved again and again goes first, also where the flags keep it from that, then what is saved once."""
    named = [save for save in saves if save.path.strip("*/.")]
    often = [save for save in named if save.is_repeated or DIFFERS.search(save.path)]
    for group in (often, named):
        for is_off in (False, True):
            here = [save for save in group if save.is_off is is_off]
            found.is_off, paths = is_off, [save.path for save in here]
            folders = [save.path for save in here if save.is_repeated]
            if _take_renamed(paths, renamed, found) or _take_folder(folders, found):
                return
            if not is_off and (old := next((old for old, new in renamed.items() if old.startswith(new)), "")):
                found.checkpoint, found.incomplete = renamed[old], _incomplete(old, renamed[old])
                return
            if here:
                best = max(here, key=lambda one: ("*" in one.path.rpartition("/")[2]) + one.is_repeated)
                found.checkpoint = best.path
                if not best.is_repeated:
                    found.notes.append(f"checkpoint: {best.path} is saved once, it seems: a wall before that costs all")
                elif others := sorted({save.path for save in here if save.is_repeated} - {best.path}):
                    _note_others(best.path, others, found)
                return
    found.is_off = False


def _note_others(path: str, others: Sequence[str], found: ProgramFindings) -> None:
    """A checkpoint of several files that have no folder of their own is not kept as a whole."""
    folder = path.rpartition("/")[0]
    beside = [other for other in others if other.rpartition("/")[0] == folder and not _OTHERS.search(other)]
    if beside and not _OTHERS.search(path):
        found.notes.append(
            f"checkpoint: it saves {', '.join(beside[:3])}, too, and only what one place names is kept: several files need"
            " a folder for each checkpoint"
        )


def _take_renamed(paths: Sequence[str], renamed: dict[str, str], found: ProgramFindings) -> bool:
    """What is renamed once it is written. Whether there is such a place."""
    for path in paths:
        for old, new in renamed.items():
            if old == path or path.startswith(old + "/"):
                found.checkpoint, found.incomplete = new, _incomplete(old, new)
                return True
    return False


def _take_folder(paths: Sequence[str], found: ProgramFindings) -> bool:
    """A folder a checkpoint. Whether there is such a place."""
    for path in paths:
        folder = path.rpartition("/")[0]
        is_numbered = "*" in folder.rpartition("/")[2].replace("**", "*").strip("*") + "*"
        if is_numbered and DIFFERS.search(folder):
            found.checkpoint = folder
            return True
    return False


def _incomplete(old: str, final: str) -> list[str]:
    """Names of what is being written, which is then renamed; none that the checkpoint has itself."""
    name, example = old.rpartition("/")[2], final.rpartition("/")[2].replace("*", "0")
    stem, _, suffix = name.rpartition(".")
    patterns = [f"*.{suffix}", name] if stem and "*" not in suffix else [name]
    return [pattern for pattern in patterns if not fnmatchcase(example, pattern)][:1]


def _saves(tree: ast.Module, names: ProgramNames) -> Iterator[_SaveCall]:
    """The calls that save. A function of the program itself is none: what saves in it is, unless it hands on `*args`."""
    repeated, tests = _repeated(tree), dict(_tests(tree))
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and _SAVES_IN_NAME.search(called_name(node))
            and all(function.args.vararg for function in names.functions_called(node))
        ):
            text = next((text for text in _places(node, names) if text), None)
            if text is None:
                continue
            is_off = any(not value for test in tests.get(node, ()) if (value := names.known(test)) is not UNKNOWN)
            path = _clean(text)
            is_repeated = node in repeated or called_name(node) == _KERAS
            yield _SaveCall(path, not path and text.startswith(("/", "..")), is_off, is_repeated)


def _places(call: ast.Call, names: ProgramNames) -> Iterator[str]:
    """Where a call may save to: what it is given in the place that is known of its name, else what is named as weights are."""
    position, keywords = _SAVES.get(called_name(call)), {item.arg: item.value for item in call.keywords}
    if position is None:
        named = (re.sub(r"\{.*?\}", "*", names.text(value)) for value in (*call.args, *keywords.values()))
        yield from (text for text in named if _FILE_OF_WEIGHTS.search(text))
    elif called_name(call) == "save_checkpoint" and (tag := keywords.get("tag") or next(iter(call.args[1:2]), None)):
        folder, name = names.text(next(iter(call.args), keywords.get("save_dir"))), names.text(tag)
        yield f"{folder}/{name}" if DIFFERS.search(name) and not _FILE_OF_WEIGHTS.search(folder) else folder
    elif len(call.args) > position:
        usual, first = names.text(call.args[position]), names.text(call.args[0])  # of Fabric's `save` it is the first
        yield usual if usual.strip("*") or not _FILE_OF_WEIGHTS.search(first) else first
    elif value := next((keywords[name] for name in _PLACES if name in keywords), None):
        yield names.text(value)
    elif call.args and _FILE_OF_WEIGHTS.search(first := names.text(call.args[0])):  # of a model's own `save`
        yield first


def _tests(tree: ast.AST) -> Iterator[tuple[ast.Call, list[ast.expr]]]:
    """Each call, and the tests that must hold for it to be reached, as far as `if` statements around it show."""
    waiting: list[tuple[ast.AST, list[ast.expr]]] = [(tree, [])]
    while waiting:
        node, tests = waiting.pop()
        if isinstance(node, ast.Call):
            yield node, tests
        if isinstance(node, ast.If):
            waiting += [(child, [*tests, node.test]) for child in node.body]
            waiting += [(child, [*tests, ast.UnaryOp(ast.Not(), node.test)]) for child in node.orelse]
            waiting.append((node.test, tests))
        else:
            waiting += [(child, tests) for child in ast.iter_child_nodes(node)]


def _takes_next(tree: ast.Module) -> bool:
    """Whether a loop takes something by `next(…)`, but for a look at the first item."""
    loops = [node for node in ast.walk(tree) if isinstance(node, ast.For | ast.While)]
    calls = [node for loop in loops for part in loop.body for node in ast.walk(part) if isinstance(node, ast.Call)]
    nexts = [call.args[0] for call in calls if isinstance(call.func, ast.Name) and call.func.id == "next" and call.args]
    return any(not isinstance(of, ast.GeneratorExp | ast.Call) for of in nexts)


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
    def said(option: str, value: str) -> list[str]:
        return [f"{option}={value}"] if found.flags is FlagStyle.EQUALS else [option, value]

    resumes = [
        (is_switch(call), len(word), word)
        for call in names.options.values()
        for word in spellings(call)[:1]
        if _RESUME.fullmatch(word.lstrip("-").replace("-", "_")) and (is_switch(call) or _may_be_path(call))
    ]
    if resumes:
        switches, _, option = min(resumes)
        return [option] if switches else said(option, "{checkpoint}")
    for call in names.options.values():
        choices = next((item.value for item in call.keywords if item.arg == "choices"), None)
        if choices is not None and "resume" in (names.known(one) for one in getattr(choices, "elts", ())):
            return said(spellings(call)[0], "resume")
    if "init_from" in names.nodes and found.flags is FlagStyle.EQUALS:
        return ["--init_from=resume"]
    settings = sorted(key for key in names.nodes if "resume" in key)
    if found.flags is FlagStyle.BARE and settings:
        return [f"{settings[0]}={{checkpoint}}"]
    texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    words = sorted(text for text in texts if re.fullmatch(r"--[\w-]*resume[\w-]*=", text))
    return [f"{words[0]}{{checkpoint}}"] if words else []


def _may_be_path(option: ast.Call) -> bool:
    """Whether an option takes any text, and no number or yes and no."""
    kind = next((ast.unparse(item.value) for item in option.keywords if item.arg == "type"), "")
    return not re.search(r"int|float|bool", kind, re.IGNORECASE)


def _by_library(names: ProgramNames, found: ProgramFindings) -> None:
    """What a library does by itself, where the source does not say otherwise."""
    out = _clean(names.given.get("output_dir", ""))
    if found.library == "transformers":
        if out:
            found.checkpoint, found.incomplete = f"{out}/checkpoint-*", []
            found.step_file = (f"{out}/checkpoint-*/trainer_state.json", "global_step")
        found.again = found.again or ["--resume_from_checkpoint", "{checkpoint}"]
        found.loss = found.loss or r"'loss': '?" + printed_lines.NUMBER
    elif found.library == "lightning":
        found.checkpoint = found.checkpoint or "lightning_logs/*/checkpoints/*.ckpt"
    elif found.library == "accelerate" and out and not found.checkpoint:
        shape = "epoch_*" if names.given.get("checkpointing_steps") == "epoch" else "step_*"
        found.checkpoint, found.incomplete = f"{out}/{shape}", []


def is_carried(found: ProgramFindings) -> bool:
    """Whether the program needs no [stage.foreign], because it calls attach() or its library's Trainer is carried
    (worker/integrations).

    A loop around Accelerate that can continue by itself does so more exactly than from outside: its plain variables come back.
    """
    is_left_alone = found.again and not found.is_off
    return found.library in ("transformers", "lightning", "kgorch") or (
        found.library == "accelerate" and not is_left_alone and not found.takes_next
    )


def why_foreign(found: ProgramFindings) -> str:
    """Why a program that kgorch could carry is left to save and resume by itself; empty for any other program."""
    if found.library != "accelerate" or is_carried(found) or not found.again:
        return ""
    flag = found.again[0].partition("=")[0]
    return (
        f"this loop around Accelerate continues by itself ({flag}), and is left to do so: that is more exact than from outside,"
        " where of its plain variables only numbers come back. For kgorch to carry it all the same (level 1), delete launcher"
        " and [stage.foreign] from the plan"
    )
