"""Makes docs/demo.svg: a terminal in which `gyre demo --chaos` runs, recorded and drawn as a moving picture.

    python tools/demo_picture.py record demo.cast -- .venv/bin/gyre demo --chaos --steps 40
    python tools/demo_picture.py draw demo.cast docs/demo.svg

`record` runs the command in a pseudo-terminal and writes what it prints, with times, as an asciicast (version 2). It
needs Python's standard library alone. `draw` plays the recording into an emulated terminal (pyte), looks at its screen
at even intervals, and writes one SVG. CSS moves a strip of screens past a window, so the picture needs no script and
moves where an image may not run one, as on GitHub. Where motion is unwanted, or CSS is not read, it shows the last
screen.
"""

from __future__ import annotations

import argparse
import codecs
import fcntl
import json
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

COLUMNS, ROWS = 100, 30
LONGEST_S = 900.0
"""Deadline of the recorded command, several times what the demo takes on two busy cores."""

FRAME_S = 0.25
"""Time between two frames, in the picture's own time."""
LAST_FRAME_S = 6.0
"""How long the end stands before the picture begins anew."""

CELL_WIDTH, CELL_HEIGHT, FONT_SIZE, BASELINE = 8.4, 17, 14, 13
MARGIN = 14

STYLE_NAMES = {
    "green": "g",
    "red": "r",
    "brown": "y",  # pyte's name for yellow
    "cyan": "c",
    "blue": "b",
    "magenta": "m",
    "brightblack": "d",
}
"""The class of a colour in the picture. Any other colour is that of plain text."""

LIGHT = {"bg": "#ffffff", "fg": "#1f2328", "g": "#1a7f37", "r": "#cf222e", "y": "#9a6700", "c": "#1b7c83"}
LIGHT |= {"b": "#0969da", "m": "#8250df", "d": "#8c959f"}
DARK = {"bg": "#0d1117", "fg": "#e6edf3", "g": "#3fb950", "r": "#ff7b72", "y": "#d29922", "c": "#39c5cf"}
DARK |= {"b": "#58a6ff", "m": "#bc8cff", "d": "#6e7681"}

Run = tuple[int, str, str]
"""Cells of one style in a row: the first one's column, the text, and the class names."""
Row = tuple[Run, ...]
Screen = tuple[Row, ...]


# -- recording --------------------------------------------------------------------------------------


def record(command: list[str], shown: str, cast: Path) -> int:
    """Run the command in a pseudo-terminal and write what it printed. Returns the command's exit status."""
    started = time.monotonic()
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    process = subprocess.Popen(
        command,
        stdin=its,
        stdout=its,
        stderr=its,
        start_new_session=True,
        env={**os.environ, "TERM": "xterm-256color"},
    )
    os.close(its)
    header = {"version": 2, "width": COLUMNS, "height": ROWS, "command": shown, "timestamp": int(time.time())}
    decode = codecs.getincrementaldecoder("utf-8")("replace").decode
    try:
        cast.parent.mkdir(parents=True, exist_ok=True)
        with cast.open("w") as file:
            file.write(json.dumps(header) + "\n")
            file.write(json.dumps([0.0, "o", f"$ {shown}\r\n"]) + "\n")
            while time.monotonic() - started < LONGEST_S:
                if not select.select([ours], [], [], 1.0)[0]:
                    continue
                try:
                    data = os.read(ours, 65536)
                except OSError:  # Linux raises EIO when the last process has closed the terminal
                    break
                if not data:
                    break
                file.write(json.dumps([round(time.monotonic() - started, 3), "o", decode(data)]) + "\n")
        return process.wait(timeout=30)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        os.close(ours)


# -- playing ----------------------------------------------------------------------------------------


def frames(cast: Path, speed: float) -> Iterator[tuple[float, Screen]]:
    """The screens that differ from the one before, each with the seconds that it is shown."""
    import pyte

    with cast.open() as file:
        header: dict[str, Any] = json.loads(file.readline())
        chunks = [(float(at), text) for at, _, text in map(json.loads, file)]
    terminal = pyte.Screen(header["width"], header["height"])
    stream = pyte.Stream(terminal)
    shown: Screen | None = None
    lasted = 0.0
    due = FRAME_S * speed
    for index, (_, text) in enumerate(chunks):
        stream.feed(_dim_as_grey(text))
        until = chunks[index + 1][0] if index + 1 < len(chunks) else due
        while due <= until:
            screen = tuple(_row(terminal, row) for row in range(header["height"]))
            if shown is not None and screen != shown:
                yield lasted, shown
                lasted = 0.0
            shown, lasted, due = screen, lasted + FRAME_S, due + FRAME_S * speed
    yield LAST_FRAME_S, tuple(_row(terminal, row) for row in range(header["height"]))


def _dim_as_grey(text: str) -> str:
    """The text with the style `dim`, which pyte does not know, as the colour bright black."""
    return re.sub(
        r"\x1b\[(?:\d+;)*2(?:;\d+)*m", lambda found: re.sub(r"(?<=[\[;])2(?=[;m])", "90", found[0]), text
    )


