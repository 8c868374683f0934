"""The combine. It stores accumulators as results or as partial results, and adds up partial results."""
