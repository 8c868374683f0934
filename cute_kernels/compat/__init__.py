"""Functions with the names and arguments of FBGEMM's, FlashAttention's and FlashMLA's, computed by this package's
kernels."""
