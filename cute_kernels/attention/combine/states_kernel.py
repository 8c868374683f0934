"""Merges two attention states on the GPU: one thread per 16 bytes of output, nothing shared between threads.

The traffic is two outputs read and one written; the log-sum-exps of a row come from L1 for all threads of the row but
the first. One thread of a row writes the merged log-sum-exp.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from cute_kernels.attention.combine.states_config import MergeStatesConfig
from cute_kernels.attention.loads.elements import of_name
from cute_kernels.device import ptx
from cute_kernels.device.types import extents


class MergeStatesKernel:
    """One compiled variant; :class:`MergeStatesConfig` says which."""

    def __init__(self, config: MergeStatesConfig):
        self.config = config

    def launch(self, given, stream):
        """Launches over the vectors of ``out``; ``given`` has the arguments of
        :data:`cute_kernels.attention.arguments.MERGE`."""
        shape = extents(given.out)
        threads = self.config.num_threads
        row_vectors = shape[-1] // self.config.vector_elements
        num_vectors = row_vectors
        for size in shape[:-1]:
            num_vectors = num_vectors * size
        states = given.out_a, given.lse_a, given.out_b, given.lse_b, given.out, given.lse
        self.kernel(*states, num_vectors, row_vectors).launch(
            grid=(cute.ceil_div(num_vectors, threads), 1, 1), block=(threads, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        out_a: cute.Tensor,
        lse_a: cute.Tensor,
        out_b: cute.Tensor,
        lse_b: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor,
        num_vectors: Int32,
        row_vectors: Int32,
    ):
        vector = cute.arch.block_idx()[0] * self.config.num_threads + cute.arch.thread_idx()[0]
        if vector < num_vectors:
            place = Int64(vector) * self.config.vector_bytes
            # Asked for first, so that the division below hides behind the loads.
            words_a = ptx.load_global_words(ptx.address(out_a) + place, 0, 4)
            words_b = ptx.load_global_words(ptx.address(out_b) + place, 0, 4)
            row = vector // row_vectors
            at = Int64(row) * 4
            state_a, state_b = self.load_state(lse_a, at), self.load_state(lse_b, at)
            top = ptx.fmax(state_a, state_b)
            finite_top = top
            if top == -Float32.inf:
                finite_top = Float32(0.0)  # -inf - -inf would be NaN
            weight_a = ptx.exp2((state_a - finite_top) * ptx.LOG2_E)
            weight_b = ptx.exp2((state_b - finite_top) * ptx.LOG2_E)
            total = weight_a + weight_b
            share = Float32(0.0)
            if total > 0.0:
                share = ptx.reciprocal(total)
            merged = [
                self.blend(a, weight_a * share, b, weight_b * share)
                for a, b in zip(self.unpack(words_a), self.unpack(words_b), strict=True)
            ]
            ptx.store_global(ptx.address(out) + place, self.pack(merged))
            if vector == row * row_vectors:
                ptx.store_global(ptx.address(lse) + at, [top + ptx.log2(total) * ptx.LN_2])

    def load_state(self, states, offset):
        """Loads a log-sum-exp; +inf, which MLA decode returns for a query without keys, becomes -inf."""
        state = ptx.load_global_words(ptx.address(states) + offset, 0, 1)[0].bitcast(Float32)
        return cutlass.select_(state == Float32.inf, Float32(-Float32.inf), state)

    @cute.jit
    def blend(self, a, weight_a, b, weight_b):
        """Computes a * weight_a + b * weight_b, where a weight of 0 silences even NaN."""
        left, right = a * weight_a, b
        if weight_a == 0.0:
            left = Float32(0.0)
        if weight_b == 0.0:
            right = Float32(0.0)
        return ptx.fma(right, weight_b, left)

    def unpack(self, words):
        """The elements of a vector as fp32."""
        if const_expr(self.config.dtype == "fp32"):
            return [word.bitcast(Float32) for word in words]
        return [half(word) for word in words for half in of_name(self.config.dtype).halves]

    def pack(self, values):
        """Four words of output from fp32 elements."""
        if const_expr(self.config.dtype == "fp32"):
            return values
        join = of_name(self.config.dtype).pack
        return [join(values[i], values[i + 1]) for i in range(0, len(values), 2)]
