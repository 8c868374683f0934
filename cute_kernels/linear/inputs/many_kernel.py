"""Many rows of x, scaled and in another order: as `.kernel`, beside the start of the product behind.

The next launch begins when all before this one have ended, not before: so a product that knows what comes before it
(`cute_kernels.linear.wgmma.prepared_config`) reads its weights while rows are made. A thread has several vectors on
their way, for rows of many CTAs come from memory.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, const_expr

from cute_kernels.device import numbers, ptx
from cute_kernels.linear.inputs.config import VECTOR
from cute_kernels.linear.inputs.kernel import InputRowsKernel
from cute_kernels.linear.inputs.many_config import ManyRowsConfig


class ManyRowsKernel(InputRowsKernel):
    """One compiled variant; :class:`ManyRowsConfig` says which."""

    config: ManyRowsConfig

    @cute.kernel
    def kernel(self, out: Int64, vectors: Int32, x: Int64, order: Int64, factors: Int64, stride: Int64):
        config = self.config
        thread = cute.arch.thread_idx()[0]
        row, part, _ = cute.arch.block_idx()
        _, parts, _ = cute.arch.grid_dim()
        begin, end = part * vectors // parts, (part + 1) * vectors // parts
        row_of_x = x + Int64(row) * (stride * 2)
        row_of_out = out + Int64(row) * vectors * 16
        inputs = cute.make_rmem_tensor(VECTOR, Uint32)
        scales = [cute.make_rmem_tensor(VECTOR, Uint32) for _ in range(config.in_flight)]
        step = config.num_threads
        # Not as constant memory: ptxas moves such loads behind the wait.
        for i in cutlass.range_constexpr(config.in_flight):
            self.ask(inputs, scales[i], order, factors, begin + thread + i * step, vectors, constant=False)
        cute.arch.griddepcontrol_wait()
        # In this order: what comes next reads weights without waiting for rows.
        cute.arch.griddepcontrol_launch_dependents()
        room = Int32(0)
        if const_expr(config.room):
            room = cutlass.utils.SmemAllocator().allocate(2 * config.room, byte_alignment=16).toint()
            for vector in cutlass.range(thread, vectors, step, unroll=4):
                numbers.copy_async(room + vector * 16, row_of_x + Int64(vector) * 16, Int32(16))
            cute.arch.cp_async_commit_group()
            cute.arch.cp_async_wait_group(0)
            cute.arch.sync_threads()
        for first in cutlass.range(begin + thread, end, config.in_flight * step, unroll=1):
            self.make(row_of_out, room, row_of_x, inputs, scales, first, end)
            for i in cutlass.range_constexpr(config.in_flight):
                following = first + (config.in_flight + i) * step
                self.ask(inputs, scales[i], order, factors, following, vectors)

    @cute.jit
    def make(self, out, room, row, inputs, scales, first, end):
        """Makes a thread's next vectors, all asked for before any is waited for."""
        config = self.config
        places = [first + i * config.num_threads for i in range(config.in_flight)]
        numbers_of = [inputs[i] for i in range(VECTOR)]
        # Those behind the part's end are its last one.
        found = [self.load(room, row, numbers_of, cutlass.min(place, end - 1)) for place in places]
        for i in cutlass.range_constexpr(config.in_flight):
            words = found[i]
            if const_expr(config.scaled):
                words = self.scale(words, [scales[i][j] for j in range(VECTOR)])
            if places[i] < end:
                ptx.store_global(out + Int64(places[i]) * 16, words)
