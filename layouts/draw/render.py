"""Writes a `Figure` as SVG, or as HTML with hover and highlighting, in one file without outside references."""

from __future__ import annotations

import html
import textwrap
from pathlib import Path

from layouts.draw.figure import Cell, Figure, Panel

CHAR = 6.7
LINE = 13
PADDING = 7
MARGIN = 16
TITLE = 26
LABEL_GAP = 6
WORDS_WIDTH = 700  # to which captions of narrow drawings are wrapped
FONT = "DejaVu Sans Mono, Menlo, Consolas, monospace"


class _Grid:
    """Geometry of one panel: where boxes go and how large they are."""

    def __init__(self, panel: Panel):
        self.panel = panel
        lines = [line for cell in panel.cells for line in cell.text.split("\n")]
        tallest = max((cell.text.count("\n") + 1 for cell in panel.cells), default=1)
        widest = max((len(line) / cell.span for cell in panel.cells for line in cell.text.split("\n")), default=1)
        labels = max((len(label) for label in panel.column_labels), default=0)
        self.cell_width = max(18.0, max(widest, min(labels, 6)) * CHAR + PADDING)
        self.cell_height = max(18.0, tallest * LINE + PADDING)
        self.left = max((len(label) for label in panel.row_labels), default=0) * CHAR + (LABEL_GAP if lines else 0)
        self.top = TITLE + (LINE + 4 if panel.column_labels else 0)
        self.notes = panel.note.split("\n") if panel.note else []

    @property
    def width(self) -> float:
        words = [self.panel.title, *self.notes]
        return max(self.left + self.panel.columns * self.cell_width, max(len(word) for word in words) * CHAR * 1.1)

    @property
    def height(self) -> float:
        return self.top + self.panel.rows * self.cell_height + len(self.notes) * (LINE + 3) + 14

    def render(self, x0: float, y0: float) -> list[str]:
        out = [_text(x0, y0 + 16, self.panel.title, "panel")]
        for i, label in enumerate(self.panel.column_labels):
            x = x0 + self.left + (i + 0.5) * self.cell_width
            out.append(_text(x, y0 + self.top - 5, label, "label middle"))
        for i, label in enumerate(self.panel.row_labels):
            y = y0 + self.top + (i + 0.5) * self.cell_height + 4
            out.append(_text(x0 + self.left - LABEL_GAP, y, label, "label end"))
        out += [self._cell(cell, x0 + self.left, y0 + self.top) for cell in self.panel.cells]
        bottom = y0 + self.top + self.panel.rows * self.cell_height
        out += [_text(x0, bottom + (i + 1) * (LINE + 3), note, "note") for i, note in enumerate(self.notes)]
        return out

    def _cell(self, cell: Cell, x0: float, y0: float) -> str:
        x, y = x0 + cell.column * self.cell_width, y0 + cell.row * self.cell_height
        width = cell.span * self.cell_width
        facts = "\n".join(f"{name}: {value}" for name, value in cell.facts.items())
        title = f"<title>{html.escape(facts)}</title>" if facts else ""
        group = f' data-g="{html.escape(cell.group)}"' if cell.group else ""
        box = f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{self.cell_height:.1f}" fill="{cell.color}"/>'
        lines = cell.text.split("\n")
        first = y + self.cell_height / 2 - (len(lines) - 1) * LINE / 2 + 4
        texts = [_text(x + width / 2, first + i * LINE, line, "cell middle") for i, line in enumerate(lines) if line]
        return f"<g class='box'{group}>{title}{box}{''.join(texts)}</g>"


def _text(x: float, y: float, text: str, kind: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}">{html.escape(text)}</text>'


_STYLE = f"""
text {{ font-family: {FONT}; fill: #1a1a1a; }}
.title {{ font-size: 16px; font-weight: bold; }} .panel {{ font-size: 12.5px; font-weight: bold; }}
.cell {{ font-size: 11px; }} .label {{ font-size: 10.5px; fill: #555; }} .note {{ font-size: 11.5px; fill: #333; }}
.middle {{ text-anchor: middle; }} .end {{ text-anchor: end; }}
rect {{ stroke: #8a8a8a; stroke-width: 0.6; }}
"""


