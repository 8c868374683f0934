"""Offline transforms as values: a reordering of packed elements, with a constant that is XORed into each element.

A `Transform` says which source element goes to which destination, and how elements are stored. It is described by a
bijective CuTe layout, so composition, inverse and equality are exact and cheap. It applies itself to NumPy arrays and
torch tensors at memory speed (`layouts.wordshuffle`). The constant is called the flip. It changes signed elements to
biased elements: adding 8 to a 4-bit or 128 to an 8-bit two's complement number inverts its top bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

import numpy as np
import torch

from layouts import wordshuffle
from layouts.algebra import Layout, as_modes, compose, from_modes, is_permutation, notation, offsets, right_inverse
from layouts.bitlinear import BitMap
from layouts.proofs import Proof, prove

Array = TypeVar("Array", np.ndarray, torch.Tensor)
Modes = tuple[tuple[int, int], ...]
ELEMENT_BITS = (4, 8)


@dataclass(frozen=True)
class Transform:
    """A bijection of packed arrays: ``out[i] = in[source(i)] ^ flip`` over element indices i.

    Arrays hold elements of ``bits`` bits in row-major order. Two 4-bit elements share a byte, the even one in the low
    nibble, so the last extent of their packed array is half that of its shape. Leading dimensions, such as experts, are
    batch dimensions.

    Two transforms are equal if modes, bits, flip and shapes are equal. Their names may differ.

    Args:
        name: a name for readers.
        bits: element width, 4 or 8.
        in_shape: the extents of one source array, in elements.
        out_shape: the extents of one destination array, in elements.
        modes: (extent, stride) of the layout from destination to source index, fastest first, canonical.
        flip: constant that is XORed into every element.
    """

    name: str = field(compare=False)
    bits: int
    in_shape: tuple[int, ...]
    out_shape: tuple[int, ...]
    modes: Modes
    flip: int = 0

    def __post_init__(self) -> None:
        if self.bits not in ELEMENT_BITS:
            raise ValueError(f"bits is {self.bits}; want one of {ELEMENT_BITS}")
        if not 0 <= self.flip < 1 << self.bits:
            raise ValueError(f"flip is {self.flip}; want {self.bits} bits")
        count = math.prod(self.in_shape)
        if math.prod(self.out_shape) != count:
            raise ValueError(f"out_shape {self.out_shape} and in_shape {self.in_shape} have different sizes")
        layout = from_modes(self.modes)
        if as_modes(layout) != self.modes or math.prod(e for e, _ in self.modes) != count or not is_permutation(layout):
            raise ValueError(f"modes {self.modes} are no canonical bijection of {count} elements")
        for shape, label in ((self.in_shape, "in_shape"), (self.out_shape, "out_shape")):
            if self.bits == 4 and shape[-1] % 2:
                raise ValueError(f"{label} is {shape}; want an even last extent, as two 4-bit elements share a byte")

    @staticmethod
    def from_layout(
        name: str,
        source: Layout,
        bits: int,
        in_shape: tuple[int, ...],
        out_shape: tuple[int, ...] | None = None,
        flip: int = 0,
    ) -> Transform:
        """Returns the transform with ``out[i] = in[source(i)] ^ flip``.

        Raises:
            ValueError: the layout is not a bijection of the elements.
        """
        return Transform(name, bits, in_shape, out_shape or in_shape, as_modes(source), flip)

    @staticmethod
    def identity(bits: int, shape: tuple[int, ...]) -> Transform:
        """Returns the transform that changes nothing."""
        return Transform.from_layout("identity", Layout(math.prod(shape), 1), bits, shape)

    @property
    def size(self) -> int:
        """Elements per array."""
        return math.prod(self.in_shape)

    @property
    def source(self) -> Layout:
        """Layout from destination to source index."""
        return from_modes(self.modes)

    @cached_property
    def _plan(self) -> wordshuffle.ShufflePlan:
        return wordshuffle.make_plan(self.modes, self.bits)

    def storage_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the extents, in bytes, of a packed array of ``shape`` elements."""
        return (*shape[:-1], shape[-1] * self.bits // 8)

    def __call__(self, x: Array) -> Array:
        """Applies the transform to a packed array [..., *storage_shape(in_shape)] of int8 or uint8, NumPy or torch, CPU
        or GPU.

        Returns:
            A new array [..., *storage_shape(out_shape)] of the same kind and dtype.

        Raises:
            TypeError: x is not an int8 or uint8 array.
            ValueError: the trailing extents of x are not ``storage_shape(in_shape)``.
        """
        if isinstance(x, np.ndarray):
            return self(torch.from_numpy(np.require(x, requirements=("C", "W")))).numpy()
        self._check(x)
        batch = x.shape[: x.ndim - len(self.in_shape)]
        data = x.contiguous().reshape(-1).view(torch.uint8)
        if data.storage_offset() % 4:  # words are read through a wider view
            data = data.clone()
        out = wordshuffle.execute(self._plan, data, self.size, self.flip) if data.numel() else data
        return out.view(x.dtype).view(*batch, *self.storage_shape(self.out_shape))

    def _check(self, x: object) -> None:
        wanted = f"int8 or uint8 [..., {', '.join(map(str, self.storage_shape(self.in_shape)))}]"
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{self.name} got {type(x).__name__}; want a NumPy array or torch tensor {wanted}")
        if x.dtype not in (torch.int8, torch.uint8):
            raise TypeError(f"{self.name} got dtype {x.dtype}; want {wanted}")
        if tuple(x.shape[-len(self.in_shape) :]) != self.storage_shape(self.in_shape):
            packed = " (two 4-bit elements per byte)" if self.bits == 4 else ""
            raise ValueError(f"{self.name} got shape {tuple(x.shape)}; want {wanted}{packed}")

    def inverse(self) -> Transform:
        """Returns the transform that undoes this one."""
        source = right_inverse(self.source)
        return Transform.from_layout(f"{self.name}^-1", source, self.bits, self.out_shape, self.in_shape, self.flip)

    def then(self, after: Transform) -> Transform:
        """Returns this transform followed by ``after``.

        Raises:
            ValueError: ``after`` needs a different shape or element width.
        """
        if after.bits != self.bits or after.in_shape != self.out_shape:
            wanted, got = f"{after.bits}-bit {after.in_shape}", f"{self.bits}-bit {self.out_shape}"
            raise ValueError(f"{after.name} takes {wanted}; {self.name} gives {got}")
        source = compose(self.source, after.source)
        name = f"{self.name} > {after.name}"
        return Transform.from_layout(name, source, self.bits, self.in_shape, after.out_shape, self.flip ^ after.flip)

    def reshaped(self, in_shape: tuple[int, ...] | None = None, out_shape: tuple[int, ...] | None = None) -> Transform:
        """Returns the same reordering of elements, between arrays with other extents."""
        return Transform(
            self.name, self.bits, in_shape or self.in_shape, out_shape or self.out_shape, self.modes, self.flip
        )

    def renamed(self, name: str) -> Transform:
        """Returns the same transform under another name."""
        return Transform(name, self.bits, self.in_shape, self.out_shape, self.modes, self.flip)

    def bit_map(self) -> BitMap:
        """Returns the map from destination to source index as a matrix over F2.

        Raises:
            ValueError: the size is not a power of two.
        """
        return BitMap.from_layout(self.source)

    def describe(self) -> str:
        """Describes the transform as text: name, shapes, layout in CuTe notation and the flip."""
        flip = f", every element ^ {self.flip:#x}" if self.flip else ""
        return (
            f"{self.name}: {self.bits}-bit {list(self.in_shape)} -> {list(self.out_shape)}\n"
            f"  destination index -> source index: {notation(self.source)}{flip}"
        )

    def verify(self) -> tuple[Proof, ...]:
        """Proves that the transform reorders elements according to its layout; raises `ProofError` if it does not.

        All elements are compared with elements that are read at the layout's offsets, so use a small shape.
        """
        identity = Transform.identity(self.bits, self.in_shape)
        proofs = [
            prove(
                self.then(self.inverse()) == identity, "inverse after transform is the identity", "symbolic", self.size
            ),
            prove(
                self.inverse().then(self) == Transform.identity(self.bits, self.out_shape),
                "transform after inverse is the identity",
                "symbolic",
                self.size,
            ),
        ]
        if self.size & (self.size - 1) == 0:
            bit_map = self.bit_map()
            holds = bit_map.is_bijective and self.inverse().bit_map() == bit_map.inverse()
            proofs.append(prove(holds, "the inverse's F2 matrix is the matrix inverse", "matrix", self.size))
        return (*proofs, self._verify_bytes())

    def _verify_bytes(self) -> Proof:
        generator = torch.Generator().manual_seed(7)
        shape = (2, *self.storage_shape(self.in_shape))
        x = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        index = torch.from_numpy(offsets(self.source))
        wanted = unpack(x.view(2, -1), self.bits)[:, index] ^ self.flip
        got = self(x)
        same = torch.equal(unpack(got.view(2, -1), self.bits), wanted) and torch.equal(self.inverse()(got), x)
        return prove(same, "moved bytes equal an element-by-element gather, and come back", "exhaustive", 2 * self.size)


def unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Returns uint8 elements, one per byte, of a packed uint8 or int8 tensor [..., bytes]."""
    data = packed.view(torch.uint8)
    if bits == 8:
        return data.clone()
    return torch.stack((data & 0xF, data >> 4), dim=-1).flatten(-2)


def pack(elements: torch.Tensor, bits: int) -> torch.Tensor:
    """Packs elements [..., n], one per byte, into uint8 [..., n * bits / 8]. A 4-bit element is the low nibble of its
    byte."""
    data = elements.contiguous().view(torch.uint8)
    if bits == 8:
        return data.clone()
    pairs = data.unflatten(-1, (-1, 2))
    return (pairs[..., 0] & 0xF) | (pairs[..., 1] << 4)
