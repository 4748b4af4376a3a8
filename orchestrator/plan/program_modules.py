"""The modules that a training program imports from its own folder, and what of them counts for `kgorch adopt`."""

from __future__ import annotations

import ast
import contextlib
import io
import tokenize
from collections.abc import Iterator, Sequence, Set
from pathlib import Path
from typing import NamedTuple

from kgorch.plan.program_names import called_name

MOST_MODULES, MOST_BYTES = 40, 1 << 20
"""Limits of what is read: modules besides the program, and bytes of the program, and of all modules together."""

UNREADABLE = (SyntaxError, ValueError, RecursionError, MemoryError)
"""Errors of `ast.parse`."""

Function = ast.FunctionDef | ast.ClassDef


class OwnModules(NamedTuple):
    """The modules of a program that are its own.

    Attributes:
        sources: of each one.
        names: by which the program and its modules call them: `misc` for `from utils import misc` and for `import utils.misc`.
    """

    sources: Sequence[str]
    names: Set[str]


NONE_OF_ITS_OWN = OwnModules((), frozenset())


def imported(program: Path, source: str, folder: Path) -> OwnModules:
    """The modules that a program imports, and those that these import, as far as they lie below its folder.

    Args:
        folder: of the plan, where `python -m` looks for modules. The program lies below it.

    One that cannot be read or parsed is left out.
    """
    found, names, left = dict[Path, str](), set[str](), MOST_BYTES
    roots = list(dict.fromkeys([program.parent, folder]))
    waiting = [(program, source)]
    while waiting and len(found) < MOST_MODULES:
        path, text = waiting.pop(0)
        for module, name in _imported(path, text, roots):
            names.add(name)
            if module in found or module == program or len(found) == MOST_MODULES:
                continue
            with contextlib.suppress(OSError, *UNREADABLE):
                other = text_of(module, left)
                ast.parse(other)
                left -= len(other)
                found[module] = other
                waiting.append((module, other))
    return OwnModules(list(found.values()), names)


def text_of(program: Path, most_bytes: int = MOST_BYTES) -> str:
    """The source of a program, in the encoding that it names. Raises: OSError, SyntaxError."""
    with open(program, "rb") as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise SyntaxError(f"it has more than {most_bytes} bytes")
    encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
    try:
        return content.decode(encoding, errors="replace")
    except LookupError as error:  # one that Python has for bytes: hex, rot13
        raise SyntaxError(str(error)) from None


def _imported(path: Path, source: str, roots: Sequence[Path]) -> Iterator[tuple[Path, str]]:
    """(file, name) of the modules that a module imports; the name is empty where only something in it is imported."""
    for node in ast.walk(ast.parse(source)):
        aliases, folders = list[tuple[str, str]](), roots
        if isinstance(node, ast.Import):
            aliases = [(alias.name, alias.asname or alias.name.rpartition(".")[2]) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                folders = path.parents[node.level - 1 : node.level]
            module = node.module or ""
            aliases = [(module, "")] if module else []
            aliases += [(f"{module}.{alias.name}".strip("."), alias.asname or alias.name) for alias in node.names]
        for module, name in aliases:
            places = [folder.joinpath(*module.split(".")) for folder in folders]
            for candidate in (file for place in places for file in (place.with_suffix(".py"), place / "__init__.py")):
                if _lies_below(candidate, roots[-1]):
                    yield candidate, name
                    break


def _lies_below(file: Path, folder: Path) -> bool:
    """Whether a file is there, and no link leads out of the folder to it."""
    try:
        return file.is_file() and folder.resolve() in file.resolve().parents
    except OSError:  # its name is too long
        return False


def joined(program: ast.Module, own: OwnModules) -> ast.Module:
    """The program with the functions and classes of its modules that it calls, directly or through one another.

    A name that several have is the program's own, or else the first one's.
    """
    trees = [ast.parse(source) for source in own.sources]
    libraries = {name for tree in (program, *trees) for name in _names_imported(tree)} - own.names
    mine = {node.name for node in ast.walk(program) if isinstance(node, Function)}
    known: dict[str, Function] = {}
    for tree in trees:
        for node in tree.body:
            if isinstance(node, Function) and node.name not in mine:
                known.setdefault(node.name, node)
    found: dict[str, Function] = {}
    waiting: list[ast.AST] = [program]
    while waiting:
        calls = (node for node in ast.walk(waiting.pop()) if isinstance(node, ast.Call))
        names = {called_name(call) for call in calls if not _is_of(call.func, libraries, own.names)}
        for name in sorted(names & known.keys() - found.keys()):
            found[name] = known[name]
            waiting.append(known[name])
    return ast.Module([*program.body, *found.values()], [])


def _names_imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)


def _is_of(called: ast.expr, libraries: Set[str], own: Set[str]) -> bool:
    """Whether `torch.save` or `torch.jit.save` is a library's, and not `utils.misc.save`, of a module of its own."""
    if isinstance(called, ast.Attribute) and isinstance(called.value, ast.Attribute) and called.value.attr in own:
        return False
    owner = called
    while isinstance(owner, ast.Attribute):
        owner = owner.value
    return isinstance(owner, ast.Name) and owner is not called and owner.id in libraries
