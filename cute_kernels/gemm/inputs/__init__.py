"""Prepares rows of x for products that do not take them as given: one launch instead of a copy, a multiplication and a
gather.

The kernel closes gaps between rows, gathers rows by their numbers, multiplies them by the weight's `input_scale`, and
puts inputs in the weight's packed order (act-order). Read on in `config`, `kernel`, `launch`.
"""