def _row(terminal: Any, row: int) -> Row:
    cells = terminal.buffer[row]
    runs: list[Run] = []
    for column in range(terminal.columns):
        cell = cells[column]
        style = STYLE_NAMES.get(cell.fg, "") + (" s" if cell.bold else "")
        if runs and runs[-1][2] == style and runs[-1][0] + len(runs[-1][1]) == column:
            runs[-1] = (runs[-1][0], runs[-1][1] + cell.data, style)
        else:
            runs.append((column, cell.data, style))
    return tuple(
        (column + len(text) - len(text.lstrip()), text.strip(), style.strip())
        for column, text, style in runs
        if not text.isspace()
    )


# -- drawing ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Film:
    """Screens one below the other, and how long each is shown."""

    screens: list[tuple[float, Screen]]
    title: str

    def svg(self) -> str:
        width = COLUMNS * CELL_WIDTH
        height = ROWS * CELL_HEIGHT
        rows: dict[Row, str] = {}
        strip = []
        for index, (_, screen) in enumerate(self.screens):
            strip += [
                f'<use href="#{rows.setdefault(row, f"r{len(rows)}")}" y="{index * height + y * CELL_HEIGHT}"/>'
                for y, row in enumerate(screen)
                if row
            ]
        drawn = "\n".join(
            f'<text id="{name}" y="{BASELINE}">{_text(row)}</text>' for row, name in rows.items()
        )
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width + 2 * MARGIN:g} {height + 2 * MARGIN:g}" '
            f'role="img" xml:space="preserve">\n<title>{escape(self.title)}</title>\n'
            f"<style>{self._style(height)}</style>\n<defs>\n{drawn}\n</defs>\n"
            f'<rect class="w" width="100%" height="100%" rx="8"/>\n'
            f'<svg x="{MARGIN}" y="{MARGIN}" width="{width:g}" height="{height:g}">\n'
            f'<g class="f">\n{"".join(strip)}\n</g></svg>\n</svg>\n'
        )

    def _style(self, height: int) -> str:
        total = sum(lasts for lasts, _ in self.screens)
        steps, at = [], 0.0
        for index, (lasts, _) in enumerate(self.screens):
            steps.append(f"{100 * at / total:.2f}%{{transform:translateY({-index * height}px)}}")
            at += lasts
        last = -(len(self.screens) - 1) * height
        fonts = "ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono','Liberation Mono',monospace"
        return (
            f"text{{font:{FONT_SIZE}px {fonts};white-space:pre;fill:var(--fg)}}"
            f"svg{{{_variables(LIGHT)}}}"
            f"@media(prefers-color-scheme:dark){{svg{{{_variables(DARK)}}}}}"
            + "".join(f".{name}{{fill:var(--{name})}}" for name in STYLE_NAMES.values())
            + ".s{font-weight:700}.w{fill:var(--bg);stroke:var(--d)}"
            f".f{{transform:translateY({last}px);animation:film {total:.2f}s steps(1,end) infinite}}"
            f"@keyframes film{{{''.join(steps)}}}"
            "@media(prefers-reduced-motion:reduce){.f{animation:none}}"
        )


def _variables(colours: dict[str, str]) -> str:
    return ";".join(f"--{name}:{colour}" for name, colour in colours.items())


def _text(row: Row) -> str:
    """The runs of a row, each as wide as its cells are, whatever the reader's fixed-width font."""
    drawn = []
    for column, text, style in row:
        name = f' class="{style}"' if style else ""
        length = f' textLength="{len(text) * CELL_WIDTH:g}"'
        drawn.append(f'<tspan x="{column * CELL_WIDTH:g}"{length}{name}>{escape(text, quote=False)}</tspan>')
    return "".join(drawn)


def draw(cast: Path, picture: Path, speed: float) -> None:
    with cast.open() as file:
        command = json.loads(file.readline())["command"]
    film = Film(list(frames(cast, speed)), f"A terminal in which {command} runs, {speed:g} times as fast")
    picture.write_text(film.svg())
    print(
        f"{picture}: {picture.stat().st_size / 1000:.0f} kB, {len(film.screens)} screens, "
        f"{sum(lasts for lasts, _ in film.screens):.0f} s",
        file=sys.stderr,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    recording = verbs.add_parser("record", help="run a command in a pseudo-terminal and write what it prints")
    recording.add_argument("cast", type=Path)
    recording.add_argument("command", nargs="+")
    drawing = verbs.add_parser("draw", help="draw a recording as a moving picture")
    drawing.add_argument("cast", type=Path)
    drawing.add_argument("picture", type=Path)
    drawing.add_argument("--speed", type=float, default=6.0, help="times as fast as it was (6)")
    options = parser.parse_args()
    if options.verb == "draw":
        draw(options.cast, options.picture, options.speed)
        return 0
    shown = " ".join([Path(options.command[0]).name, *options.command[1:]])
    return record(options.command, shown, options.cast)


if __name__ == "__main__":
    sys.exit(main())
