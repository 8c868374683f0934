"""Rows of bf16, fp16 or fp32 numbers in registers. Several lanes share a row; each lane loads and stores its runs of
columns.

``lanes`` lanes of a warp (a power of two) share a row; each has ``head_dim / lanes`` columns, in one run or in several.
Everything here is straight-line code over DSL scalars; only kernels branch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from cutlass import Float32, Int32, Int64, Uint32

from cute_kernels.device import numbers, ptx

VECTOR_BYTES = 16  # of the widest access


@dataclass(frozen=True)
class Piece:
    """The runs of bytes of a row that belong to one lane, and how they are accessed.

    Args:
        num_bytes: number of bytes of a run; lane i's first run begins at ``start + i * num_bytes``.
        start: number of bytes of the row before lane 0's first run.
        row_bytes: distance in bytes from one row to the next.
        runs: number of runs of a lane.
        run_bytes: distance in bytes from one run of a lane to the lane's next run.
    """

    num_bytes: int
    start: int
    row_bytes: int
    runs: int = 1
    run_bytes: int = 0

    @property
    def unit(self) -> int:
        """Bytes of one access: the largest width, up to 16, to which every run is aligned. Rows must be aligned to it,
        too.
        """
        return math.gcd(VECTOR_BYTES, self.num_bytes, self.start, self.row_bytes, self.run_bytes)

    @property
    def num_words(self) -> int:
        """Number of words that hold the lane's runs; every run begins a new word."""
        return self.runs * self.run_words

    @property
    def run_words(self) -> int:
        return -(-self.num_bytes // 4)

    def load(self, row: Int64, lane: Int32, offset: int = 0) -> list[Uint32]:
        """Loads a lane's runs of the row at ``row + offset`` bytes, in whole words. ``offset`` is known at compile
        time."""
        address, first = row + Int64(lane * self.num_bytes), self.start + offset
        return [word for r in range(self.runs) for word in self._load_run(address, first + r * self.run_bytes)]

    def _load_run(self, address: Int64, first_byte: int) -> list[Uint32]:
        if self.unit >= 4:
            words: list[Any] = []
            for byte in range(0, self.num_bytes, self.unit):
                words += ptx.load_global_words(address, first_byte + byte, self.unit // 4)
            return words
        words = [Uint32(0)] * self.run_words
        for byte in range(0, self.num_bytes, self.unit):
            part = numbers.load_global_part(address, first_byte + byte, self.unit)
            words[byte // 4] = words[byte // 4] | (part << (8 * (byte % 4)))
        return words

    def store(self, row: Int64, lane: Int32, words, offset: int = 0) -> None:
        """Stores a lane's runs. words: as `load` returns them."""
        address, first = row + Int64(lane * self.num_bytes), self.start + offset
        for r in range(self.runs):
            self._store_run(address, first + r * self.run_bytes, words[r * self.run_words : (r + 1) * self.run_words])

    def _store_run(self, address: Int64, first_byte: int, words) -> None:
        for byte in range(0, self.num_bytes, self.unit):
            first = byte // 4
            if self.unit >= 4:
                numbers.store_global_words(address, first_byte + byte, words[first : first + self.unit // 4])
            else:
                part = words[first] >> (8 * (byte % 4))
                numbers.store_global_part(address, first_byte + byte, part, self.unit)


@dataclass(frozen=True)
class Elements:
    """Rows of plain bf16, fp16 or fp32 numbers.

    Args:
        dtype: "bf16", "fp16" or "fp32".
        head_dim: number of columns of a row.
        lanes: number of lanes that share a row.
        runs: number of runs of columns that a lane owns, one in each of ``runs`` equal parts of the row.
    """

    dtype: str
    head_dim: int
    lanes: int
    runs: int = 1

    @property
    def count(self) -> int:
        """Number of columns of a lane."""
        return self.head_dim // self.lanes

    @property
    def width(self) -> int:
        """Bytes of a number."""
        return 4 if self.dtype == "fp32" else 2

    @property
    def row_bytes(self) -> int:
        return self.head_dim * self.width

    @property
    def piece(self) -> Piece:
        return Piece(self.count * self.width // self.runs, 0, self.row_bytes, self.runs, self.row_bytes // self.runs)

    def unpack(self, words) -> list[Float32]:
        """Converts a lane's words to fp32 numbers, exactly."""
        if self.dtype == "fp32":
            return [numbers.from_bits(words[i]) for i in range(self.count)]
        low, high = {
            "bf16": (ptx.bf16x2_low_to_float, ptx.bf16x2_high_to_float),
            "fp16": (ptx.half2_low_to_float, ptx.half2_high_to_float),
        }[self.dtype]
        return [half(words[i]) for i in range(self.count // 2) for half in (low, high)]

    def pack(self, values) -> list[Uint32]:
        """Rounds fp32 numbers to the dtype, to nearest even. Returns packed words."""
        if self.dtype == "fp32":
            return [numbers.bits(values[i]) for i in range(self.count)]
        pair = {"bf16": ptx.pack_bf16x2, "fp16": ptx.pack_f16x2}[self.dtype]
        return [pair(values[i], values[i + 1]) for i in range(0, self.count, 2)]

    def load(self, row: Int64, lane: Int32) -> list[Float32]:
        """Loads the lane's numbers of the row at address ``row``, as fp32."""
        return self.unpack(self.piece.load(row, lane))