def to_svg(figure: Figure) -> str:
    """Draws the figure as an SVG document; hovering shows a cell's facts in any browser."""
    grids = [_Grid(panel) for panel in figure.panels]
    if not figure.across:
        for grid in grids:  # columns of one panel stand under those of another
            grid.left = max(other.left for other in grids)
    widths, heights = [grid.width for grid in grids], [grid.height for grid in grids]
    across = sum(widths) + 2 * MARGIN * (len(grids) - 1) if figure.across else max(widths)
    fits = int(max(across, WORDS_WIDTH) / (CHAR * 1.1))
    caption = [part for line in figure.caption.split("\n") for part in textwrap.wrap(line, fits)]
    words = max(len(figure.title) * 1.5, *(len(line) for line in [*caption, ""])) * CHAR * 1.1
    width = max(across, words) + 2 * MARGIN
    height = MARGIN + 28 + len(caption) * (LINE + 3) + (max(heights) if figure.across else sum(heights)) + MARGIN
    body = [f'<rect x="0" y="0" width="{width:.0f}" height="{height:.0f}" fill="#ffffff" style="stroke:none"/>']
    body.append(_text(MARGIN, MARGIN + 14, figure.title, "title"))
    y = MARGIN + 28.0
    for line in caption:
        body.append(_text(MARGIN, y + 6, line, "note"))
        y += LINE + 3
    x = float(MARGIN)
    for grid in grids:
        body += grid.render(x, y)
        if figure.across:
            x += grid.width + 2 * MARGIN
        else:
            y += grid.height
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}"'
    head += f' viewBox="0 0 {width:.0f} {height:.0f}">'
    return "\n".join([head, f"<style>{_STYLE}</style>", *body, "</svg>", ""])


_SCRIPT = """
const tip = document.getElementById('tip');
for (const box of document.querySelectorAll('g.box')) {
  const title = box.querySelector('title');
  const facts = title ? title.textContent : '';
  if (title) title.remove();
  const mates = box.dataset.g ? document.querySelectorAll('g.box[data-g="' + CSS.escape(box.dataset.g) + '"]') : [box];
  box.addEventListener('mousemove', e => {
    if (!facts) return;
    tip.textContent = facts; tip.style.display = 'block';
    tip.style.left = (e.pageX + 14) + 'px'; tip.style.top = (e.pageY + 14) + 'px';
  });
  box.addEventListener('mouseenter', () => mates.forEach(m => m.classList.add('lit')));
  box.addEventListener('mouseleave', () => {
    tip.style.display = 'none'; mates.forEach(m => m.classList.remove('lit'));
  });
}
"""

_PAGE_STYLE = """
body { margin: 0; background: #fff; }
#tip { display: none; position: absolute; white-space: pre; background: #222; color: #fff; padding: 6px 9px;
  border-radius: 4px; font: 12px DejaVu Sans Mono, Menlo, Consolas, monospace; pointer-events: none; }
g.lit rect { stroke: #000; stroke-width: 2.2; }
"""


def to_html(figure: Figure) -> str:
    """Draws the figure as a self-contained page. Hovering over a cell shows its facts and highlights the cells of its
    group.
    """
    title = html.escape(figure.title)
    return (
        f"<!doctype html>\n<html lang='en'><head><meta charset='utf-8'><title>{title}</title>"
        f"<style>{_PAGE_STYLE}</style></head>\n<body>\n{to_svg(figure)}<div id='tip'></div>\n"
        f"<script>{_SCRIPT}</script></body></html>\n"
    )


def save(figure: Figure, path: str | Path) -> Path:
    """Writes a figure as SVG or HTML, depending on the suffix ``.svg`` or ``.html``.

    Raises:
        ValueError: the suffix is neither of the two.
    """
    target = Path(path)
    writers = {".svg": to_svg, ".html": to_html}
    if target.suffix not in writers:
        raise ValueError(f"path is {target}; want a name that ends in {' or '.join(writers)}")
    target.write_text(writers[target.suffix](figure), encoding="utf-8")
    return target
