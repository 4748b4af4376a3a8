"""Measure how the code is laid out: sizes, comments, docstrings, names, and the way of one value through the modules.

    python docs/structure.py                       a table of the working tree
    python docs/structure.py --against v0.3        that revision and the working tree side by side
    python docs/structure.py --json

How it counts. Files are the `.py` files that git tracks below the packages, without the database's migrations. A class or a
function is as long as its lines from `class` or `def` to its last one; `self` and `cls` are no parameters. A comment line is one
with a comment, also behind code; it is compared with all lines that are not blank, docstrings included. A definition is public
when neither its name nor that of a class or function around it begins with an underscore. A word of PARTICIPLES counts where it
is the whole name, but for underscores around it; names within f-strings are seen from Python 3.12 on. The way of the plan text
starts at a variable of a function: each call that passes the variable, or a value that was constructed with it, leads to the
function's parameter, and on from there. Calls are resolved by imports, by names of the module, and by `self`; a call through
any other object is not followed.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import subprocess
import sys
import tarfile
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGES = ("orchestrator", "db")
FOLDERS = {"kgorch.db": "db", "kgorch.workloads": "workloads", "kgorch": "orchestrator"}
PLAN_TEXT = ("orchestrator/cli/commands/training/start.py", "command", "text")
LARGEST = 5
WORDS = """
    asked awaited beginning brought bringing came chosen choosing concluding copied described doomed drawn dropped ended ending
    enqueuing filled finding foretelling foretold found gained given gone handed hanging heard held judged keeping kept known left
    listed living locked looked made masked measured merged moved named opened opening packed passed persisting probing quoted
    remembered reported resuming reached said saved seen sent settled settling shown spared spent stated started starting
    superseded taken taking thinned told touched tried wanted watching weighed weighing worked written
