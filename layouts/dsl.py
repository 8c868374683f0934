"""Exact conversion between this package's layouts and live CuTe DSL objects.

Import this module explicitly. It is the only module of this package that needs `cutlass`. Its functions may be called
only while a `cute.jit` function is being traced.
"""

from __future__ import annotations

from typing import Any

from layouts.algebra import ComposedLayout, Layout, Swizzle, parse


def from_dsl(layout: object) -> Layout | ComposedLayout:
    """Returns a static CuTe DSL layout or composed layout as a `Layout` or `ComposedLayout`.

    Raises:
        ValueError: the layout has dynamic extents or strides.
    """
    text = str(layout)
    if "?" in text:
        raise ValueError(f"layout is {text}; want static shapes and strides")
    return parse(text)


def to_dsl(layout: object) -> Any:
    """Returns the CuTe DSL object of a `Layout`, `Swizzle` or swizzled `ComposedLayout`; call it inside a `cute.jit`
    function."""
    from cutlass import cute

    if isinstance(layout, Swizzle):
        return cute.make_swizzle(layout.bits, layout.base, layout.shift)
    if isinstance(layout, ComposedLayout):
        return cute.make_composed_layout(to_dsl(layout.outer), layout.offset, to_dsl(layout.inner))
    if isinstance(layout, Layout):
        return cute.make_layout(layout.shape, stride=layout.stride)
    raise TypeError(f"layout is {type(layout).__name__}; want Layout, Swizzle or ComposedLayout")
