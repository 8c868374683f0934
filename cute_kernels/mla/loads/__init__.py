"""What producer warps do: tokens of a cache, and queries, into shared memory."""
