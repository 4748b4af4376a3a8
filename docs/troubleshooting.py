"""Write docs/troubleshooting.md: a section for each error code with its text and the messages that carry it: `make docs`.

The messages are read from the source, so that they can be read in one sitting; a value in a message is shown as `{name}`.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from kgorch.cli import error_help
from kgorch.core.error_codes import PATTERN, code_of_module
from kgorch.launch.verdicts import ERROR_CODES, INPUT_CODE

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "troubleshooting.md"
BASE = "KgorchError"
FACTORY = "checkpoint_error"
"""A function that constructs one of two errors (untrusted_io.py); the message is its second argument."""

HEAD = """# Troubleshooting
Each error of kgorch ends its first line with a code, as in `error: there is no plan plan.toml [KG102]`. `kgorch explain KG102`
prints the text of this page with that code; `kgorch explain codes` lists all of them.

This page is written by `make docs` from `orchestrator/cli/error_codes.toml` and from the messages in the source.
"""


class Site(NamedTuple):
    """A call that constructs an error.

    Attributes:
        where (str): file and line, `orchestrator/api.py:12`.
        codes (tuple): its error codes; several where the call chooses among them.
        message (str): as the source has it, with `{name}` for a value; empty where all of it comes from elsewhere.
    """

    where: str
    codes: tuple[str, ...]
    message: str


def sites() -> list[Site]:
    """Every call in orchestrator/ and db/ that constructs a KgorchError or a subclass, or a failed Check that raises one."""
    files = [path for top in ("orchestrator", "db") for path in sorted((ROOT / top).rglob("*.py"))]
    trees = {
        path: ast.parse(path.read_text())
        for path in files
        if "versions" not in path.parts and not any(up.is_symlink() for up in path.parents)
    }
    classes = _classes(list(trees.values()))
    # kgorch/errors.py itself only reads back what another process has printed
    return [site for path, tree in trees.items() if path.name != "errors.py" for site in _sites_of(path, tree, classes)]


def _classes(trees: list[ast.Module]) -> dict[str, str]:
    """The error code of each class of errors by its name; empty for one without."""
    found = {BASE: ""}
    definitions = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    while new := [
        node for node in definitions if node.name not in found and any(_name(b) in found for b in node.bases)
    ]:
        for node in new:
            own = [
                item.value
                for item in node.body
                if isinstance(item, ast.Assign) and _name(item.targets[0]) == "error_code"
            ]
            inherited = next(found[_name(base)] for base in node.bases if _name(base) in found)
            found[node.name] = ast.literal_eval(own[0]) if own else inherited
    return found


def _sites_of(path: Path, tree: ast.Module, classes: dict[str, str]) -> Iterator[Site]:
    top, *rest = path.relative_to(ROOT).with_suffix("").parts
    module = ".".join(["kgorch", *([] if top == "orchestrator" else [top]), *rest]).removesuffix(".__init__")
    assigned = [
        (node.lineno, _name(node.targets[0]), node.value) for node in ast.walk(tree) if isinstance(node, ast.Assign)
    ]

    def text_of(what: ast.expr) -> str:
        """Of a variable: what was assigned to it last before this line."""
        values = [
            item for item in assigned if isinstance(what, ast.Name) and item[0] < what.lineno and item[1] == what.id
        ]
        return _text(max(values, key=lambda item: item[0])[2] if values else what)

    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        names = (
            [_name(part) for part in ast.walk(call.func)] if isinstance(call.func, ast.IfExp) else [_name(call.func)]
        )
        # `kind.error`: the class of errors that a kind of TOML document has (plan/toml_document.py)
        if module.startswith("kgorch.plan.") and ast.unparse(call.func) == "kind.error":
            names = ["PlanError", "ConfigError"]
        # Check.refuse raises it, with an error code by its name
        if names == ["Check"] and _name(call.args[1]) == "FAIL":
            own = ERROR_CODES.get(_text(call.args[0]), INPUT_CODE)
            yield Site(f"{path.relative_to(ROOT)}:{call.lineno}", (own,), text_of(call.args[2]))
            continue
        if is_factory := names == [FACTORY]:
            names = ["CheckpointBroken", "CheckpointUnreadable"]
        if not (constructed := [name for name in names if name in classes]):
            continue
        explicit = next((word.value for word in call.keywords if word.arg == "error_code"), None)
        if explicit is not None:
            codes = tuple(PATTERN.findall(ast.unparse(explicit)))
            if not codes and module == "kgorch.launch.verdicts":
                continue  # its messages are those of the checks
        else:
            codes = tuple(dict.fromkeys(classes[name] or code_of_module(module) for name in constructed))
        text = text_of(call.args[is_factory])
        yield Site(f"{path.relative_to(ROOT)}:{call.lineno}", codes, text)


def _name(node: ast.AST) -> str:
    return str(getattr(node, "id", getattr(node, "attr", "")))


def _text(node: ast.expr) -> str:
    """The text of an expression, with `{name}` for a value; empty without any text of its own."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            texts = [_text(part) if isinstance(part, ast.Constant) else "{" + _value_name(part) + "}" for part in parts]
            return "".join(texts) if any(isinstance(part, ast.Constant) for part in parts) else ""
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return f"{_text(left)}{_text(right) or '{…}'}" if _text(left) else ""
        case ast.IfExp(body=body):
            return _text(body)
    return ""


def _value_name(part: ast.expr) -> str:
    value = part.value if isinstance(part, ast.FormattedValue) else part
    return _name(value) or "…"


def page() -> str:
    """The text of the page."""
    messages: dict[str, list[str]] = {}
    for site in sites():
        for code in site.codes if site.message else ():
            messages.setdefault(code, []).append(" ".join(site.message.split()))
    lines = [HEAD]
    topics = error_help.topics()
    area = ""
    for code, topic in topics.items():
        if (new := error_help.AREAS[code[2]]) != area:
            area = new
            lines += [f"# {area}", ""]
        lines += [f"## {code} {topic.title}", "", topic.text, ""]
        if own := messages.get(code):
            lines += ["Messages:", "", *(f"- {_code_span(text)}" for text in sorted(set(own))), ""]
    return "\n".join(lines).rstrip() + "\n"


def _code_span(text: str) -> str:
    ticks = "``" if "`" in text else "`"
    return f"{ticks} {text} {ticks}" if "`" in text else f"`{text}`"


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"written: {PAGE.name}", file=sys.stderr)
