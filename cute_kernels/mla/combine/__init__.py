"""Turns accumulators into results: stores, partial results, and who adds them up."""
