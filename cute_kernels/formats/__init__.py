"""The formats of weights, of KV caches, and of what changes scores: one object each."""
