"""Weight-only GEMM for many rows of x: warpgroup MMA with the decoded weights as its A operand, in registers.

`config` has the compile-time choices, `kernel` the roles of the warps, `tiles` the distribution of the work, and
`epilogue` the store of accumulators. `cute_kernels.gemm.compile` lists the kernels that ship.
"""