"""
PARTICIPLES = frozenset(WORDS.split())
"""Without "read", "put" and "set", which are also the verb."""

NOT_MEASURED = "db/migrations/versions/"
"""Written once and never changed."""

Function = ast.FunctionDef | ast.AsyncFunctionDef
Sources = Mapping[str, str]


def measure(sources: Sources, start: tuple[str, str, str] = PLAN_TEXT) -> dict[str, Any]:
    """The figures of a tree, by name. Args: sources: text of each file by its path, with slashes."""
    trees = {path: ast.parse(text) for path, text in sources.items()}
    folders = Counter(path.rpartition("/")[0] for path in sources if not path.endswith("/__init__.py"))
    classes = [
        (path, node) for path, tree in trees.items() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)
    ]
    functions = [(path, node) for path, tree in trees.items() for node in ast.walk(tree) if isinstance(node, Function)]
    names = Counter(node.name.lstrip("_") for _, node in classes)
    comments = sum(len(_comment_lines(text)) for text in sources.values())
    lines = sum(bool(line.strip()) for text in sources.values() for line in text.splitlines())
    public = [node for tree in trees.values() for node in _public(tree)]
    documented = sum(ast.get_docstring(node) is not None for node in public)
    modules = sorted(path for path in sources if _is_participle(Path(path).stem))
    uses = Counter(name for text in sources.values() for name in _names(text) if _is_participle(name))
    way = passed_through(trees, *start)
    return {
        "files": len(sources),
        "lines": lines,
        "largest folders": dict(folders.most_common(LARGEST)),
        "largest class": _largest(classes, _length),
        "longest function": _largest(functions, _length),
        "most parameters": _largest(functions, _parameters),
        "functions with more than 5 parameters": sum(_parameters(node) > 5 for _, node in functions),
        "comment lines per 100 lines": round(100 * comments / max(lines, 1), 1),
        "public definitions with a docstring, %": round(100 * documented / max(len(public), 1), 1),
        "modules named by a participle": modules,
        "uses of participles as names": sum(uses.values()),
        "most used of these": dict(uses.most_common(LARGEST)),
        "class names used more than once": sorted(name for name, count in names.items() if count > 1),
        "modules on the way of the plan text": sorted({path for path, _ in way}),
        "functions on the way of the plan text": len(way),
    }


def passed_through(trees: Mapping[str, ast.Module], path: str, function: str, variable: str) -> list[tuple[str, str]]:
    """(file, qualified name) of the functions that get the value of a variable as an argument; the first one included."""
    index = {file: _definitions(tree) for file, tree in trees.items()}
    imports = {file: _imports(tree) for file, tree in trees.items()}
    todo = [(path, function, variable)] if function in index.get(path, {}) else []
    seen: set[tuple[str, str, str]] = set()
    while todo:
        if (step := todo.pop()) in seen:
            continue
        seen.add(step)
        file, name, carried = step
        node = index[file][name]
        carriers = {carried}
        for call, targets in _calls(node):
            arguments = [(place, item) for place, item in enumerate(call.args)]
            arguments += [(keyword.arg, keyword.value) for keyword in call.keywords if keyword.arg]
            passed = [place for place, item in arguments if isinstance(item, ast.Name) and item.id in carriers]
            target = _resolve(index, imports, file, name, call.func) if passed else None
            if target is None:
                continue
            callee = index[target[0]][target[1]]
            if isinstance(callee, ast.ClassDef):
                carriers |= targets  # a value that was constructed with it
                if (constructor := f"{target[1]}.__init__") not in index[target[0]]:
                    continue
                target, callee = (target[0], constructor), index[target[0]][constructor]
            assert isinstance(callee, Function)
            accepted = _parameter_names(callee)
            for place in passed:
                if isinstance(place, str) and place in accepted:
                    todo.append((*target, place))
                elif isinstance(place, int) and place < len(accepted):
                    todo.append((*target, accepted[place]))
    return sorted({(file, name) for file, name, _ in seen})


def _calls(node: ast.AST) -> Iterator[tuple[ast.Call, set[str]]]:
    """The calls below a node in the order of the text, each with the variables that get its result."""
    assigned = {id(item.value): _targets(item) for item in ast.walk(node) if isinstance(item, ast.Assign)}
    calls = [item for item in ast.walk(node) if isinstance(item, ast.Call)]
    for call in sorted(calls, key=lambda item: (item.lineno, item.col_offset)):
        yield call, assigned.get(id(call), set())


def _targets(node: ast.Assign) -> set[str]:
    return {target.id for target in node.targets if isinstance(target, ast.Name)}


def _resolve(
    index: Mapping[str, Any], imports: Mapping[str, dict[str, str]], file: str, inside: str, called: ast.expr
) -> tuple[str, str] | None:
    """File and qualified name of what an expression calls; None when it cannot be told."""
    match called:
        case ast.Name(id=name):
            return _find(index, imports, file, name)
        case ast.Attribute(value=ast.Name(id="self"), attr=name) if "." in inside:
            method = f"{inside.rpartition('.')[0]}.{name}"
            return (file, method) if method in index[file] else None
        case ast.Attribute(value=ast.Name(id=module), attr=name) if module in imports[file]:
            place = _file_of(index, imports[file][module])
            return _find(index, imports, place, name) if place else None
    return None


def _find(
    index: Mapping[str, Any], imports: Mapping[str, dict[str, str]], file: str, name: str, depth: int = 3
) -> tuple[str, str] | None:
    """Where a name of a file is defined; a package may only import it."""
    if name in index[file]:
        return file, name
    module, _, own = imports[file].get(name, "").rpartition(".")
    place = _file_of(index, module)
    return _find(index, imports, place, own, depth - 1) if place and depth else None


def _file_of(index: Mapping[str, Any], module: str) -> str | None:
    # a package of its own lies in a folder of another name; before, folder and package had one name
    for package, folder in FOLDERS.items():
        if f"{module}.".startswith(f"{package}."):
            module = folder + module.removeprefix(package)
            break
    stem = module.replace(".", "/")
    return next((path for path in (f"{stem}.py", f"{stem}/__init__.py") if path in index), None)


def _definitions(tree: ast.Module) -> dict[str, ast.AST]:
    """Functions and classes of a module, and methods by `Class.method`."""
    found: dict[str, ast.AST] = {}
    for node in tree.body:
        if isinstance(node, Function | ast.ClassDef):
            found[node.name] = node
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{item.name}": item for item in node.body if isinstance(item, Function)}
    return found


def _imports(tree: ast.Module) -> dict[str, str]:
    """What names stand for, those that a function imports included."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.asname or alias.name: alias.name for alias in node.names}
    return found


