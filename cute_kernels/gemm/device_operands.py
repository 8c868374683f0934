"""`Operands`, the addresses that kernels of products are launched with, and functions that load stored scales as
fp32."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from cute_kernels.device import numbers, ptx
from cute_kernels.formats.weights import WeightFormat
from cute_kernels.formats.weights.decoder import CodeDecoder
from layouts.weights.hopper import TILE_N


@dataclass(frozen=True)
class Operands:
    """Addresses of a launch. bias, residual, zeros and workspace are 0 if the launch has none."""

    x: Int64  # [m, k] of the configuration's dtype
    codes: Int64
    scales: Int64
    zeros: Int64
    bias: Int64  # [n] of x's dtype
    residual: Int64  # as out, of x's dtype
    out: Int64
    workspace: Int64  # [blocks, max_parts, m * block_rows] fp32, EMPTY


def operands_of(kind: Any, given, **others) -> Any:
    """Makes the operands, a dataclass ``kind``, from a launch's arguments ``given``. others: fields that ``given``
    lacks."""
    if "x" not in others:
        others["x"] = ptx.address(given.x)
    names = (own.name for own in fields(kind) if own.name not in others)
    return kind(**{name: getattr(given, name) for name in names}, **others)


def scale_number(config, decoder: CodeDecoder, word):
    """Converts a stored scale of the configuration's format to fp32. word: the scale's bits, zero-extended."""
    if config.format.scale_bytes == 4:
        return word.bitcast(Float32)
    if config.format.power_scales:  # 2**-127 is subnormal: the bit below those of the exponent
        return cutlass.max(Int32(word << 23), Int32(1 << 22)).bitcast(Float32)
    word = decoder.scale_word(word)
    return ptx.bf16x2_low_to_float(word) if config.dtype == "bf16" else ptx.half2_low_to_float(word)


def load_channel(config, decoder: CodeDecoder, operands: Operands, tile, row, tile_bytes) -> list[Any]:
    """Loads the scales and offsets that hold for all of K, for a tile's rows ``row`` and ``row`` + 8. Returns a list of
    one pair, or an empty list.

    Without groups, the pair is (scales of both rows, offsets of both rows). With groups and a second level of scales,
    it is (second-level scales of both rows, None). With groups alone, the list is empty. tile_bytes: bytes of a tile's
    stored scales.
    """
    form, size, channel = config.format, config.format.scale_bytes, []
    if not config.group_size:
        first = Int64(tile) * TILE_N + row
        words = [numbers.load_global_part(operands.scales + first * size, 8 * size * half, size) for half in range(2)]
        points: list[Any] = [Uint32(decoder.symmetric_zero)] * 2
        if form.has_zeros:
            points = [numbers.load_global_part(operands.zeros + first, 8 * half, 1) for half in range(2)]
        scales = [scale_number(config, decoder, word) for word in words]
        channel.append((scales, decoder.row_numbers(None, points)))
    if form.row_scales:
        end = operands.scales + (Int64(tile) + 1) * tile_bytes
        channel.append((load_row_scales(form, end, row), None))
    return channel


def load_row_scales(form: WeightFormat, end, row) -> list[Any]:
    """Loads the second-level scales, fp32, of a tile's rows ``row`` and ``row`` + 8. end: the address where the tile's
    stored scales end."""
    size, bits = form.scale_bytes, 8 * form.scale_bytes
    first = end - form.more_groups * form.group_scale_bytes + Int64(row) * size
    words = [Uint32(0), Uint32(0)]
    for part in range(form.more_groups):
        for half in range(2):
            found = numbers.load_global_part(first + part * form.group_scale_bytes, 8 * size * half, size)
            words[half] = words[half] | (found << (bits * part))
    return [word.bitcast(Float32) for word in words]


@cute.jit
def row_of(end, rows, place):
    """Returns (number of rows of out to write, index of the row of x from which row ``place`` of out is made).

    end, rows: addresses as in `INPUT_ROWS`. If ``end`` is 0, every row is written. The returned number is then
    ``place`` + 1, so the caller writes row ``place``.
    """
    count, row = place + 1, place
    if end != 0:
        count = Int32(ptx.load_global_words(end, 0, 1, constant=False)[0])
    if rows != 0:
        row = Int32(ptx.load_global_words(rows + Int64(place) * 4, 0, 1, constant=False)[0])
    return count, row
