"""A real terminal session as an animated SVG: the README's example, typed into a shell on a pseudoterminal.

    python docs/recording.py [docs/images/recording.svg]

What the shell writes is drawn by pyte, a terminal emulator, and each screen that stood for a moment becomes a frame. A pause is
shortened to a second and a half; nothing else is changed.
"""

from __future__ import annotations

import html
import os
import sys
import tempfile
import time
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from harness import NOTEBOOKS, Terminal  # noqa: E402

COLUMNS, LINES = 100, 24
WIDTH, HEIGHT = 8.4, 18.0
"""Of a character, in pixels."""
LONGEST_PAUSE_S, LAST_S, SHORTEST_S = 1.5, 6.0, 0.1
PROMPT = "$ "
COMMANDS = (
    "kgorch init",
    "kgorch start plan.toml --set stage.train.args.epochs=120 --set session.wall=20s",
    "kgorch start plan.toml --set session.wall=9h",
    "kgorch history",
    "kgorch checkpoints export my-run model.safetensors --best",
)
COLOURS = {
    "default": "#d6deeb", "black": "#575656", "red": "#ef5350", "green": "#22da6e", "brown": "#c5e478",
    "blue": "#82aaff", "magenta": "#c792ea", "cyan": "#21c7a8", "white": "#ffffff",
}  # fmt: skip
Line = tuple[tuple[str, str, bool], ...]
"""Texts of one colour each, and whether they are bold."""


def record(folder: Path) -> list[tuple[float, tuple[Line, ...]]]:
    """Type the commands. Returns: screens, and when each came, in seconds."""
    env = {name: value for name, value in os.environ.items() if name not in NOTEBOOKS}
    env |= {"KGORCH_HOME": str(folder / "home"), "XDG_CONFIG_HOME": str(folder), "TERM": "xterm", "PS1": PROMPT}
    env |= {"PATH": f"{Path(sys.executable).parent}:{env['PATH']}", "PROMPT_COMMAND": ""}
    terminal = Terminal(["bash", "--norc", "--noprofile"], folder / "work", env, COLUMNS, LINES, within_s=600)
    emulator = terminal.emulated(COLUMNS, LINES)
    frames: list[tuple[float, tuple[Line, ...]]] = []

    def take(lines: list[str]) -> None:
        screen = tuple(line_of(emulator.screen.buffer[number]) for number in range(LINES))
        if not frames or frames[-1][1] != screen:
            frames.append((time.monotonic(), screen))

    for command in COMMANDS:
        emulator.wait_for(lambda lines: take(lines) or is_prompt(lines))
        for letter in command:
            terminal.type(letter)
            time.sleep(0.025)
            emulator.wait_for(lambda lines: take(lines) or True)
        terminal.type("\n")
        emulator.wait_for(lambda lines: take(lines) or not is_prompt(lines))
    emulator.wait_for(lambda lines: take(lines) or is_prompt(lines))
    terminal.process.kill()
    return frames


def is_prompt(lines: list[str]) -> bool:
    """Whether the shell waits for a command: its line is the last one that is not empty."""
    return next((line for line in reversed(lines) if line), "") == PROMPT.rstrip()


def line_of(row: Any) -> Line:
    cells = [(row[column].data, row[column].fg, row[column].bold) for column in range(COLUMNS)]
    parts = (
        (colour, bold, "".join(cell[0] for cell in run)) for (colour, bold), run in groupby(cells, lambda c: c[1:])
    )
    line = [(text, colour, bold) for colour, bold, text in parts]
    while line and not line[-1][0].strip():
        line.pop()
    return tuple(line)


def drawn(frames: list[tuple[float, tuple[Line, ...]]]) -> str:
    """The SVG. Each distinct line is defined once; a frame refers to its lines, and CSS shows one frame at a time."""
    kept = [
        frame for frame, after in zip(frames, [*frames[1:], (None, None)], strict=True)
        if after[0] is None or after[0] - frame[0] >= SHORTEST_S
    ]  # fmt: skip
    lasts = [min(b[0] - a[0], LONGEST_PAUSE_S) for a, b in pairwise(kept)] + [LAST_S]
    total_s, at_s = sum(lasts), 0.0
    width, height = COLUMNS * WIDTH + 24, LINES * HEIGHT + 24
    names: dict[Line, str] = {}
    body, rules = [], []
    for number, ((_, screen), last_s) in enumerate(zip(kept, lasts, strict=True)):
        uses = []
        for row, line in enumerate(screen):
            if line:
                name = names.setdefault(line, f"l{len(names)}")
                uses.append(f'<use href="#{name}" y="{row * HEIGHT:g}"/>')
        from_, to = 100 * at_s / total_s, 100 * (at_s + last_s) / total_s
        rules.append(
            f"@keyframes k{number}{{0%,{to:.3f}%,100%{{visibility:hidden}}{from_:.3f}%{{visibility:visible}}}}"
            f"#f{number}{{animation:k{number} {total_s:.2f}s step-end infinite}}"
            if number
            else f"@keyframes k0{{0%{{visibility:visible}}{to:.3f}%,100%{{visibility:hidden}}}}"
            f"#f0{{animation:k0 {total_s:.2f}s step-end infinite}}"
        )
        body.append(f'<g id="f{number}" class="f">{"".join(uses)}</g>')
        at_s += last_s
    lines = [
        f'<text id="{name}" xml:space="preserve">{"".join(map(span, line))}</text>' for line, name in names.items()
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}">'
        f"<title>{html.escape('; '.join(COMMANDS))}</title>"
        "<style>text{font:14px ui-monospace,'DejaVu Sans Mono',Menlo,Consolas,monospace;fill:#d6deeb}"
        f".f{{visibility:hidden}}{''.join(rules)}"
        f"@media (prefers-reduced-motion:reduce){{.f{{animation:none!important}}#f{len(kept) - 1}{{visibility:visible}}}}"
        f'</style><defs>{"".join(lines)}</defs><rect width="100%" height="100%" rx="8" fill="#011627"/>'
        f'<g transform="translate(12 26)">{"".join(body)}</g></svg>\n'
    )


def span(part: tuple[str, str, bool]) -> str:
    text, colour, bold = part
    style = (f' fill="{COLOURS.get(colour, COLOURS["default"])}"' if colour != "default" else "") + (
        ' font-weight="bold"' if bold else ""
    )
    # each with its length, so that a reader's font of another width keeps the columns
    return f'<tspan textLength="{len(text) * WIDTH:g}"{style}>{html.escape(text)}</tspan>'


def main() -> None:
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "images" / "recording.svg"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "work").mkdir()
        frames = record(folder)
    out.write_text(drawn(frames))
    print(f"{out}: {len(frames)} screens, {out.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
