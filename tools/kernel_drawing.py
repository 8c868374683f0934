"""Draws a kernel as SVG: lanes of boxes from global memory to the results, arrows between them, a table of barriers."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

WIDTH, MARGIN, LANE_TITLE = 1080, 16, 116
LINE, PAD, GAP, LANE_GAP = 17, 9, 14, 46
CHARACTER = 7.0  # mean width at 13 px
COLUMNS = (230, 130, 400, 288)  # of the table of barriers

STYLE = """
.page { fill: #ffffff } .text { fill: #1f2328 } .faint { fill: #57606a } .rule { stroke: #d0d7de }
.memory { fill: #f6f8fa; stroke: #8c959f } .role { fill: #ddf4ff; stroke: #0969da }
.shared { fill: #dafbe1; stroke: #1a7f37 } .result { fill: #fff8c5; stroke: #9a6700 }
.arrow { stroke: #57606a; fill: none } .head { fill: #57606a }
"""
DARK = """
.page { fill: #0d1117 } .text { fill: #e6edf3 } .faint { fill: #9da7b3 } .rule { stroke: #30363d }
.memory { fill: #161b22; stroke: #6e7681 } .role { fill: #0c2d6b; stroke: #58a6ff }
.shared { fill: #0f3d1e; stroke: #3fb950 } .result { fill: #4b3a00; stroke: #d29922 }
.arrow { stroke: #9da7b3; fill: none } .head { fill: #9da7b3 }
"""


@dataclass(frozen=True)
class Box:
    """A role, or a part of memory.

    Attributes:
        name: how arrows call it, and its title.
        text: what it does or holds.
        code: names that the package's sources define, as "file:Name" below `cute_kernels`.
        width: relative to the other boxes of its lane.
    """

    name: str
    text: str = ""
    code: tuple[str, ...] = ()
    width: float = 1.0


@dataclass(frozen=True)
class Lane:
    """Boxes side by side. kind: "memory", "role", "shared" or "result"."""

    title: str
    kind: str
    boxes: tuple[Box, ...]


@dataclass(frozen=True)
class Arrow:
    """From a box to one of a lane below, or of the lane above (drawn dashed: a stage is given back)."""

    source: str
    target: str
    label: str = ""


@dataclass(frozen=True)
class Barrier:
    """A row of the table: what arrives how often, and who waits."""

    name: str
    count: str
    arrivals: str
    waits: str
    code: tuple[str, ...] = ()


@dataclass(frozen=True)
class Figure:
    """A kernel family's picture, `docs/figures/kernel_NAME.svg`."""

    name: str
    title: str
    lanes: tuple[Lane, ...]
    arrows: tuple[Arrow, ...]
    barriers: tuple[Barrier, ...]
    note: str = ""

    def codes(self) -> Iterator[str]:
        """Every "file:Name" that the figure relies on."""
        for lane in self.lanes:
            for box in lane.boxes:
                yield from box.code
        for barrier in self.barriers:
            yield from barrier.code


def defined_names(path: Path) -> set[str]:
    """Names of classes, functions, variables and fields that a source defines, and its string constants."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value)
    return names


@dataclass(frozen=True)
class Place:
    """Where a box is drawn."""

    x: float
    y: float
    width: float
    height: float
    lines: tuple[str, ...]

    @property
    def middle(self) -> float:
        return self.x + self.width / 2


def wrapped(text: str, width: float) -> list[str]:
    """Lines that fit; a line break in the text stays."""
    return [line for part in text.split("\n") for line in textwrap.wrap(part, int(width / CHARACTER)) or [""]]


def places_of(figure: Figure, top: float) -> tuple[dict[str, Place], list[tuple[float, float]], float]:
    """Places of all boxes by name, (top, height) of each lane, and where the last one ends."""
    places, lanes, y = {}, [], top
    for lane in figure.lanes:
        room = WIDTH - 2 * MARGIN - LANE_TITLE - GAP * (len(lane.boxes) - 1)
        unit = room / sum(box.width for box in lane.boxes)
        texts = [wrapped(box.text, unit * box.width - 2 * PAD) if box.text else [] for box in lane.boxes]
        height = 2 * PAD + LINE * (1 + max(len(lines) for lines in texts))
        x = MARGIN + LANE_TITLE
        for box, lines in zip(lane.boxes, texts, strict=True):
            places[box.name] = Place(x, y, unit * box.width, height, tuple(lines))
            x += unit * box.width + GAP
        lanes.append((y, height))
        y += height + LANE_GAP
    return places, lanes, y - LANE_GAP


def text_at(x: float, y: float, text: str, kind: str = "text", more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}"{more}>{escape(text)}</text>'


def draw_box(box: Box, place: Place, kind: str) -> list[str]:
    parts = [
        f'<rect x="{place.x:.1f}" y="{place.y:.1f}" width="{place.width:.1f}" height="{place.height:.1f}" rx="5" '
        f'class="{kind}"/>',
        text_at(place.x + PAD, place.y + PAD + 12, box.name, more=' font-weight="bold"'),
    ]
    for i, line in enumerate(place.lines):
        parts.append(text_at(place.x + PAD, place.y + PAD + 12 + LINE * (i + 1), line))
    return parts


def nearest(place: Place, x: float) -> float:
    """The x within a box that is nearest to another one."""
    return min(max(x, place.x + 30), place.x + place.width - 30)


def meeting(upper: Place, lower: Place, count: int, index: int) -> tuple[float, float]:
    """x of an arrow at the upper and at the lower box: upright where they overlap."""
    left, right = max(upper.x, lower.x), min(upper.x + upper.width, lower.x + lower.width)
    if right - left > 40:
        x = left + (right - left) * (index + 1) / (count + 1)
        return x, x
    return nearest(upper, lower.middle), nearest(lower, upper.middle)


def draw_arrows(figure: Figure, places: dict[str, Place]) -> list[str]:
    pairs: dict[frozenset[str], list[Arrow]] = {}
    for arrow in figure.arrows:
        pairs.setdefault(frozenset((arrow.source, arrow.target)), []).append(arrow)
    parts = []
    for arrows in pairs.values():
        for index, arrow in enumerate(arrows):
            source, target = places[arrow.source], places[arrow.target]
            back = source.y > target.y
            upper, lower = (target, source) if back else (source, target)
            x_upper, x_lower = meeting(upper, lower, len(arrows), index)
            y_upper, y_lower = upper.y + upper.height, lower.y
            begin, end = ((x_lower, y_lower), (x_upper, y_upper)) if back else ((x_upper, y_upper), (x_lower, y_lower))
            dashes = ' stroke-dasharray="5 4"' if back else ""
            parts.append(
                f'<line x1="{begin[0]:.1f}" y1="{begin[1]:.1f}" x2="{end[0]:.1f}" y2="{end[1]:.1f}" class="arrow" '
                f'stroke-width="1.5" marker-end="url(#head)"{dashes}/>'
            )
            if arrow.label:
                for i, line in enumerate(arrow.label.split("\n")):
                    rows = arrow.label.count("\n")
                    y = (y_upper + y_lower) / 2 + 4 + 14 * (i - rows / 2)
                    aside = 7 + 10 * abs(x_upper - x_lower) / (y_lower - y_upper)  # of an arrow aslant
                    parts.append(text_at((x_upper + x_lower) / 2 + aside, y, line, "faint", ' font-size="12"'))
    return parts


def draw_barriers(figure: Figure, top: float) -> tuple[list[str], float]:
    """The table of barriers, and where it ends."""
    parts, y = [], top
    rows = [("barrier", "how many", "a phase ends with", "who waits")]
    rows += [(each.name, each.count, each.arrivals, each.waits) for each in figure.barriers]
    for i, row in enumerate(rows):
        cells = [
            wrapped(text, width - (40 if width == COLUMNS[0] else 14)) for text, width in zip(row, COLUMNS, strict=True)
        ]
        x = MARGIN
        for lines, width in zip(cells, COLUMNS, strict=True):
            for j, line in enumerate(lines):
                weight = ' font-weight="bold"' if i == 0 or x == MARGIN else ""
                parts.append(text_at(x, y + LINE * (j + 1), line, more=weight))
            x += width
        y += LINE * max(len(lines) for lines in cells) + 8
        parts.append(f'<line x1="{MARGIN}" y1="{y:.1f}" x2="{WIDTH - MARGIN}" y2="{y:.1f}" class="rule"/>')
        y += 2
    for line in wrapped(figure.note, WIDTH - 2 * MARGIN) if figure.note else []:
        y += LINE
        parts.append(text_at(MARGIN, y + 4, line, "faint"))
    return parts, y + MARGIN


def draw(figure: Figure, dark: bool = False) -> str:
    """The figure as SVG; it follows the reader's light or dark theme. dark: dark whatever the theme."""
    places, lanes, bottom = places_of(figure, 52)
    body = []
    for lane, (y, height) in zip(figure.lanes, lanes, strict=True):
        title = wrapped(lane.title, LANE_TITLE - 10)
        start = y + height / 2 - LINE * (len(title) - 1) / 2 + 4
        body += [text_at(MARGIN, start + LINE * i, line, "faint") for i, line in enumerate(title)]
        for box in lane.boxes:
            body += draw_box(box, places[box.name], lane.kind)
    body += draw_arrows(figure, places)
    table, height = draw_barriers(figure, bottom + 18) if figure.barriers else ([], bottom + MARGIN)
    style = DARK if dark else f"{STYLE}@media (prefers-color-scheme: dark) {{{DARK}}}\n"
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" font-family="sans-serif" '
        f'font-size="13">\n<title>{escape(figure.title)}</title>\n<style>{style}</style>\n'
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        'orient="auto"><path d="M0 0 L8 4 L0 8 z" class="head"/></marker></defs>\n'
        f'<rect width="{WIDTH}" height="{height:.0f}" class="page"/>\n'
    )
    title = text_at(MARGIN, 30, figure.title, more=' font-size="17" font-weight="bold"')
    return head + "\n".join([title, *body, *table]) + "\n</svg>\n"
