"""Operands of MMAs other than 16-bit numbers: what each means and how it is made."""
