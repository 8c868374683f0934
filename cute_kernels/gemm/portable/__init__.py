"""Weight-only GEMM for GPUs other than Hopper: cp.async, ldmatrix and mma.sync, of sm_80 and later, on the same blob.

`config` has the compile-time choices, `schedule` which of them serves a product, `kernel` the loop over K, `compile`
makes functions of configurations, `plan` is what a launch keeps. Work tiles of work, scales and the way of the
accumulators to the output are those of `cute_kernels.gemm.wgmma`: a warpgroup's fragments are those of four warps of
mma.m16n8k16.
"""
