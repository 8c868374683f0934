"""Grouped weight-only GEMM for many rows an expert: the products of `cute_kernels.gemm.wgmma`, with tiles that the
routing decides.

`schedule` chooses the tile, `tiles` finds a CTA's tiles on the device, `kernel` says how the kernel differs from that
of dense products.
"""
