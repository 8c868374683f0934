"""Partial results of attention into one: of a CTA's warps, of the splits of a row, of two calls."""
