"""Operands of MMAs besides 16-bit numbers: what each means and how it is made."""
