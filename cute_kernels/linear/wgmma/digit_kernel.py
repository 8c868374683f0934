"""Weight-only GEMM for few rows of x that come in digits: :mod:`.kernel`, behind the launch that makes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from cute_kernels.device import ptx
from cute_kernels.device.ring import advance
from cute_kernels.linear.wgmma.config import ROW_SCALE_BYTES
from cute_kernels.linear.wgmma.copies import product
from cute_kernels.linear.wgmma.digit_rows import GROUP_BYTES
from cute_kernels.linear.wgmma.few_rows import FewRowsKernel, FewRowsShape
from cute_kernels.linear.work import Operands


@dataclass(frozen=True)
class DigitBlocksShape(FewRowsShape):
    """Sizes of a launch whose x comes in digits, and where they are."""

    digits: Any  # address of blocks of `.digit_blocks`,
    block_rows: Any  # of so many rows


class DigitWgmmaKernel(FewRowsKernel):
    """One compiled variant; its configuration says ``digits``."""

    use_pdl = True

    @cute.jit
    def __call__(  # type: ignore[override]
        self,
        x: cute.Tensor,
        codes: Int64,
        scales: Int64,
        digits: Int64,
        bias: Int64,
        residual: Int64,
        out: Int64,
        workspace: Int64,
        n: Int32,
        num_tiles: Int32,
        units: Int32,
        whole: Int32,
        splits: Int32,
        num_ctas: Int32,
        activation: Int32,
        out_kind: Int32,
        block_rows: Int32,
        stream,
    ):
        """As :class:`WgmmaKernel`, but of x only the sizes count, and its digits are read: blocks of ``block_rows``
        rows, as many as are multiplied (`digit_launch.block_rows`), that `DigitBlocksKernel` makes. It may begin before
        the launch before it, which makes digits, has ended.
        """
        sizes = self.sizes(x, n, num_tiles, units, whole, splits, activation, out_kind)
        shape = DigitBlocksShape(*sizes, digits=digits, block_rows=block_rows)
        operands = Operands(Int64(0), codes, scales, Int64(0), bias, residual, out, workspace)
        self.kernel(operands, shape, None, None).launch(**self.launch_options(num_ctas, stream))

    @cute.jit
    def copy_activations(self, shape, memory, items, copy_x, x_view):
        """Brings the digits of every unit, and their scales; one warp."""
        config = self.config
        digit_bytes, scale_bytes = shape.block_rows * GROUP_BYTES, shape.block_rows * ROW_SCALE_BYTES
        scales = shape.digits + product(shape.units, digit_bytes)  # behind all blocks
        # The launch before made them. All else it had waited for itself, before it let this one begin.
        cute.arch.griddepcontrol_wait()
        stage, phase = Int32(0), Int32(1)
        for index in cutlass.range(items.first, items.count, items.stride, unroll=1):
            item = items.item(index)
            for unit in cutlass.range(item.begin, item.end, 1, unroll=1):
                cute.arch.mbarrier_wait(memory.empty + stage, phase)
                with cute.arch.elect_one():
                    barrier = memory.full + stage
                    cute.arch.mbarrier_arrive_and_expect_tx(barrier, digit_bytes + scale_bytes)
                    address = Int32(barrier.toint())
                    x = memory.x_address + stage * config.x_stage_bytes
                    x_scales = memory.x_scales + stage * config.x_scale_stage_bytes
                    ptx.bulk_copy_to_shared(x, shape.digits + product(unit, digit_bytes), digit_bytes, address)
                    ptx.bulk_copy_to_shared(x_scales, scales + product(unit, scale_bytes), scale_bytes, address)
                stage, phase = advance(stage, phase, config.num_stages)
