"""Combines partial results of attention: of a CTA's warps, of the splits of a row, of two calls."""
