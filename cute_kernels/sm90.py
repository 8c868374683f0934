"""What every kernel family counts with on a Hopper GPU (compute capability 9.0). No GPU types here."""

WARP_THREADS = 32
MAX_THREADS = 1024  # of a CTA
MAX_SHARED_BYTES = 227 * 1024  # what one CTA may use
RESERVED_SHARED_BYTES = 1024  # taken by the system for every resident CTA
BARRIER_BYTES = 8
NUM_SMS = 132  # of H100 SXM and H200, where no GPU says otherwise
# Of a workspace where nothing is: a NaN that no arithmetic yields, since the hardware's own is 0x7fffffff.
EMPTY_WORD = 0xFFFFFFFF
