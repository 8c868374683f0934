"""What kernels are launched with, by name: declarations against the kernels themselves, and numbers put in order."""

from __future__ import annotations

from typing import Any

import pytest

from cute_kernels.linear import arguments
from cute_kernels.linear.arguments import Arguments
from cute_kernels.moe import arguments as grouped

SOME = Arguments(("codes", "out"), ("n", "k_blocks", "splits", "activation"))


class Int32: ...


class Int64: ...


class Kernel:
    def __call__(self, x: Any, codes: Int64, out: Int64, n: Int32, k_blocks: Int32, splits: Int32, activation: Int32, stream): ...  # fmt: skip  # noqa: E501


class Swapped:
    def __call__(self, x: Any, codes: Int64, out: Int64, n: Int32, splits: Int32, k_blocks: Int32, activation: Int32, stream): ...  # fmt: skip  # noqa: E501


class OfOtherTypes:
    def __call__(self, x: Any, codes: Int64, out: Int32, n: Int32, k_blocks: Int32, splits: Int32, activation: Int32, stream): ...  # fmt: skip  # noqa: E501


class WithOneMore:
    def __call__(self, x: Any, codes: Int64, out: Int64, n: Int32, k_blocks: Int32, splits: Int32, activation: Int32, more: Int32, stream): ...  # fmt: skip  # noqa: E501


def test_numbers_are_put_in_order_by_their_names():
    assert SOME.between("n", "activation", splits=3, k_blocks=7) == (7, 3)
    with pytest.raises(TypeError, match="^splits: got no such number, want k_blocks, splits"):
        SOME.between("n", "activation", k_blocks=7)
    with pytest.raises(TypeError, match="^n: got a number of that name, want k_blocks, splits"):
        SOME.between("n", "activation", n=1, k_blocks=7, splits=3)


def test_a_kernel_with_other_arguments_is_refused():
    SOME.check(Kernel)
    for kind in (Swapped, OfOtherTypes, WithOneMore):
        with pytest.raises(TypeError, match=rf"^{kind.__name__}.__call__: got"):
            SOME.check(kind)


def test_every_kernel_has_the_arguments_that_are_declared():
    pytest.importorskip("cutlass")
    from cute_kernels.linear.inputs import compile as inputs
    from cute_kernels.linear.inputs.kernel import InputRowsKernel
    from cute_kernels.linear.kernel import LinearKernel
    from cute_kernels.linear.portable.kernel import PortableKernel
    from cute_kernels.linear.wgmma.kernel import WgmmaKernel
    from cute_kernels.linear.wgmma.limb_blocks import LimbBlocksKernel
    from cute_kernels.linear.wgmma.limb_kernel import LimbWgmmaKernel
    from cute_kernels.linear.wgmma.limb_rows import LimbRowsKernel
    from cute_kernels.linear.wgmma.resident_kernel import FactoredResidentKernel, ResidentKernel
    from cute_kernels.moe.combine import CombineKernel
    from cute_kernels.moe.gather import GatherKernel
    from cute_kernels.moe.kernel import GroupedKernel
    from cute_kernels.moe.ranges.assigned import AssignedRangeKernel
    from cute_kernels.moe.ranges.kernel import RangeKernel
    from cute_kernels.moe.routing import RoutingKernel
    from cute_kernels.moe.wgmma.kernel import GroupedLimbKernel, GroupedWgmmaKernel

    declared = {
        InputRowsKernel: inputs.ARGUMENTS,
        LinearKernel: arguments.STREAM,
        WgmmaKernel: arguments.TILES,
        ResidentKernel: arguments.TILES,
        FactoredResidentKernel: arguments.FACTORED_TILES,
        PortableKernel: arguments.TILES,
        LimbWgmmaKernel: arguments.LIMB_TILES,
        LimbRowsKernel: arguments.LIMB_ROWS,
        LimbBlocksKernel: arguments.LIMB_BLOCKS,
        GroupedKernel: grouped.GROUPED,
        RangeKernel: grouped.RANGES,
        AssignedRangeKernel: grouped.ASSIGNED,
        GroupedWgmmaKernel: grouped.TILES,
        GroupedLimbKernel: grouped.LIMB_TILES,
        RoutingKernel: grouped.ROUTING,
        CombineKernel: grouped.COMBINE,
        GatherKernel: grouped.GATHER,
    }
    for kind, wanted in declared.items():
        wanted.check(kind)
