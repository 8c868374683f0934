"""Prepares rows of x for products that do not take them as given: one launch instead of a copy, a product and a gather.

Rows may have gaps, be gathered by their numbers, be multiplied by the weight's `input_scale`, and be put in the
weight's packed order (act-order). Read on in `config`, `kernel`, `launch`.
"""
