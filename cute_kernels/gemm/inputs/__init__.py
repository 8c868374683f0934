"""Prepares rows of x for products that do not take them as given: one launch instead of a copy, a multiplication and a
gather.

The kernel closes gaps between rows, and gathers rows by their numbers. It multiplies inputs by the weight's
`input_scale`, and puts them in the weight's packed order (act-order). Read on in `config`, `kernel`, `launch`.
"""
