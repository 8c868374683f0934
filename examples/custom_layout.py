"""A shared-memory layout of one's own: proved to lose nothing, counted for bank conflicts, drawn.

A tile of 32 rows of 128 bytes, read by ldmatrix-like accesses: lane r takes 16 bytes of row r. Rows that lie one after
the other all begin in bank 0; an XOR of the 16-byte column with the row spreads them.

    python examples/custom_layout.py [FOLDER]
"""

import argparse
import tempfile
from pathlib import Path

from layouts import algebra
from layouts.algebra import Layout
from layouts.banks import report
from layouts.draw import figures, save

parser = argparse.ArgumentParser()
parser.add_argument("folder", nargs="?", type=Path)
folder = parser.parse_args().folder or Path(tempfile.mkdtemp())
folder.mkdir(parents=True, exist_ok=True)
plain = Layout((32, 8), (8, 1))  # rows x columns of 16 bytes, row-major
swizzled = algebra.swizzled(3, 0, 3, plain)  # column ^= row % 8
assert algebra.is_permutation(plain)
assert sorted(algebra.offsets(swizzled)) == list(range(32 * 8))  # every place once

for name, layout in {"row-major": plain, "swizzled": swizzled}.items():
    counted = report([16 * int(layout(lane, 0)) for lane in range(32)], width=16)
    print(f"{name:<10} {algebra.notation(layout)}: {counted.describe()}")
    print(f"{'':<10} drawn in {save(figures.value_grid(layout, title=name, element_bytes=16), folder / f'{name}.svg')}")
