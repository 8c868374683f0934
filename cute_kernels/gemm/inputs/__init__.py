"""Prepares rows of x for products that cannot read them as they are. One launch replaces torch's copy, multiplication
and gather.

The kernel closes gaps between rows, and gathers rows by index. It multiplies inputs by the weight's `input_scale`, and
permutes them into the weight's packed order (act-order). Read on in `config`, `kernel`, `launch`.
"""
