"""The device code of tests.golden.toy; imports the DSL. The first two classes differ in their names alone."""

import cutlass
from cutlass import cute


class Before:
    @cute.jit
    def __call__(self, x: cute.Tensor, stream):
        blocks = cute.ceil_div(cute.size(x), 128)
        self.kernel(x).launch(grid=(blocks, 1, 1), block=(128, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, x: cute.Tensor):
        index = cute.arch.block_idx()[0] * 128 + cute.arch.thread_idx()[0]
        if index < cute.size(x):
            x[index] = x[index] * cutlass.Float32(3.0)


class AfterAnotherName:
    @cute.jit
    def __call__(self, x: cute.Tensor, stream):
        blocks = cute.ceil_div(cute.size(x), 128)
        self.kernel(x).launch(grid=(blocks, 1, 1), block=(128, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, x: cute.Tensor):
        index = cute.arch.block_idx()[0] * 128 + cute.arch.thread_idx()[0]
        if index < cute.size(x):
            x[index] = x[index] * cutlass.Float32(3.0)


class OtherConstant(Before):
    @cute.kernel
    def kernel(self, x: cute.Tensor):
        index = cute.arch.block_idx()[0] * 128 + cute.arch.thread_idx()[0]
        if index < cute.size(x):
            x[index] = x[index] * cutlass.Float32(5.0)


class OtherGrid(Before):
    """The same device code in a larger grid: only the host code tells."""

    @cute.jit
    def __call__(self, x: cute.Tensor, stream):
        blocks = cute.ceil_div(cute.size(x), 128) + 3
        self.kernel(x).launch(grid=(blocks, 1, 1), block=(128, 1, 1), stream=stream)


class OtherSharedMemory(Before):
    """The same device code, with room that it does not use."""

    @cute.jit
    def __call__(self, x: cute.Tensor, stream):
        blocks = cute.ceil_div(cute.size(x), 128)
        self.kernel(x).launch(grid=(blocks, 1, 1), block=(128, 1, 1), smem=2048, stream=stream)
