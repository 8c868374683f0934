"""The parts of a picture as data, independent of how it is rendered, and the colours of its cells."""

from __future__ import annotations

import colorsys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Cell:
    """One box of a grid.

    Args:
        row: index of the grid row, from the top.
        column: index of the grid column, from the left.
        text: the lines inside the box, separated by newlines.
        color: the fill colour as ``#rrggbb``.
        facts: the lines that hovering shows, in order.
        span: the number of columns that the box covers.
        group: the name of a group of cells. Hovering over one cell highlights all cells of its group; empty for no
            group.
    """

    row: int
    column: int
    text: str
    color: str = "#ffffff"
    facts: Mapping[str, object] = field(default_factory=dict)
    span: int = 1
    group: str = ""


@dataclass(frozen=True)
class Panel:
    """A grid of cells with labels.

    Args:
        title: the text above the grid.
        cells: the boxes of the grid.
        row_labels: the labels left of the grid, top first; may be empty.
        column_labels: the labels above the columns; may be empty.
        note: the text below the grid.
    """

    title: str
    cells: Sequence[Cell]
    row_labels: Sequence[str] = ()
    column_labels: Sequence[str] = ()
    note: str = ""

    @property
    def rows(self) -> int:
        """Grid rows."""
        return max((cell.row + 1 for cell in self.cells), default=0)

    @property
    def columns(self) -> int:
        """Grid columns."""
        return max((cell.column + cell.span for cell in self.cells), default=0)


@dataclass(frozen=True)
class Figure:
    """Panels one above the other, or side by side.

    Args:
        title: the title of the picture.
        panels: the panels, from top to bottom or from left to right.
        caption: a text that says what the picture shows.
        across: whether panels are side by side.
    """

    title: str
    panels: Sequence[Panel]
    caption: str = ""
    across: bool = False


def hue(index: int, count: int, lightness: float = 0.85) -> str:
    """Returns a light colour for the kind with index ``index`` among ``count`` kinds. Neighbouring kinds get very
    different colours.
    """
    # Steps of the golden ratio keep any run of indices apart; small counts are spaced evenly.
    position = index / count if count <= 8 else index * 0.618033988749895 % 1.0
    shade = lightness - 0.06 * (index % 3 if count > 8 else 0)
    red, green, blue = colorsys.hls_to_rgb(position, shade, 0.62)
    return f"#{round(red * 255):02x}{round(green * 255):02x}{round(blue * 255):02x}"


def heat(value: int, top: int) -> str:
    """Returns a colour for a value: near-white for 0, light green for 1, then yellow to red as ``value`` rises to
    ``top``.
    """
    if value <= 0:
        return "#f7f7f7"
    if value == 1:
        return "#d9f0d3"
    share = min(1.0, (value - 1) / max(1, top - 1))
    return f"#ff{round(225 - 150 * share):02x}{round(150 - 90 * share):02x}"
