"""From accumulators to results: stores, partial results, and who adds them up."""
