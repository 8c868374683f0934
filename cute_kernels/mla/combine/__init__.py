"""The combine: it stores accumulators as results or partial results, and adds partial results up."""
