"""The modules that a training program imports from its own folder, and what of them counts for `kgorch adopt`."""

from __future__ import annotations

import ast
import contextlib
import io
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path

from kgorch.plan.program_names import called_name

MOST_MODULES, MOST_BYTES = 40, 1 << 20
"""Limits of what is read: modules besides the program, and bytes of the program, and of all modules together."""

UNREADABLE = (SyntaxError, ValueError, RecursionError, MemoryError)
"""Errors of `ast.parse`."""

Function = ast.FunctionDef | ast.ClassDef


def sources(program: Path, source: str, folder: Path) -> list[str]:
    """Sources of the modules that a program imports, and of those that these import, as far as they lie below its folder.

    Args:
        folder: of the plan, where `python -m` looks for modules. The program lies below it.


    One that cannot be read or parsed is left out.
    """
    found, left = dict[Path, str](), MOST_BYTES
    roots = list(dict.fromkeys([program.parent, folder]))
    waiting = [(program, source)]
    while waiting and len(found) < MOST_MODULES:
        path, text = waiting.pop(0)
        for module in _imported(path, text, roots):
            if module in found or module == program or len(found) == MOST_MODULES:
                continue
            with contextlib.suppress(OSError, *UNREADABLE):
                other = text_of(module, left)
                ast.parse(other)
                left -= len(other)
                found[module] = other
                waiting.append((module, other))
    return list(found.values())


def text_of(program: Path, most_bytes: int = MOST_BYTES) -> str:
    """The source of a program, in the encoding that it names. Raises: OSError, SyntaxError."""
    with open(program, "rb") as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise SyntaxError(f"it has more than {most_bytes} bytes")
    encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
    return content.decode(encoding, errors="replace")


def _imported(path: Path, source: str, roots: Sequence[Path]) -> Iterator[Path]:
    for node in ast.walk(ast.parse(source)):
        names, folders = list[str](), roots
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                folders = path.parents[node.level - 1 : node.level]
            module = node.module or ""
            names = [module, *(f"{module}.{alias.name}".strip(".") for alias in node.names)]
        for name in filter(None, names):
            places = [folder.joinpath(*name.split(".")) for folder in folders]
            for candidate in (file for place in places for file in (place.with_suffix(".py"), place / "__init__.py")):
                if _lies_below(candidate, roots[-1]):
                    yield candidate
                    break


def _lies_below(file: Path, folder: Path) -> bool:
    """Whether a file is there, and no link leads out of the folder to it."""
    try:
        return file.is_file() and folder.resolve() in file.resolve().parents
    except OSError:  # its name is too long
        return False


def joined(program: ast.Module, others: Sequence[str]) -> ast.Module:
    """The program with the functions and classes of its modules that it calls, directly or through one another.

    A name that several have is the program's own, or else the first one's.
    """
    own = {node.name for node in ast.walk(program) if isinstance(node, Function)}
    known: dict[str, Function] = {}
    for other in others:
        for node in ast.parse(other).body:
            if isinstance(node, Function) and node.name not in own:
                known.setdefault(node.name, node)
    found: dict[str, Function] = {}
    waiting: list[ast.AST] = [program]
    while waiting:
        calls = (node for node in ast.walk(waiting.pop()) if isinstance(node, ast.Call))
        for name in sorted({called_name(call) for call in calls} & known.keys() - found.keys()):
            found[name] = known[name]
            waiting.append(known[name])
    return ast.Module([*program.body, *found.values()], [])
