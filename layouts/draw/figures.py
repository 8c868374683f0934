"""Pictures of this package's objects, each as a `Figure` of plain cells."""

from __future__ import annotations

import textwrap

import numpy as np

from layouts import algebra
from layouts.banks import NUM_BANKS, BankReport
from layouts.decode import Conversion
from layouts.draw.figure import Cell, Figure, Panel, heat, hue
from layouts.fragments import Fragment
from layouts.kv import KvRow
from layouts.patterns import Access
from layouts.transform import Transform
from layouts.weights.formats import WeightTile
from layouts.weights.hopper import TILE_N

WRAP = 16  # cells of five characters then fit a column of text


def value_grid(layout: algebra.GeneralLayout, title: str = "", element_bytes: int = 2) -> Figure:
    """Draws the offsets of a layout of rank 2 (or of a flat layout, as a single row). The colour of an offset shows its
    bank.

    Args:
        layout: an affine or swizzled layout.
        title: the picture's title; by default the layout in CuTe notation.
        element_bytes: bytes of an element. They are needed to compute offsets in bytes, and banks.
    """
    shape = layout.shape
    rows = algebra.size(algebra.Layout(shape[0])) if isinstance(shape, tuple) and len(shape) > 1 else 1
    table = algebra.offsets(layout).reshape(-1, rows).T
    cells = []
    for (i, j), offset in np.ndenumerate(table):
        byte = int(offset) * element_bytes
        bank = byte // 4 % NUM_BANKS
        facts = {"coordinate": f"({i}, {j})", "offset": int(offset), "byte": byte, "bank": bank}
        cells.append(Cell(i, j, str(offset), hue(bank // 4, NUM_BANKS // 4), facts, group=f"bank{bank}"))
    panel = Panel(
        f"offset of (row, column); colour: four neighbouring banks, at {element_bytes} bytes per element",
        cells,
        [str(i) for i in range(table.shape[0])],
        [str(j) for j in range(table.shape[1])],
    )
    return Figure(title or algebra.notation(layout), [panel])


def fragment_map(fragment: Fragment) -> Figure:
    """Draws which thread and value hold each element of the tile. Each thread has its own colour."""
    owners = fragment.owners()
    as_matrix = fragment.axes[0] in ("n", "column")
    cells = []
    for i in range(fragment.tile[0]):
        for j in range(fragment.tile[1]):
            thread, value = (int(x) for x in owners[i, j])
            facts = {
                fragment.axes[0]: i,
                fragment.axes[1]: j,
                "thread": thread,
                "value": value,
                "register": f"{value * fragment.element_bits // 32}, bit {value * fragment.element_bits % 32}",
            }
            row, column = (j, i) if as_matrix else (i, j)
            cells.append(Cell(row, column, f"T{thread}\nv{value}", hue(thread, 32), facts, group=f"T{thread}"))
    down, across = (fragment.axes[1], fragment.axes[0]) if as_matrix else fragment.axes
    counts = fragment.tile[::-1] if as_matrix else fragment.tile
    panel = Panel(
        f"{down} downwards, {across} across: thread and value of each {fragment.element_bits}-bit element",
        cells,
        [f"{down}{i}" for i in range(counts[0])],
        [str(j) for j in range(counts[1])],
    )
    return Figure(fragment.name, [panel], algebra.notation(fragment.layout))


def bank_map(access: Access) -> Figure:
    """Draws which lane reaches which word and bank, and how many distinct words each bank has to deliver."""
    found = access.report()
    caption = f"{access.note}: {access.kind}, {access.width} bytes per address, {found.wavefronts} wavefronts, "
    caption += f"{found.conflicts} conflicts"
    return Figure(access.name, [_words_panel(found), _load_panel(found)], caption)


def _words_panel(found: BankReport) -> Panel:
    lanes_of: dict[int, list[int]] = {}
    phase_of: dict[int, int] = {}
    for number, phase in enumerate(found.phases):
        for lane in phase.lanes:
            address = found.addresses[lane]
            assert address is not None
            for word in range(address // 4, (address + found.width - 1) // 4 + 1):
                lanes_of.setdefault(word, []).append(lane)
                phase_of.setdefault(word, number)
    lines = sorted({word // NUM_BANKS for word in lanes_of})
    cells = []
    for row, line in enumerate(lines):
        for bank in range(NUM_BANKS):
            word = line * NUM_BANKS + bank
            lanes = lanes_of.get(word, [])
            color = hue(phase_of[word], max(4, len(found.phases))) if lanes else "#f7f7f7"
            facts = {"byte": word * 4, "bank": bank, "lanes": ", ".join(map(str, lanes)) or "none"}
            facts |= {"phase": phase_of[word]} if lanes else {}
            cells.append(Cell(row, bank, _ranges(lanes), color, facts, group=f"bank{bank}"))
    names = [f"byte {line * NUM_BANKS * 4}" for line in lines]
    title = "lanes that touch each 4-byte word; one line is 128 bytes; colour: phase"
    return Panel(title, cells, names, [str(bank) for bank in range(NUM_BANKS)])


def _ranges(lanes: list[int]) -> str:
    if not lanes:
        return ""
    return str(lanes[0]) if len(lanes) == 1 else f"{lanes[0]}\n+{len(lanes) - 1}"


def _load_panel(found: BankReport) -> Panel:
    cells, labels = [], []
    top = max((phase.wavefronts for phase in found.phases), default=1)
    for row, phase in enumerate(found.phases):
        labels.append(f"lanes {phase.lanes[0]}-{phase.lanes[-1]}")
        for bank in range(NUM_BANKS):
            count = len(phase.words.get(bank, ()))
            cells.append(Cell(row, bank, str(count or ""), heat(count, max(top, 2)), {"bank": bank, "words": count}))
    banks = ", ".join(map(str, found.banks))
    note = f"banks in parallel per phase: {banks} of {NUM_BANKS}; a phase takes as many wavefronts as its fullest bank"
    return Panel("distinct words per bank and phase", cells, labels, [str(b) for b in range(NUM_BANKS)], note)


def permutation(transform: Transform, line: int | None = None, lines: int | None = None) -> Figure:
    """Draws the source elements before and after a transform. Elements of one source row have one colour.

    Args:
        transform: the transform. It should be small, as every element becomes a cell.
        line: elements per line of the result; by default the last extent of the result, at most `WRAP`.
        lines: the number of lines of the result that are drawn, from the first on; by default all. In the source,
            elements that are not drawn in the result are white, and lines after the last drawn element are left out.
    """
    rows, columns = (1, *transform.in_shape)[-2:]
    widths = min(columns, WRAP), line or min(transform.out_shape[-1], WRAP)
    source = algebra.offsets(transform.source)
    shown = source if lines is None else source[: lines * widths[1]]
    seen = set(shown.tolist())
    until = min(transform.size, (max(seen) // widths[0] + 1) * widths[0])

    def cells(order: np.ndarray, width: int) -> list[Cell]:
        found = []
        for place, element in enumerate(order.tolist()):
            row, column = divmod(element, columns)
            byte = place * transform.bits // 8
            facts = {"place": place, "byte": byte, "bank": byte // 4 % NUM_BANKS, "source": f"({row}, {column})"}
            color = hue(row, rows) if element in seen else "#ffffff"
            text = f"{row},{column}" if element in seen else ""
            found.append(Cell(*divmod(place, width), text, color, facts, group=f"e{element}"))
        return found

    notes = [f"{width} elements ({width * transform.bits / 8:g} B) per line" for width in widths]
    first = "" if lines is None else f", first {lines} lines"
    panels = [
        Panel(f"before, {notes[0]}", cells(np.arange(until), widths[0])),
        Panel(f"after, {notes[1]}{first}", cells(shown, widths[1])),
    ]
    flip = f"; every element ^ {transform.flip:#x}" if transform.flip else ""
    caption = f"row,column of the element at each place, in memory order{flip}; destination -> source: "
    caption += algebra.notation(transform.source)
    return Figure(transform.name, panels, caption, across=sum(widths) <= WRAP + 4)


def register_bits(conversion: Conversion) -> Figure:
    """Draws how one register is converted: the stored elements, and the positions to which each of their bits moves."""
    order = conversion.stored_order()
    count, bits = conversion.count, conversion.bits
    fields = []
    for field in range(count):
        column = (count - 1 - field) * bits
        facts = {"field": field, "element": order[field], "bits": f"{field * bits}-{field * bits + bits - 1}"}
        color = hue(order[field], count)
        fields.append(Cell(0, column, f"e{order[field]}", color, facts, bits, f"e{order[field]}"))
        for bit in range(bits):
            place = column + bits - 1 - bit
            fields.append(Cell(1, place, str(bit), color, facts | {"bit": bit}, group=f"e{order[field]}"))
    names = [str(31 - i) for i in range(32)]
    panels = [Panel("the register as stored, bit 31 to the left", fields, ["element", "bit"], names)]
    panels.append(_extraction_panel(conversion, order, names))
    counts = ", ".join(f"{n} {op}" for op, n in conversion.instructions().items())
    caption = f"{count} {bits}-bit codes to {conversion.target.name}: {counts}. {conversion.note}".strip()
    return Figure(conversion.name, panels, caption)


def _extraction_panel(conversion: Conversion, order: tuple[int, ...], names: list[str]) -> Panel:
    matrix, constant = conversion.extraction()
    lane_bits, bits = conversion.lane_bits, conversion.bits
    cells = []
    for word in range(len(constant)):
        for bit in range(32):
            place = word * 32 + bit
            sources = [i for i, column in enumerate(matrix.columns) if column >> place & 1]
            fixed = int(constant[word]) >> bit & 1
            lane = place // lane_bits
            if sources:
                element, inner = order[sources[0] // bits], sources[0] % bits
                text, color = f"{inner}{'~' if fixed else ''}", hue(element, conversion.count)
                group = f"e{element}"
                facts: dict[str, object] = {
                    "lane": lane,
                    "from": f"element {element}, bit {inner}",
                    "inverted": bool(fixed),
                }
            else:
                text, color, group = str(fixed), "#ffffff" if not fixed else "#dddddd", ""
                facts = {"lane": lane, "constant": fixed}
            cells.append(Cell(word, 31 - bit, text, color, facts, group=group))
    labels = []
    for word in range(len(constant)):
        low, high = word * 32 // lane_bits, (word * 32 + 31) // lane_bits
        labels.append(f"lane {low}" if low == high else f"lanes {high},{low}")
    note = (
        "colour: element; digit in a coloured box: its bit, ~ inverted; white and grey: constants of the magic number"
    )
    return Panel("after extraction, before the arithmetic", cells, labels, names, note)


def scale_map(tile: WeightTile) -> Figure:
    """Draws which thread loads each scale, for half of a tile's features. Below that it draws the banks from which the
    first warp's load reads.
    """
    cells, shown = [], TILE_N // 2  # the other warps load as these do
    for row in range(tile.rows):
        for feature in range(shown):
            warp, of_warp = divmod(feature, 16)
            first = 4 * (of_warp % 8)
            facts = {"feature": feature, "byte": tile.scale_place(feature, row), "warp": warp}
            facts |= {"lanes": f"{first}-{first + 3}", "of the two of a lane": "first" if of_warp < 8 else "second"}
            color = hue(of_warp % 8, 8)
            cells.append(Cell(row, feature, str(first), color, facts, group=f"warp{warp}g{of_warp % 8}"))
    size = tile.group_size
    labels = [f"inputs {size * i}-{size * (i + 1) - 1}" for i in range(tile.groups)]
    labels += [f"second level, byte {i}" for i in range(tile.second_bytes // tile.scale_bytes)]
    across = [str(feature) if feature % 8 == 0 else "" for feature in range(shown)]
    title = (
        f"half a tile's scales, {tile.scale_bytes} B each, features across: the first of the four lanes that load each"
    )
    banks = bank_map(tile.load())
    return Figure(
        tile.name, [Panel(title, cells, labels, across), *banks.panels], f"{tile.describe()}; {banks.caption}"
    )


def byte_map(fmt: KvRow, width: int = 16) -> Figure:
    """Draws the bytes of a row, coloured by field."""
    cells = []
    for number, field in enumerate(fmt.fields):
        for byte in range(field.offset, field.end):
            facts = {"byte": byte, "field": field.name, "type": field.dtype, "note": field.note}
            facts |= {"bank in a row at 0": byte // 4 % NUM_BANKS}
            color = hue(number, max(9, len(fmt.fields)))
            cells.append(Cell(*divmod(byte, width), str(byte), color, facts, group=field.name))
    lines = -(-fmt.row_bytes // width)
    legend = "; ".join(f"[{f.offset}, {f.end}) {f.name} ({f.dtype})" for f in fmt.fields)
    caption = "\n".join(textwrap.wrap(legend, 90))
    panel = Panel(f"{fmt.row_bytes} bytes, {width} per line", cells, [f"+{line * width}" for line in range(lines)])
    return Figure(f"{fmt.name}, head_dim {fmt.head_dim}", [panel], caption)
