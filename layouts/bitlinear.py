"""Bit-linear maps: index maps of power-of-two tiles as matrices over F2.

An index of an n-bit domain is a column vector of bits; a map that XORs and moves bits is a matrix over F2. Every
swizzle is such a map. So is every CuTe layout with power-of-two extents whose strides do not carry into each other. So
are their compositions and inverses. Two maps with equal matrices agree on *all* indices: comparing matrices proves that
two layouts are equal. (Triton's linear layouts use the same idea.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import xor

import numpy as np

from layouts.algebra import ComposedLayout, GeneralLayout, Layout, Swizzle, as_modes, size


@dataclass(frozen=True)
class BitMap:
    """A linear map from ``in_bits``-bit indices to ``out_bits``-bit indices.

    Args:
        columns: image of each input bit, lowest first: index ``1 << i`` maps to ``columns[i]``.
        out_bits: width of the output; every column is below ``1 << out_bits``.
    """

    columns: tuple[int, ...]
    out_bits: int

    def __post_init__(self) -> None:
        if self.out_bits < 0:
            raise ValueError(f"out_bits is {self.out_bits}; want 0 or more")
        for i, column in enumerate(self.columns):
            if not 0 <= column < 1 << self.out_bits:
                raise ValueError(f"column {i} is {column}; want {self.out_bits} bits (below {1 << self.out_bits})")

    @property
    def in_bits(self) -> int:
        """Width of the input."""
        return len(self.columns)

    @staticmethod
    def identity(bits: int) -> BitMap:
        """Returns the map that changes nothing."""
        return BitMap(tuple(1 << i for i in range(bits)), bits)

    @staticmethod
    def permutation(source: Sequence[int]) -> BitMap:
        """Returns the map that copies input bit ``source[i]`` to output bit i."""
        if sorted(source) != list(range(len(source))):
            raise ValueError(f"source is {list(source)}; want a permutation of 0..{len(source) - 1}")
        return BitMap(tuple(1 << bit for bit in source), len(source))

    @staticmethod
    def from_swizzle(swizzle: Swizzle, bits: int) -> BitMap:
        """Returns the map of a swizzle on ``bits``-bit offsets.

        Raises:
            ValueError: the swizzle reads or changes bits at or above ``bits``.
        """
        reach = swizzle.base + abs(swizzle.shift) + swizzle.bits
        if swizzle.bits and reach > bits:
            raise ValueError(
                f"Swizzle({swizzle.bits}, {swizzle.base}, {swizzle.shift}) touches bit {reach - 1} of {bits}"
            )
        return BitMap(tuple(swizzle(1 << i) for i in range(bits)), bits)

    @staticmethod
    def from_layout(layout: GeneralLayout, out_bits: int | None = None) -> BitMap:
        """Returns the map of a CuTe layout, swizzled or not, from flat coordinates to offsets.

        Raises:
            ValueError: the layout is not linear over F2: an extent is not a power of two, two strides share or carry
                into a bit, or the offset of a swizzled layout is not zero.
        """
        if isinstance(layout, ComposedLayout):
            if layout.offset or not isinstance(layout.outer, Swizzle):
                raise ValueError(f"layout is {layout}; want a swizzle after a layout, with offset 0")
            inner = BitMap.from_layout(layout.inner)
            swizzle = layout.outer
            reach = swizzle.base + abs(swizzle.shift) + swizzle.bits if swizzle.bits else 0
            width = max(inner.out_bits, reach, out_bits or 0)
            return BitMap.from_swizzle(swizzle, width) @ inner.widened(width)
        columns: list[int] = []
        used = 0
        for extent, stride in as_modes(layout):
            if extent & (extent - 1):
                raise ValueError(f"layout {layout} has extent {extent}; want powers of two")
            for i in range(extent.bit_length() - 1):
                if used & stride << i:
                    raise ValueError(f"layout {layout} is not linear over F2: offsets of two bits carry")
                used |= stride << i
                columns.append(stride << i)
        width = used.bit_length() if out_bits is None else out_bits
        return BitMap(tuple(columns), width)

    @staticmethod
    def from_function(function: Callable[[int], int], in_bits: int, out_bits: int) -> BitMap:
        """Returns the map that equals a function, checked on every one of its ``2**in_bits`` inputs.

        Raises:
            ValueError: the function is not linear over F2.
        """
        found = BitMap(tuple(function(1 << i) for i in range(in_bits)), out_bits)
        for index, image in enumerate(found.table().tolist()):
            if function(index) != image:
                raise ValueError(f"not linear over F2: {index} maps to {function(index)}, its bits to {image}")
        return found

    def widened(self, out_bits: int) -> BitMap:
        """Returns the same map with ``out_bits`` output bits. The added high bits are 0."""
        return BitMap(self.columns, out_bits)

    def __call__(self, index: int) -> int:
        """Returns the image of one index."""
        if not 0 <= index < 1 << self.in_bits:
            raise ValueError(f"index is {index}; want 0 <= index < {1 << self.in_bits}")
        return reduce(xor, (column for i, column in enumerate(self.columns) if index >> i & 1), 0)

    def apply(self, indices: np.ndarray) -> np.ndarray:
        """Returns the images of an array of indices, int64."""
        values = np.asarray(indices, dtype=np.int64)
        if values.size and (values.min() < 0 or values.max() >> self.in_bits):
            raise ValueError(f"indices span [{values.min()}, {values.max()}]; want [0, {1 << self.in_bits})")
        found = np.zeros_like(values)
        for i, column in enumerate(self.columns):
            found ^= (values >> i & 1) * column
        return found

    def table(self) -> np.ndarray:
        """Returns the images of all indices in order, int64 [2**in_bits]."""
        found = np.zeros(1, dtype=np.int64)
        for column in self.columns:
            found = np.concatenate((found, found ^ column))
        return found

    def matrix(self) -> np.ndarray:
        """Returns the 0/1 matrix, uint8 [out_bits, in_bits]; row 0 and column 0 are the lowest bits."""
        rows = np.arange(self.out_bits)[:, None]
        return (np.array(self.columns, dtype=np.int64)[None, :] >> rows & 1).astype(np.uint8)

    def __matmul__(self, inner: BitMap) -> BitMap:
        """Returns the composition of two maps: first ``inner``, then this one."""
        if inner.out_bits != self.in_bits:
            raise ValueError(f"inner map has {inner.out_bits} output bits; want {self.in_bits}")
        return BitMap(tuple(self(column) for column in inner.columns), self.out_bits)

    def stacked(self, high: BitMap) -> BitMap:
        """Returns the block diagonal map: this map on the low bits, ``high`` on the bits above them."""
        shifted = tuple(column << self.out_bits for column in high.columns)
        return BitMap(self.columns + shifted, self.out_bits + high.out_bits)

    @property
    def rank(self) -> int:
        """Number of linearly independent columns."""
        return len(_echelon(self.columns))

    @property
    def is_bijective(self) -> bool:
        """Whether the map is invertible."""
        return self.in_bits == self.out_bits == self.rank

    @property
    def is_injective(self) -> bool:
        """Whether no two indices share an image."""
        return self.rank == self.in_bits

    @property
    def is_bit_permutation(self) -> bool:
        """Whether the map only moves bits (no XOR)."""
        return self.is_bijective and all(column.bit_count() == 1 for column in self.columns)

    def inverse(self) -> BitMap:
        """Returns the inverse map.

        Raises:
            ValueError: the map is not bijective.
        """
        if not self.is_bijective:
            raise ValueError(f"map of {self.in_bits} to {self.out_bits} bits has rank {self.rank}; it has no inverse")
        # Gauss-Jordan on columns: combine input bits until each output bit stands alone.
        images = list(self.columns)
        combos = [1 << i for i in range(self.in_bits)]
        for bit in range(self.out_bits):
            pivot = next(i for i in range(bit, len(images)) if images[i] >> bit & 1)
            images[bit], images[pivot] = images[pivot], images[bit]
            combos[bit], combos[pivot] = combos[pivot], combos[bit]
            for i in range(len(images)):
                if i != bit and images[i] >> bit & 1:
                    images[i] ^= images[bit]
                    combos[i] ^= combos[bit]
        return BitMap(tuple(combos), self.in_bits)

    def kernel(self) -> tuple[int, ...]:
        """Returns a basis of the indices that map to 0. XOR with these indices does not change an index's image."""
        found, basis = [], {}
        for i, column in enumerate(self.columns):
            combo = 1 << i
            while column:
                top = column.bit_length()
                if top not in basis:
                    basis[top] = (column, combo)
                    break
                column ^= basis[top][0]
                combo ^= basis[top][1]
            else:
                found.append(combo)
        return tuple(found)

    def to_layout(self) -> Layout:
        """Returns the CuTe layout of a map without XOR (each column has at most one bit set).

        Raises:
            ValueError: the map XORs bits, so no affine layout equals it.
        """
        if any(column.bit_count() > 1 for column in self.columns):
            raise ValueError("the map XORs bits; no shape:stride layout equals it")
        if not self.columns:
            return Layout(1, 0)
        return Layout((2,) * self.in_bits, self.columns)

    def describe(self) -> str:
        """Describes the map as text: for each output bit a line with the input bits whose XOR it is."""
        lines = [f"{self.in_bits} -> {self.out_bits} bits, rank {self.rank}"]
        for bit in range(self.out_bits):
            terms = [f"i{i}" for i, column in enumerate(self.columns) if column >> bit & 1]
            lines.append(f"  o{bit} = {' ^ '.join(terms) or '0'}")
        return "\n".join(lines)


def _echelon(columns: Sequence[int]) -> list[int]:
    basis: list[int] = []
    for column in columns:
        for vector in basis:
            column = min(column, column ^ vector)
        if column:
            basis.append(column)
    return basis


def bits_of(extent: int) -> int:
    """Returns log2 of a power of two.

    Raises:
        ValueError: extent is not a power of two.
    """
    if extent < 1 or extent & (extent - 1):
        raise ValueError(f"extent is {extent}; want a power of two")
    return extent.bit_length() - 1


def domain_bits(layout: GeneralLayout) -> int:
    """Returns log2 of a layout's size, which must be a power of two."""
    return bits_of(size(layout))
