"""CuTe layout algebra: shape:stride, swizzles, composition, complement, divide, product, inverses.

The algebra is that of the library `tensor-layouts` (pure Python; agrees with CuTe DSL in every test). Only this module
imports that library. It adds what proofs and transforms need: the offsets of all coordinates, an exact equality test,
and reading and writing CuTe's notation. `layouts.dsl` converts from and to live CuTe DSL objects.
"""

from __future__ import annotations

import re
from typing import Any, TypeAlias

import numpy as np
from tensor_layouts import (
    ComposedLayout,
    Layout,
    Swizzle,
    blocked_product,
    coalesce,
    complement,
    compose,
    cosize,
    flatten,
    left_inverse,
    logical_divide,
    logical_product,
    raked_product,
    right_inverse,
    size,
    tiled_divide,
    zipped_divide,
)

__all__ = [
    "ComposedLayout",
    "Layout",
    "Swizzle",
    "as_modes",
    "blocked_product",
    "coalesce",
    "complement",
    "compose",
    "cosize",
    "equal",
    "flatten",
    "from_modes",
    "is_permutation",
    "left_inverse",
    "logical_divide",
    "logical_product",
    "notation",
    "offsets",
    "parse",
    "raked_product",
    "right_inverse",
    "size",
    "swizzled",
    "tiled_divide",
    "zipped_divide",
]


GeneralLayout: TypeAlias = Layout | ComposedLayout
"""A layout, or a layout followed by a swizzle."""


def swizzled(bits: int, base: int, shift: int, layout: Layout) -> Any:
    """Returns ``layout`` followed by ``Swizzle<bits, base, shift>``: bit base + shift + i of the offset is XORed into
    bit base + i, for i from 0 to ``bits`` - 1.
    """
    return compose(Swizzle(bits, base, shift), layout)


def as_modes(layout: Layout) -> tuple[tuple[int, int], ...]:
    """Returns (extent, stride) of each mode of the flattened and coalesced layout, fastest first; ``()`` for a layout
    of size 1.

    This form is canonical: two layouts agree as functions of the flat coordinate exactly when size and modes agree.
    """
    flat: Any = coalesce(flatten(layout))
    shape = flat.shape if isinstance(flat.shape, tuple) else (flat.shape,)
    stride = flat.stride if isinstance(flat.stride, tuple) else (flat.stride,)
    return tuple((s, d) for s, d in zip(shape, stride, strict=True) if s != 1)


def from_modes(modes: tuple[tuple[int, int], ...]) -> Layout:
    """Returns the flat layout of (extent, stride) pairs, fastest first."""
    if not modes:
        return Layout(1, 0)
    return Layout(tuple(s for s, _ in modes), tuple(d for _, d in modes))


def offsets(layout: GeneralLayout) -> np.ndarray:
    """Returns the offsets of all flat coordinates, int64 [size(layout)]. The layout may be affine or swizzled."""
    if isinstance(layout, ComposedLayout):
        if not isinstance(layout.outer, Swizzle):
            raise TypeError(f"layout is {layout}; want an affine layout or a swizzle after one")
        return apply_swizzle(layout.outer, offsets(layout.inner) + layout.offset)
    found = np.zeros(1, dtype=np.int64)
    for extent, stride in as_modes(layout):
        found = (np.arange(extent, dtype=np.int64)[:, None] * stride + found).reshape(-1)
    return found


def apply_swizzle(swizzle: Swizzle, values: np.ndarray) -> np.ndarray:
    """Returns the swizzled values of an array of offsets."""
    mask = ((1 << swizzle.bits) - 1) << (swizzle.base + max(0, swizzle.shift))
    moved = (values & mask) >> swizzle.shift if swizzle.shift >= 0 else (values & mask) << -swizzle.shift
    return values ^ moved


def equal(a: GeneralLayout, b: GeneralLayout) -> bool:
    """Returns whether two layouts are the same function of the flat coordinate.

    Affine layouts are compared by canonical form, without enumerating. Swizzled layouts are compared by all their
    offsets.
    """
    if size(a) != size(b):
        return False
    if isinstance(a, Layout) and isinstance(b, Layout):
        return as_modes(a) == as_modes(b)
    return bool(np.array_equal(offsets(a), offsets(b)))


def is_permutation(layout: Layout) -> bool:
    """Returns whether the layout maps the numbers from 0 to size - 1 onto themselves. This is decided from the modes
    without enumerating.
    """
    cursor = 1
    for extent, stride in sorted(as_modes(layout), key=lambda mode: mode[1]):
        if stride != cursor:
            return False
        cursor *= extent
    return cursor == size(layout)


def notation(layout: GeneralLayout | Swizzle) -> str:
    """Writes a layout in CuTe's own notation: ``(4,8):(8,1)``, ``S<3,4,3> o 0 o (8,64):(64,1)``."""
    if isinstance(layout, ComposedLayout):
        return f"{notation(layout.outer)} o {layout.offset} o {notation(layout.inner)}"
    if isinstance(layout, Swizzle):
        return f"S<{layout.bits},{layout.base},{layout.shift}>"
    return f"{_tuple_text(layout.shape)}:{_tuple_text(layout.stride)}"


def _tuple_text(value: object) -> str:
    return f"({','.join(_tuple_text(item) for item in value)})" if isinstance(value, tuple) else str(value)


_SWIZZLED = re.compile(r"S<(\d+),(\d+),(-?\d+)>\s*o\s*(\d+)\s*o\s*(.+)")


def parse(text: str) -> Any:
    """Reads the layout that `notation` writes.

    Raises:
        ValueError: the text is not CuTe notation with static integers.
    """
    match = _SWIZZLED.fullmatch(text.strip())
    if match:
        bits, base, shift, preoffset = (int(group) for group in match.groups()[:4])
        return ComposedLayout(Swizzle(bits, base, shift), parse(match.group(5)), offset=preoffset)
    parts = text.split(":")
    if len(parts) != 2:
        raise ValueError(f"layout is {text!r}; want CuTe notation such as (4,8):(8,1)")
    shape, stride = (_parse_tuple(part.strip(), text) for part in parts)
    return Layout(shape, stride)


def _parse_tuple(text: str, whole: str) -> Any:
    if not re.fullmatch(r"[\d,()\s]+", text):
        raise ValueError(f"layout is {whole!r}; want CuTe notation with static integers such as (4,8):(8,1)")
    spaced = text.replace("(", "( ").replace(")", " ) ").replace(",", " ").split()
    stack: list[list[Any]] = [[]]
    for token in spaced:
        if token == "(":
            stack.append([])
        elif token == ")":
            if len(stack) < 2:
                raise ValueError(f"layout is {whole!r}: unbalanced parentheses")
            group = tuple(stack.pop())
            stack[-1].append(group)
        else:
            stack[-1].append(int(token))
    if len(stack) != 1 or len(stack[0]) != 1:
        raise ValueError(f"layout is {whole!r}: unbalanced parentheses or more than one tuple")
    return stack[0][0]
