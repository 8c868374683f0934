"""The thread that holds each element of a fragment: operands and accumulators of tensor-core instructions, ldmatrix,
stmatrix.

A `Fragment` is a thread-value layout in CuTe's convention: it maps (thread, value) to an index into the operand tile,
in which the first extent of ``tile`` is the fastest. For A the tile is (M, K), for B (N, K), for C (M, N); for ldmatrix
it is (column, row), since rows of 16 bytes follow each other in memory. Value i of a thread is the i-th element of its
registers, lowest bits first.

The layouts are those of the PTX ISA's figures; tests compare them with CuTe DSL and with the PTX formulas.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from layouts.algebra import Layout, notation, offsets, size
from layouts.bitlinear import BitMap
from layouts.proofs import Proof, prove

WGMMA_N = tuple(range(8, 257, 8))


@dataclass(frozen=True)
class Fragment:
    """One operand of one instruction.

    Args:
        name: unique identifier.
        tile: extents of the operand tile, fastest index first.
        axes: the names of the extents of ``tile``.
        layout: the layout from (thread, value) to the index into the tile.
        element_bits: width of an element.
        note: a remark for readers.
    """

    name: str
    tile: tuple[int, int]
    axes: tuple[str, str]
    layout: Layout
    element_bits: int
    note: str = ""

    @property
    def num_threads(self) -> int:
        """Threads that take part."""
        return size(self.modes()[0])

    @property
    def num_values(self) -> int:
        """Elements per thread."""
        return size(self.modes()[1])

    def modes(self) -> tuple[Layout, Layout]:
        """Returns (thread mode, value mode) of the layout."""
        shape, stride = self.layout.shape, self.layout.stride
        assert isinstance(shape, tuple) and isinstance(stride, tuple)
        return Layout(shape[0], stride[0]), Layout(shape[1], stride[1])

    def coordinates(self) -> np.ndarray:
        """Returns the tile coordinates of all values, int64 [num_threads, num_values, 2], in the order of ``axes``."""
        flat = offsets(self.layout).reshape(self.num_values, self.num_threads).T
        return np.stack((flat % self.tile[0], flat // self.tile[0]), axis=-1)

    def owners(self) -> np.ndarray:
        """Returns (thread, value) of each tile element, int64 [*tile, 2]. The fragment must have each element of its
        tile exactly once.
        """
        found = np.full((*self.tile, 2), -1, dtype=np.int64)
        for thread, row in enumerate(self.coordinates()):
            for value, (i, j) in enumerate(row):
                found[i, j] = thread, value
        return found

    def bit_map(self) -> BitMap:
        """Returns the index map as a matrix over F2, thread bits first.

        Raises:
            ValueError: an extent is not a power of two.
        """
        return BitMap.from_layout(self.layout, (math.prod(self.tile) - 1).bit_length())

    def describe(self) -> str:
        """Describes the fragment as text: name, shape, and layout in CuTe notation."""
        tile = " x ".join(f"{axis}={extent}" for axis, extent in zip(self.axes, self.tile, strict=True))
        return (
            f"{self.name}: {tile}, {self.num_threads} threads x {self.num_values} {self.element_bits}-bit values\n"
            f"  (thread, value) -> index: {notation(self.layout)}  {self.note}".rstrip()
        )

    def verify(self) -> tuple[Proof, ...]:
        """Proves that threads and values hold every element of the tile exactly once; raises `ProofError` otherwise."""
        count = math.prod(self.tile)
        holds = sorted(offsets(self.layout).tolist()) == list(range(count))
        claim = "threads and values cover the tile, each element once"
        proofs = [prove(holds, claim, "exhaustive", count)]
        if count & (count - 1) == 0:
            proofs.append(prove(self.bit_map().is_bijective, f"{claim} (F2 matrix of full rank)", "matrix", count))
        return tuple(proofs)


QUAD_PAIR_LANES = Layout((4, 2), (1, 16))
"""The layout from a thread of a Volta quad pair to its lane, for the first of the four quad pairs of a warp."""


def _mma(
    name: str, shape: str, tile: tuple[int, int], axes: str, layout: Layout, bits: int, note: str = ""
) -> Fragment:
    return Fragment(f"{name}_{shape}", tile, (axes[0], axes[1]), layout, bits, note)


_GROUPS = (4, 8)
_A16 = Layout((_GROUPS, (2, 2, 2)), ((32, 1), (16, 8, 128)))
_B16 = Layout((_GROUPS, (2, 2)), ((16, 1), (8, 64)))
_C = Layout((_GROUPS, (2, 2)), ((32, 1), (16, 8)))

_WARP_FRAGMENTS = [
    _mma("mma_a", "m16n8k16", (16, 16), "mk", _A16, 16),
    _mma("mma_b", "m16n8k16", (8, 16), "nk", _B16, 16),
    _mma("mma_c", "m16n8k16", (16, 8), "mn", _C, 32),
    _mma("mma_a", "m16n8k8", (16, 8), "mk", _C, 16),
    _mma("mma_b", "m16n8k8", (8, 8), "nk", Layout((_GROUPS, 2), ((16, 1), 8)), 16),
    _mma("mma_c", "m16n8k8", (16, 8), "mn", _C, 32),
    _mma("mma_a", "m16n8k32", (16, 32), "mk", Layout((_GROUPS, (4, 2, 2)), ((64, 1), (16, 8, 256))), 8),
    _mma("mma_b", "m16n8k32", (8, 32), "nk", Layout((_GROUPS, (4, 2)), ((32, 1), (8, 128))), 8),
    _mma("mma_c", "m16n8k32", (16, 8), "mn", _C, 32),
]

_VOLTA_NOTE = "8 threads of a quad pair."
_VOLTA_FRAGMENTS = [
    _mma("volta_a_row", "m8n8k4", (8, 4), "mk", Layout((8, 4), (1, 8)), 16, _VOLTA_NOTE),
    _mma("volta_a_col", "m8n8k4", (8, 4), "mk", Layout(((4, 2), 4), ((8, 4), 1)), 16, _VOLTA_NOTE),
    _mma("volta_b_col", "m8n8k4", (8, 4), "nk", Layout((8, 4), (1, 8)), 16, _VOLTA_NOTE),
    _mma("volta_b_row", "m8n8k4", (8, 4), "nk", Layout(((4, 2), 4), ((8, 4), 1)), 16, _VOLTA_NOTE),
    _mma("volta_c_f16", "m8n8k4", (8, 8), "mn", Layout((8, 8), (1, 8)), 16, _VOLTA_NOTE),
    _mma(
        "volta_c_f32",
        "m8n8k4",
        (8, 8),
        "mn",
        Layout(((2, 2, 2), (2, 2, 2)), ((1, 16, 4), (8, 2, 32))),
        32,
        _VOLTA_NOTE,
    ),
]

_WMMA_NOTE = "As found on sm80 and sm90; WMMA itself leaves fragments opaque."
_WMMA_FRAGMENTS = [
    _mma("wmma_a", "m8n32k16", (8, 16), "mk", _B16, 16, _WMMA_NOTE),
    _mma("wmma_c", "m8n32k16", (8, 32), "mn", Layout((_GROUPS, (2, 4)), ((2, 8), (1, 64))), 32, _WMMA_NOTE),
]


def wgmma_a(element_bits: int) -> Fragment:
    """Returns the A operand of wgmma from registers: m64k16 (16-bit elements) or m64k32 (8-bit), 128 threads."""
    if element_bits not in (8, 16):
        raise ValueError(f"element_bits is {element_bits}; want 8 or 16")
    pair, k = 32 // element_bits, 256 // element_bits
    values = ((pair, 2, 2), (64, 8, 64 * 4 * pair))
    layout = Layout(((4, 8, 4), values[0]), ((64 * pair, 1, 16), values[1]))
    return Fragment(f"wgmma_a_m64k{k}", (64, k), ("m", "k"), layout, element_bits, "A from registers.")


def wgmma_accumulator(n: int) -> Fragment:
    """Returns the accumulator of wgmma m64n<n>, 128 threads, fp32 or int32.

    Raises:
        ValueError: n is no multiple of 8 from 8 to 256.
    """
    if n not in WGMMA_N:
        raise ValueError(f"n is {n}; want a multiple of 8 from 8 to 256")
    layout = Layout(((4, 8, 4), (2, 2, n // 8)), ((128, 1, 16), (64, 8, 512)))
    return Fragment(f"wgmma_c_m64n{n}", (64, n), ("m", "n"), layout, 32)


def ldmatrix(num_matrices: int, transpose: bool = False) -> Fragment:
    """Returns the fragment of ldmatrix .x1, .x2 or .x4, with or without .trans: 32 threads, 16-bit elements. stmatrix
    is the inverse.

    Raises:
        ValueError: num_matrices is not 1, 2 or 4.
    """
    if num_matrices not in (1, 2, 4):
        raise ValueError(f"num_matrices is {num_matrices}; want 1, 2 or 4")
    strides = ((16, 1), (8, 64)) if transpose else ((2, 8), (1, 64))
    layout = Layout((_GROUPS, (2, num_matrices)), strides)
    suffix = "_trans" if transpose else ""
    tile = (8, 8 * num_matrices)
    return Fragment(f"ldmatrix_x{num_matrices}{suffix}", tile, ("column", "row"), layout, 16)


FRAGMENTS: dict[str, Fragment] = {
    fragment.name: fragment
    for fragment in [
        *_WARP_FRAGMENTS,
        *_VOLTA_FRAGMENTS,
        *_WMMA_FRAGMENTS,
        wgmma_a(16),
        wgmma_a(8),
        *(wgmma_accumulator(n) for n in (8, 16, 32, 64, 96, 128, 256)),
        *(ldmatrix(count, transpose) for count in (1, 2, 4) for transpose in (False, True)),
    ]
}
"""Named fragments."""
