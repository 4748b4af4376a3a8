"""Text that is safe on a terminal, and how wide it is there.

Names of metrics, texts of exceptions, names of folders and the rows of a stranger's database may hold anything. A terminal obeys
what it is sent: an escape sequence sets the window's title, writes the clipboard or clears the screen, and a bidirectional override
shows a line in another order than it has.
"""

from __future__ import annotations

import re
import unicodedata

COLOUR = re.compile(r"\x1b\[[0-9;:]*m")
"""An SGR sequence: colour, bold, underline. The only escape sequences that leave nothing behind but looks."""

SEQUENCE = re.compile(
    r"""
    \x1b \[ [0-?]* [ -/]* [@-~]?                    # CSI: cursor, screen, modes
    | \x1b [\]PX^_] [^\x07\x1b\x9c\n]* (?:\x07|\x1b\\|\x9c)?  # OSC, DCS, SOS, PM, APC: title, clipboard, …; one line
    | \x1b [ -/]* [0-~]?                            # the others
    | \x9b [0-?]* [ -/]* [@-~]?                     # CSI as one character
    | [\x90\x98\x9d-\x9f] [^\x07\x1b\x9c\n]* (?:\x07|\x1b\\|\x9c)?
    """,
    re.VERBOSE,
)


BEGUN = re.compile(r"\x1b(?:\[[0-?]*[ -/]*|[ -/]+|[\]PX^_][^\x07\x1b\x9c\n]{0,65536})?\Z")
"""A sequence that is cut off where the text ends."""


def printable(text: str) -> str:
    """Whatever a terminal would obey becomes a question mark; lines and tabs stay. No letter is lost that could be shown."""
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else _harmless(letter) for letter in text)


def coloured(text: str) -> str:
    """For a training's own output: colours and carriage returns stay as well, other escape sequences go as a whole."""
    return "".join(
        part if COLOUR.fullmatch(part) else "".join("\r" if letter == "\r" else printable(letter) for letter in part)
        for part in _parts(text)
    )


def _parts(text: str) -> list[str]:
    """Colours, and what stands between sequences."""
    parts, at = [], 0
    for found in SEQUENCE.finditer(text):
        parts.append(text[at : found.start()])
        if COLOUR.fullmatch(found[0]):
            parts.append(found[0])
        at = found.end()
    return [*parts, text[at:]]


def in_one_line(text: str) -> str:
    """Printable, its line breaks and tabs as spaces: for a cell of a table, or a line that is rewritten in place."""
    return " ".join(re.split(r"[\n\t]", printable(text)))


def _harmless(letter: str) -> str:
    if letter in "\n\t":
        return letter
    return " " if unicodedata.category(letter) == "Zs" else "?"


def width(text: str) -> int:
    """Columns that printable text takes."""
    if text.isascii():
        return len(text)
    return sum(_columns(letter) for letter in text)


def cut(text: str, columns: int) -> str:
    """What fits, with an ellipsis at its end where something had to go."""
    if width(text) <= columns:
        return text
    kept, used = "", 0
    for letter in text:
        used += _columns(letter)
        if used > columns - 1:
            break
        kept += letter
    return kept + "…" if columns > 0 else ""


def folded(text: str, columns: int) -> list[str]:
    """Lines of at most so many columns, broken between words where that is possible. `text` is one line."""
    lines = [""]
    for word in re.findall(r" *[^ ]+| +", text):
        if width(lines[-1]) + width(word) <= columns:
            lines[-1] += word
            continue
        rest = word.lstrip(" ")
        while width(rest) > columns:
            first = _first(rest, columns)
            lines.append(first)
            rest = rest[len(first) :]
        lines.append(rest)
    return lines[1:] if len(lines) > 1 and not lines[0] else lines


def _first(text: str, columns: int) -> str:
    """What fits; one letter at least."""
    kept, used = text[0], _columns(text[0])
    for letter in text[1:]:
        used += _columns(letter)
        if used > columns:
            break
        kept += letter
    return kept


def _columns(letter: str) -> int:
    if unicodedata.combining(letter):
        return 0
    return 2 if unicodedata.east_asian_width(letter) in "WF" else 1
