"""Rows of x as products take them, where they are not so given: one launch instead of a copy, a product and a gather.

Rows may lie apart, be multiplied by the weight's `input_scale`, and be wanted in the weight's packed order (act-order).
Read on in `config`, `kernel`, `compile`, `launch`.
"""
