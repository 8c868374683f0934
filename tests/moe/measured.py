"""Times of grouped products: `tests/facts/moe.json` says how they were measured."""

from __future__ import annotations

from cute_kernels.gemm.wgmma.config import WgmmaConfig
from cute_kernels.gemm.wgmma.mainloops import MmaSync
from tests import facts

# Experts, topk, hidden, intermediate.
Case = tuple[tuple[int, int, int, int], int, int]  # model, tokens, product

MIXTRAL, QWEN3, DEEPSEEK_V3 = (8, 2, 4096, 14336), (128, 8, 2048, 768), (256, 8, 7168, 2048)

MICROSECONDS = facts.table("moe", "MICROSECONDS")
FEW_ROWS = facts.table("moe", "FEW_ROWS")
SYMMETRIC = facts.table("moe", "SYMMETRIC")
RANGES = facts.table("moe", "RANGES")
SIZES = facts.table("moe", "SIZES")


def tile_of(config: WgmmaConfig) -> tuple[int | str, ...]:
    """A tile as the tables name it."""
    kind = (config.warpgroups,) if isinstance(config.mainloop, MmaSync) else ("limbs",) if config.limbs else ()
    return config.tile_m, config.n_tiles, *kind
