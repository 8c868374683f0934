"""Adapters that let model libraries run on this package's kernels."""
