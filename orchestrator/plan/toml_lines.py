"""The line of every key in a TOML file, for error messages.

tomllib keeps no positions, and no TOML parser that does is among the dependencies. So a text that tomllib has accepted is
scanned a second time, for the positions of its keys alone; values are only skipped.
"""

from __future__ import annotations

import re
import tomllib

from kgorch.plan.toml_document import KeyPath

# strings of the four kinds, comments, punctuation with line breaks, and bare words: keys, numbers, dates; a string that is not
# closed takes all that is left, or each quote in it would be tried anew
_TOKENS = re.compile(
    r'"""(?:\\.|[^\\"]|"(?!""))*+(?:"{3,5}|\Z)' r"|'''(?:[^']|'(?!''))*+(?:'{3,5}|\Z)" r'|"(?:\\[^\n]|[^"\\\n])*+"?' r"|'[^'\n]*'"
    r"|\#[^\n]*|[\[\]{},=.\n]"
    r"""|[^\s\[\]{},=."'\#]+""",
    re.S,
)  # fmt: skip


def lines_of(text: str) -> dict[KeyPath, int]:
    """Map each key, table and list item to the line where it starts, counted from 1.

    Args:
        text: TOML that tomllib accepts.
    Raises: RecursionError for values nested deeper than Python's stack.
    """
    return _KeyScanner(text).lines


class _KeyScanner:
    """A recursive-descent scanner over the tokens of a valid TOML text.

    Attributes:
        lines (dict[KeyPath, int]): the result.
    """

    def __init__(self, text: str) -> None:
        self.lines: dict[KeyPath, int] = {}
        self._array_index: dict[KeyPath, int] = {}  # of each [[array of tables]] the newest index
        self._tokens: list[tuple[str, int]] = []
        line, start = 1, 0
        for match in _TOKENS.finditer(text):
            line += text.count("\n", start, match.start())
            start = match.start()
            if not match[0].startswith("#"):
                self._tokens.append((match[0], line))
        self._position = 0
        table: KeyPath = ()
        while (token := self._peek()) is not None:
            if token == "\n":
                self._next()
            elif token == "[":
                table = self._scan_header()
            else:
                self._scan_pair(table)

    def _peek(self) -> str | None:
        return self._tokens[self._position][0] if self._position < len(self._tokens) else None

    def _next(self) -> tuple[str, int]:
        self._position += 1
        return self._tokens[self._position - 1] if self._position <= len(self._tokens) else ("", 0)

    def _scan_dotted_key(self, end: str) -> tuple[list[str], int]:
        """Read a dotted key up to and with the token `end`: its parts, and the line of the first."""
        parts, line = list[str](), 0
        while self._peek() not in (None, end):
            token, token_line = self._next()
            line = line or token_line
            if token != ".":
                parts.append(_unquoted(token))
        self._next()
        return parts, line

    def _scan_header(self) -> KeyPath:
        """Read `[table]` or `[[array of tables]]`: the path of the keys that follow."""
        self._next()
        is_array = self._peek() == "["
        if is_array:
            self._next()
        parts, line = self._scan_dotted_key("]")
        if is_array:
            self._next()
        path: KeyPath = ()
        for number, part in enumerate(parts):
            path += (part,)
            if is_array and number == len(parts) - 1:
                self._array_index[path] = self._array_index.get(path, -1) + 1
            if path in self._array_index:
                # `[stage.args]` below a `[[stage]]` belongs to the newest stage
                self.lines.setdefault(path, line)
                path += (self._array_index[path],)
            self.lines.setdefault(path, line)
        return path

    def _scan_pair(self, table: KeyPath) -> None:
        parts, line = self._scan_dotted_key("=")
        path = table
        for part in parts:
            path += (part,)
            self.lines.setdefault(path, line)
        self._scan_value(path)

    def _scan_value(self, path: KeyPath) -> None:
        token = self._peek()
        if token == "[":
            self._next()
            index = 0
            while (token := self._peek()) not in (None, "]"):
                if token in ("\n", ","):
                    index += token == ","
                    self._next()
                else:
                    self.lines.setdefault((*path, index), self._tokens[self._position][1])
                    self._scan_value((*path, index))
            self._next()
        elif token == "{":
            self._next()
            while (token := self._peek()) not in (None, "}"):
                if token in ("\n", ","):
                    self._next()
                else:
                    self._scan_pair(path)
            self._next()
        else:  # a string, number or date; one with a time has several tokens
            while self._peek() not in (None, "\n", ",", "]", "}"):
                self._next()


def _unquoted(token: str) -> str:
    """A key without its quotes and escapes."""
    if token[:1] not in ('"', "'"):
        return token
    try:
        return next(iter(tomllib.loads(f"{token} = 0")))
    except tomllib.TOMLDecodeError:
        return token[1:-1]
