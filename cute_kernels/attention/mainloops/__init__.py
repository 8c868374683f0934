"""The mainloops of attention. There are three kinds: warps multiply few rows of queries, warpgroups multiply tiles of
many rows of queries, or keys are the rows of MMAs and few queries are the columns.
"""
