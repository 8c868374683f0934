"""The device code of tests.runtime.tiny; imports the DSL."""

import cutlass
from cutlass import cute

from tests.runtime.tiny import NUM_THREADS


@cute.kernel
def scale_kernel(x: cute.Tensor, y: cute.Tensor, scale: cutlass.Constexpr, smem_floats: cutlass.Constexpr):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    smem = cutlass.memory.SmemAllocator()
    buffer = smem.allocate_tensor(cutlass.Float32, cute.make_layout(smem_floats), byte_alignment=16)
    index = block * NUM_THREADS + thread
    if index < cute.size(x):
        buffer[thread] = x[index] * scale
    cute.arch.barrier()
    if index < cute.size(x):
        y[index] = buffer[thread]


@cute.jit
def scale_host(x: cute.Tensor, y: cute.Tensor, scale: cutlass.Constexpr, smem_floats: cutlass.Constexpr, stream):
    blocks = cute.ceil_div(cute.size(x), NUM_THREADS)
    scale_kernel(x, y, scale, smem_floats).launch(grid=(blocks, 1, 1), block=(NUM_THREADS, 1, 1), stream=stream)
