"""The producer warps: they load tokens of a cache, and queries, into shared memory."""
