"""Weight-only GEMM for few rows of x that come in digits: :mod:`.kernel`, behind the launch that makes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync

from cute_kernels.linear.wgmma.few_rows import FewRowsKernel, FewRowsShape
from cute_kernels.linear.work import Operands


@dataclass(frozen=True)
class DigitRowsShape(FewRowsShape):
    """Sizes of a launch whose x comes in digits, and where its scales are: fp32 [units, x_scale_pitch]."""

    x_scales: Any
    x_scale_pitch: Any


class DigitWgmmaKernel(FewRowsKernel):
    """One compiled variant; its configuration says ``digits``."""

    use_pdl = True

    @cute.jit
    def __call__(  # type: ignore[override]
        self,
        x: cute.Tensor,
        codes: Int64,
        scales: Int64,
        x_scales: Int64,
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
        x_scale_pitch: Int32,
        stream,
    ):
        """As :class:`WgmmaKernel`, but for x, [m, padded k] of 16 bits: of each 128 inputs first the high digits, then
        the low ones. x_scales: address, on 16 bytes, of fp32 [units, x_scale_pitch], a multiple of 4 and large enough
        for 68 scales from any row on. It may begin before the launch before it, which makes digits, has ended.
        """
        copy_x, x_view = self.box_copy(x)
        sizes = self.sizes(x, n, num_tiles, units, whole, splits, activation, out_kind)
        shape = DigitRowsShape(*sizes, x_scales=x_scales, x_scale_pitch=x_scale_pitch)
        operands = Operands(Int64(0), codes, scales, Int64(0), bias, residual, out, workspace)
        self.kernel(operands, shape, copy_x, x_view).launch(**self.launch_options(num_ctas, stream))

    @cute.jit
    def copy_activations(self, shape, memory, items, copy_x, x_view):
        if const_expr(not self.config.pushes):
            cpasync.prefetch_descriptor(copy_x)  # before waiting for what it describes
        FewRowsKernel.copy_activations(self, shape, memory, items, copy_x, x_view)
