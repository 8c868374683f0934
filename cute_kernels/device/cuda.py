"""Numbers that CUDA fixes for every architecture. No GPU types here: configurations import it."""

WARP_THREADS = 32
BARRIER_BYTES = 8  # of an mbarrier