def _public(node: ast.AST) -> Iterator[Function | ast.ClassDef]:
    for item in ast.iter_child_nodes(node):
        if isinstance(item, Function | ast.ClassDef) and not item.name.startswith("_"):
            yield item
            if isinstance(item, ast.ClassDef):
                yield from _public(item)


def _parameter_names(node: Function) -> list[str]:
    """In the order of positional arguments, keyword-only ones last; without self and cls."""
    every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return [item.arg for place, item in enumerate(every) if place or item.arg not in ("self", "cls")]


def _parameters(node: Any) -> int:
    return len(_parameter_names(node))


def _length(node: Any) -> int:
    return int(node.end_lineno - node.lineno + 1)


def _largest(items: list[tuple[str, Any]], size: Any) -> dict[str, Any]:
    path, node = max(items, key=lambda item: size(item[1]), default=("", None))
    return {"size": size(node), "where": f"{path}:{node.lineno} {node.name}"} if node else {"size": 0, "where": ""}


def _tokens(text: str) -> Iterator[tokenize.TokenInfo]:
    return tokenize.generate_tokens(io.StringIO(text).readline)


def _comment_lines(text: str) -> set[int]:
    return {token.start[0] for token in _tokens(text) if token.type == tokenize.COMMENT}


def _names(text: str) -> Iterator[str]:
    return (token.string for token in _tokens(text) if token.type == tokenize.NAME)


def _is_participle(name: str) -> bool:
    return name.strip("_").lower() in PARTICIPLES


def _is_measured(path: str) -> bool:
    return path.endswith(".py") and not path.startswith(NOT_MEASURED)


def tracked(packages: tuple[str, ...] = PACKAGES) -> dict[str, str]:
    """The sources of the working tree."""
    listed = subprocess.run(["git", "ls-files", *packages], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    paths = [path for path in listed.splitlines() if _is_measured(path) and (ROOT / path).is_file()]
    return {path: (ROOT / path).read_text() for path in paths}


def of_revision(revision: str, packages: tuple[str, ...] = PACKAGES) -> dict[str, str]:
    """The sources of a revision. Raises: CalledProcessError when git does not know it."""
    command = ["git", "archive", "--format=tar", revision, "--", *packages]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        members = [item for item in archive if item.isfile() and _is_measured(item.name)]
        return {item.name: archive.extractfile(item).read().decode() for item in members}  # type: ignore[union-attr]


def table(columns: Mapping[str, Mapping[str, Any]]) -> str:
    """The figures as lines; with two columns side by side."""
    cells: dict[str, dict[str, list[str]]] = defaultdict(dict)
    for head, figures in columns.items():
        for name, value in figures.items():
            cells[name][head] = _cell(value)
    widths = {head: max(len(line) for row in cells.values() for line in [head, *row[head]]) for head in columns}
    first = max(map(len, cells))
    lines = [" " * first + "".join(f"  {head:{widths[head]}}" for head in columns)]
    for name, row in cells.items():
        for number in range(max(map(len, row.values()))):
            texts = [row[head][number] if number < len(row[head]) else "" for head in columns]
            parts = "".join(f"  {text:{widths[head]}}" for text, head in zip(texts, columns, strict=True))
            lines.append(f"{'' if number else name:{first}}{parts}")
    return re.sub(r" +$", "", "\n".join(lines), flags=re.M)


def _cell(value: Any) -> list[str]:
    """A figure as lines; of a list its length comes first."""
    if isinstance(value, dict):
        return (
            [f"{value['size']}  {value['where']}"]
            if "where" in value
            else [f"{n}  {name}" for name, n in value.items()]
        )
    return [str(len(value)), *map(str, value)] if isinstance(value, list) else [str(value)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--against", metavar="REVISION", help="measure this revision of git, too")
    parser.add_argument("--json", action="store_true", help="print JSON")
    asked = parser.parse_args()
    columns = {asked.against: measure(of_revision(asked.against))} if asked.against else {}
    columns["now"] = measure(tracked())
    print(json.dumps(columns, indent=2) if asked.json else table(columns))


if __name__ == "__main__":
    sys.exit(main())
