"""Extend attention of few queries over codes, with keys as the rows of MMAs and queries as their columns.

A request with 17 queries of 4 heads has 68 rows of queries. A tile of 128 rows would be half empty. Here keys are the
64 rows of a product and queries its columns, at most 72: S^T = K Q^T and O^T = V^T P^T. Consumer warps make A operands
of codes in their registers; queries and probabilities lie in shared memory. docs/design/extend_attention.md, "17
queries: keys times queries", has the numbers.

`memory` lays out shared memory, `copies` loads raw rows, and `codes` makes operands of them. `multiply` has the
consumer warps' loop, `queries` what precedes the loop, `results` what follows it.
"""
