"""Weight-only GEMM for many rows of x: warpgroup MMA with the decoded weights as its A operand, in registers.

`config` has the compile-time choices, `kernel` the roles of the warps, `tiles` the distribution of the work, `epilogue`
the way of the accumulators to the output, `compile` makes functions of configurations.
"""
