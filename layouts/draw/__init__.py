"""Layouts as pictures: value grids, thread-value maps, bank heat maps, permutations, registers bit by bit, byte maps.

`layouts.draw.figures` turns an object of this package into a `Figure` (plain data); `save` writes it as SVG or as a
self-contained HTML page, where hovering over a cell shows coordinate, thread, value, bank and byte.
"""

from layouts.draw.figure import Cell, Figure, Panel
from layouts.draw.render import save, to_html, to_svg

__all__ = ["Cell", "Figure", "Panel", "save", "to_html", "to_svg"]
