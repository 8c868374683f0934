"""Adding up the parts of split rows: a CTA per head of a row of queries, a thread per four columns.

The launch begins before the one that writes the parts has ended (programmatic dependent launch), and waits for its end.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cute_kernels.device import ptx
from cute_kernels.mla.config import STATS_BYTES, V_HEAD_DIM, CombineConfig
from cute_kernels.mla.numbers16 import of_name
from cute_kernels.mla.output import exists_sink
from cute_kernels.mla.softmax import LOWEST
from cute_kernels.mla.work import Results, Shape, partial_stats, partial_values


class CombineKernel:
    """Parts in ascending order: the result does not depend on which part was done first."""

    def __init__(self, config: CombineConfig):
        self.config = config
        self.numbers = of_name(config.dtype)

    @cute.jit
    def __call__(
        self,
        out: cute.Tensor,
        lse: Int64,
        max_logits: Int64,
        sinks: Int64,
        partials: Int64,
        num_parts: Int32,
        stream,
    ):
        """out: bf16 or fp16 [batch, q_len, num_heads, 512]. Addresses: lse fp32 [batch, q_len, num_heads], max_logits
        likewise or 0, sinks fp32 [num_heads] or 0, partials: see `Results`."""
        sizes: Any = out.shape
        batch, q_len, num_heads = sizes[0], sizes[1], sizes[2]
        shape = Shape(batch * q_len, q_len, num_heads, num_heads, num_parts, Int32(0), Float32(0.0))
        results = Results(ptx.address(out), lse, max_logits, sinks, partials)
        self.kernel(results, shape).launch(
            grid=(shape.rows * num_heads, 1, 1),
            block=(self.config.num_threads, 1, 1),
            use_pdl=True,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, results, shape):
        query_row, tid = cute.arch.block_idx()[0], cute.arch.thread_idx()[0]
        stats = partial_stats(results, shape, query_row, 0)
        values = partial_values(results, shape, query_row, 0) + tid * 16
        cute.arch.griddepcontrol_wait()
        maximum = Float32(LOWEST)
        for part in cutlass.range(shape.num_parts, unroll=4):
            maximum = ptx.fmax(maximum, _load(stats + part * STATS_BYTES, 1)[0])
        total = Float32(0.0)
        sums = cute.make_rmem_tensor(4, Float32)
        sums.fill(0.0)
        for part in cutlass.range(shape.num_parts, unroll=4):
            part_maximum, part_total = _load(stats + part * STATS_BYTES, 2)
            weight = ptx.exp2(part_maximum - maximum)
            # A part without keys has written no values.
            if part_total > 0.0:
                total = total + weight * part_total
                part_sums = _load(values + Int64(part) * (V_HEAD_DIM * 4), 4)
                for i in cutlass.range_constexpr(4):
                    sums[i] = ptx.fma(part_sums[i], weight, sums[i])
        denominator = total
        if exists_sink(results):
            head = query_row % shape.num_heads
            sink = ptx.load_global_words(results.sinks + Int64(head) * 4, 0, 1)[0].bitcast(Float32)
            denominator = total + ptx.exp2(ptx.fma(sink, Float32(ptx.LOG2_E), -maximum))
        lse = (maximum + ptx.log2(total)) * ptx.LN_2
        top = maximum * ptx.LN_2
        factor = ptx.reciprocal(denominator)
        if total == 0.0:
            lse, top = Float32.inf, -Float32.inf
            factor = Float32(0.0)
        words = [self.numbers.pack(sums[i] * factor, sums[i + 1] * factor) for i in (0, 2)]
        ptx.store_global(results.out + Int64(query_row) * (V_HEAD_DIM * 2) + tid * 8, words)
        if tid == 0:
            ptx.store_global(results.lse + Int64(query_row) * 4, [lse])
            if results.max_logits != 0:
                ptx.store_global(results.max_logits + Int64(query_row) * 4, [top])


def _load(address, count: int) -> list[Float32]:
    """Numbers of a part, which may have been written after this launch began."""
    return [word.bitcast(Float32) for word in ptx.load_global_words(address, 0, count, constant=False)]
