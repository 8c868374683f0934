"""The norm kernel. A CTA takes one row, which stays in registers from the loads to the store.

Weights do not depend on the previous kernel, so they are loaded before the wait for that kernel's end (programmatic
dependent launch). The next kernel may start, and load its weights, as soon as all CTAs of this kernel have started. The
order in which a row's elements are added does not depend on the number of rows.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from cute_kernels.device import lanes, numbers, ptx
from cute_kernels.device.types import extents
from cute_kernels.norm.config import VECTOR, NormConfig
from cute_kernels.norm.inputs import LayerInputs


@dataclass(frozen=True)
class Rows:
    """The addresses and strides of the tensors whose rows CTAs process, one row each; run-time values."""

    x: Int64
    residual: Int64
    total: Int64
    out: Int64
    n: Int32
    x_stride: Int32  # elements
    residual_stride: Int32


class NormKernel:
    """One compiled variant; :class:`NormConfig` says which."""

    def __init__(self, config: NormConfig):
        self.config = config
        if config.dtype == "bf16":
            self.halves, self.pack = (ptx.bf16x2_low_to_float, ptx.bf16x2_high_to_float), ptx.pack_bf16x2
        else:
            self.halves, self.pack = (ptx.half2_low_to_float, ptx.half2_high_to_float), ptx.pack_f16x2
        sums_bytes = 4 * config.warps
        self.inputs = LayerInputs(config, sums_bytes, self.unpack, self.pack_all) if config.inputs else None
        self.shared_bytes = self.inputs.shared_bytes if self.inputs else sums_bytes

    def launch(self, given, stream):
        """Launches over the rows of ``out``; ``given`` has the arguments of :func:`.arguments.norm_arguments`."""
        num_rows, n = extents(given.out)
        rows = Rows(
            x=given.x,
            residual=given.residual,
            total=given.total,
            out=ptx.address(given.out),
            n=n,
            x_stride=given.x_stride,
            residual_stride=given.residual_stride,
        )
        inputs = (given.order, given.factors) if self.inputs else ()
        weights, numbers = (given.weight, given.bias), (given.inverse_n, given.eps, given.weight_offset)
        self.kernel(rows, *weights, *numbers, inputs).launch(
            grid=(num_rows, 1, 1), block=(self.config.threads, 1, 1), use_pdl=True, stream=stream
        )

    @cute.kernel
    def kernel(
        self, rows, weight: Int64, bias: Int64, inverse_n: Float32, eps: Float32, weight_offset: Float32, inputs
    ):
        config = self.config
        thread = cute.arch.thread_idx()[0]
        row = Int64(cute.arch.block_idx()[0])
        sums = cutlass.utils.SmemAllocator().allocate(self.shared_bytes, byte_alignment=16).toint()
        columns = [(v * config.threads + thread) * VECTOR for v in range(config.vectors)]
        # Threads past the row's end read its last vector, which counts for nothing.
        places = [cutlass.min(column, rows.n - VECTOR) for column in columns]
        scales, shifts = self.load_weights(weight, bias, places) if config.asks_early else ([], [])
        asked = self.ask(inputs, places) if config.asks_early else None
        # The next kernel may begin at once: it waits for this one's end before it reads what is stored here.
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        words = [self.load_row(rows.x, row * rows.x_stride + place) for place in places]
        if const_expr(config.has_residual):
            others = [self.load_row(rows.residual, row * rows.residual_stride + place) for place in places]
            words = [self.add(mine, other) for mine, other in zip(words, others, strict=True)]
            self.store(rows.total, row * rows.n, columns, words, rows.n)
        values = [self.unpack(vector) for vector in words]
        if const_expr(config.kind == "layer"):
            mean = self.row_sum(values, columns, rows.n, sums, thread) * inverse_n
            values = [[value - mean for value in vector] for vector in values]
            cute.arch.barrier()  # the sums' memory is used again
        squares = [[value * value for value in vector] for vector in values]
        variance = self.row_sum(squares, columns, rows.n, sums, thread) * inverse_n
        scale = numbers.reciprocal_root(variance + eps)
        if const_expr(not config.asks_early):
            scales, shifts = self.load_weights(weight, bias, places)
            asked = self.ask(inputs, places)
        results = self.scaled(values, scale, scales, weight_offset, shifts)
        results = self.inputs.make(results, columns, asked, sums) if self.inputs else results
        self.store(rows.out, row * rows.n, columns, results, rows.n)

    def ask(self, inputs, places) -> Any:
        """Starts loading the order and factors of the vectors at ``places``; loads nothing without
        `NormConfig.inputs`."""
        if not self.inputs:
            return None
        order, factors = inputs
        return self.inputs.ask(order, factors, places)

    def scaled(self, vectors, scale, weights, weight_offset, shifts) -> list[list[Any]]:
        """Returns the norm's results as packed words: value * scale * (weight + weight_offset), plus the bias if there
        is one."""
        results = []
        for v, vector in enumerate(vectors):
            normed = [value * scale * (w + weight_offset) for value, w in zip(vector, weights[v], strict=True)]
            if shifts:
                normed = [value + shift for value, shift in zip(normed, shifts[v], strict=True)]
            results.append(self.pack_all(normed))
        return results

    def load_row(self, start, element) -> list[Any]:
        """Loads four words of a row, which the previous kernel may have written."""
        return ptx.load_global_words(start + Int64(element) * 2, 0, 4, constant=False)

    def load_weights(self, weight, bias, places) -> tuple[list[Any], list[Any]]:
        """Loads (weights, biases) of the vectors at ``places``; biases are empty without a bias."""
        scales = [self.load_weight(weight, place) for place in places]
        return scales, [self.load_weight(bias, place) for place in places] if self.config.has_bias else []

    def load_weight(self, start, column) -> list[Any]:
        """Loads eight weights as fp32."""
        if not self.config.fp32_weight:
            return self.unpack(ptx.load_global_words(start + Int64(column) * 2, 0, 4))
        at = start + Int64(column) * 4
        words = [*ptx.load_global_words(at, 0, 4), *ptx.load_global_words(at, 16, 4)]
        return [word.bitcast(Float32) for word in words]

    def unpack(self, words: Sequence[Uint32]) -> list[Any]:
        return [half(word) for word in words for half in self.halves]

    def pack_all(self, values: Sequence[Float32]) -> list[Any]:
        return [self.pack(values[i], values[i + 1]) for i in range(0, len(values), 2)]

    def add(self, a: Sequence[Uint32], b: Sequence[Uint32]) -> list[Any]:
        """Returns the sum of two vectors, rounded to their dtype."""
        return self.pack_all([x + y for x, y in zip(self.unpack(a), self.unpack(b), strict=True)])

    @cute.jit
    def store(self, start, element, columns, vectors, n):
        """Stores a thread's vectors of a row, except vectors beyond the row's end."""
        for column, words in zip(columns, vectors, strict=True):
            if column < n:
                ptx.store_global(start + (element + column) * 2, words)

    def row_sum(self, vectors, columns, n, sums, thread):
        """Returns the sum over a row, in every thread. sums: shared memory with one fp32 for each warp."""
        parts = [lanes.in_pairs(operator.add, vector) for vector in vectors]
        counted = [cutlass.select_(column < n, part, Float32(0.0)) for column, part in zip(columns, parts, strict=True)]
        own = lanes.lane_sum(lanes.in_pairs(operator.add, counted), lanes.neighbours(self.config.warp))
        self.publish(own, sums, thread)
        cute.arch.barrier()
        words = [w for i in range(0, self.config.warps, 4) for w in self.load_sums(sums, i)]
        return lanes.in_pairs(operator.add, words)

    @cute.jit
    def publish(self, value, sums, thread):
        """Stores the warp's sum in ``sums``. A barrier of the CTA must follow before threads read it."""
        if thread % self.config.warp == 0:
            ptx.store_shared(sums + thread // self.config.warp * 4, 0, [value])

    def load_sums(self, sums, first: int) -> list[Any]:
        count = min(4, self.config.warps - first)
        return [word.bitcast(Float32) for word in ptx.load_shared_vector(sums, 4 * first, count)]
