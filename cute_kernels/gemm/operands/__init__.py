"""Operands of MMAs that are not 16-bit numbers: FP8 codes and limbs, and the kernels that make them."""
