"""What the source of a training program says of how it saves and resumes, for `kgorch adopt`. The program is parsed and not run.

What cannot be found is left to the user, with a note: a wrong guess would be worse than a gap. Paths are followed through its names
(program_names.py).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from kgorch.core.program_command import FlagStyle, Launcher
from kgorch.plan import printed_lines, program_modules, program_saves
from kgorch.plan.program_modules import NONE_OF_ITS_OWN, OwnModules
from kgorch.plan.program_names import DIFFERS, ProgramNames, called_name, is_switch, spellings
from kgorch.plan.program_saves import SaveCall

SENTENCE_TRAINERS = {"SentenceTransformerTrainer", "CrossEncoderTrainer", "SparseEncoderTrainer"}

_DISTRIBUTED = {"init_process_group", "DistributedDataParallel", "DistributedSampler"}
_RESUME = re.compile(
    r"(auto_?)?resume(_(from|path|ckpt|checkpoint|file|training|model)\w*)?"
    r"|(restore|restart)(_(from|path|ckpt|checkpoint|file|model)\w*)?|ckpt_path|continue(_train\w*)?"
)
"""Of the name of an option by which a program continues, and not of one that merely has to do with it."""

_TO_CONTINUE = re.compile(r"check|ckpt|current|last|latest|recover|resum|snapshot|state", re.IGNORECASE)
"""Of the name of a file from which a program continues."""

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
        rest: the last words of its command line, behind which it takes no flag.
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
    rest: list[str] = field(default_factory=list)
    latest: tuple[str, str] | None = None
    stop: str = ""
    step: str = ""
    loss: str = ""
    step_file: tuple[str, str] | None = None
    notes: list[str] = field(default_factory=list)


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
    found.step, found.loss = printed_lines.step_and_loss(tree, program_saves.repeated(tree))
    found.takes_next = _takes_next(tree)
    saves = list(program_saves.saves(tree, names))
    renamed = {old: new for old, new in program_saves.renames(tree, names) if old and new}
    found.again, found.rest = _again(tree, names, found), names.rest()
    is_handed = any("{checkpoint}" in word for word in found.again)
    fixed = [] if is_handed else _saves_to_continue_from(saves, renamed, found, program_saves.loads(tree, names))
    _find_checkpoint(fixed or saves, renamed, found)
    _by_library(names, found)
    found.latest = next(
        (one for one in program_saves.pointers(tree, names) if not fnmatchcase(one[1], found.checkpoint)), None
    )
    _note_gaps(saves, found)
    return found


def _note_gaps(saves: Sequence[SaveCall], found: ProgramFindings) -> None:
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


def _find_checkpoint(saves: Sequence[SaveCall], renamed: dict[str, str], found: ProgramFindings) -> None:
    """What is saved again and again goes first, also where the flags keep it from that, then what is saved once."""
    named = [save for save in saves if save.path.strip("*/.") and not save.path.endswith("*/*")]
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
                best = max(here, key=_how_likely)
                found.checkpoint = best.path
                if not best.is_repeated:
                    found.notes.append(f"checkpoint: {best.path} is saved once, it seems: a wall before that costs all")
                elif others := sorted({save.path for save in here if save.is_repeated} - {best.path}):
                    _note_others(best.path, others, found)
                return
    found.is_off = False


def _how_likely(save: SaveCall) -> tuple[bool, int]:
    """How likely a place is that of the checkpoints, more or less than others: of the best one no training goes on."""
    name = save.path.rpartition("/")[2]
    return "best" not in name.lower(), ("*" in name) + save.is_repeated


def _saves_to_continue_from(
    saves: Sequence[SaveCall], renamed: Mapping[str, str], found: ProgramFindings, loaded: Set[str]
) -> list[SaveCall]:
    """What is saved again and again under one name, and loaded by it before the training. A program that takes no path continues
    from that one, whatever it saves besides."""
    fixed = [
        save
        for save in saves
        if save.is_repeated
        and (place := renamed.get(save.path, save.path)) in loaded
        and _TO_CONTINUE.search(name := place.rpartition("/")[2])
        and not re.search(r"best|final", name, re.IGNORECASE)
    ]
    if fixed and (others := sorted({save.path for save in saves if DIFFERS.search(save.path)})):
        found.notes.append(
            f"checkpoint: it continues from {fixed[0].path}, it seems, which it loads; {', '.join(others[:3])} is not kept"
        )
    return fixed


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
        folder, _, name = path.rpartition("/")
        folder = re.sub(r"/([^/]*_)?rank[_*\d][^/]*$", "", folder)  # one rank's folder is a part of the checkpoint
        is_numbered = "*" in folder.rpartition("/")[2].replace("**", "*").strip("*") + "*"
        # a run's folder holds files with numbers
        if is_numbered and DIFFERS.search(folder) and ("rank" in name or not DIFFERS.search(name)):
            found.checkpoint = folder
            return True
    return False


def _incomplete(old: str, final: str) -> list[str]:
    """Names of what is being written, which is then renamed; none that the checkpoint has itself."""
    name, example = old.rpartition("/")[2], final.rpartition("/")[2].replace("*", "0")
    stem, _, suffix = name.rpartition(".")
    patterns = [f"*.{suffix}", name] if stem and "*" not in suffix else [name]
    return [pattern for pattern in patterns if not fnmatchcase(example, pattern)][:1]


def _takes_next(tree: ast.Module) -> bool:
    """Whether a loop takes something by `next(…)`, but for a look at the first item."""
    loops = [node for node in ast.walk(tree) if isinstance(node, ast.For | ast.While)]
    calls = [node for loop in loops for part in loop.body for node in ast.walk(part) if isinstance(node, ast.Call)]
    nexts = [call.args[0] for call in calls if isinstance(call.func, ast.Name) and call.func.id == "next" and call.args]
    return any(not isinstance(of, ast.GeneratorExp | ast.Call) for of in nexts)


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
    out = program_saves.clean_path(names.given.get("output_dir", ""))
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
