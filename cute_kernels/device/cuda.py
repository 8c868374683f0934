"""Constants that CUDA fixes for every architecture, and `EMPTY_WORD`, a constant of this library. There are no GPU
types here, so that host code and configurations can import them."""

WARP_THREADS = 32
BARRIER_BYTES = 8  # of an mbarrier
# Of a workspace where nothing is: a NaN that no arithmetic yields, since the hardware's own is 0x7fffffff.
EMPTY_WORD = 0xFFFFFFFF
