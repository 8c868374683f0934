"""Operands of MMAs that are not 16-bit numbers: their meaning, and the kernels that make them."""
