"""Times of grouped products of many rows on one H200: what the model of `cute_kernels.moe.wgmma.schedule` is fitted to.

4 bits, groups of 128, bf16, symmetric; medians with a cold L2, microseconds, rows of x in the order of the places, one
random routing for each number of tokens, all of one run. Tiles of 256 and 16 rows are in 2 parts, others in 4.
"""

from __future__ import annotations

from cute_kernels.linear.wgmma.config import WgmmaConfig

# experts, those of a token, hidden and inner size
MIXTRAL, QWEN3, DEEPSEEK_V3 = (8, 2, 4096, 14336), (128, 8, 2048, 768), (256, 8, 7168, 2048)

Case = tuple[tuple[int, int, int, int], int, int]

# (model, tokens, product): {(rows of a tile, tiles of 64 features of a warpgroup): us}
MICROSECONDS: dict[Case, dict[tuple[int, ...], float]] = {
    (MIXTRAL, 32, 1): {(16, 2): 138.4, (32, 2): 141.9, (64, 2): 152.9},
    (MIXTRAL, 32, 2): {(16, 2): 71.8, (32, 2): 72.7, (64, 2): 74.7},
    (MIXTRAL, 64, 1): {(16, 2): 193.9, (32, 2): 149.0, (64, 2): 157.5},
    (MIXTRAL, 64, 2): {(16, 2): 134.5, (32, 2): 77.7, (64, 2): 79.8},
    (MIXTRAL, 128, 1): {(16, 2): 323.9, (32, 2): 234.0, (64, 2): 176.9},
    (MIXTRAL, 128, 2): {(16, 2): 197.8, (32, 2): 149.0, (64, 2): 92.1},
    (MIXTRAL, 512, 1): {(128, 1): 399.5, (256, 1): 470.4},
    (MIXTRAL, 512, 2): {(128, 1): 226.9, (256, 1): 284.1},
    (MIXTRAL, 2048, 1): {(128, 1): 1451.4, (256, 1): 1492.2},
    (MIXTRAL, 2048, 2): {(128, 1): 834.1, (256, 1): 929.2},
    (MIXTRAL, 8192, 1): {(128, 1): 5854.7, (256, 1): 5726.1},
    (MIXTRAL, 8192, 2): {(128, 1): 2868.6, (256, 1): 2847.3},
    (QWEN3, 128, 1): {(16, 2): 68.2, (32, 2): 70.1, (64, 2): 74.9},
    (QWEN3, 128, 2): {(16, 2): 40.6, (32, 2): 41.5, (64, 2): 45.7},
    (QWEN3, 512, 1): {(16, 2): 158.2, (32, 2): 110.2, (64, 2): 87.5},
    (QWEN3, 512, 2): {(16, 2): 86.6, (32, 2): 62.3, (64, 2): 51.2},
    (QWEN3, 2048, 1): {(128, 1): 205.8, (256, 1): 243.6},
    (QWEN3, 2048, 2): {(128, 1): 120.6, (256, 1): 139.2},
    (QWEN3, 8192, 1): {(128, 1): 647.3, (256, 1): 641.9},
    (QWEN3, 8192, 2): {(128, 1): 363.3, (256, 1): 353.4},
    (DEEPSEEK_V3, 512, 1): {(16, 2): 1527.2, (32, 2): 1170.7, (64, 2): 1231.4},
    (DEEPSEEK_V3, 512, 2): {(16, 2): 781.4, (32, 2): 582.6, (64, 2): 614.9},
    (DEEPSEEK_V3, 2048, 1): {(32, 2): 3177.0, (64, 2): 2331.6, (128, 1): 2088.6, (256, 1): 2959.1},
    (DEEPSEEK_V3, 2048, 2): {(32, 2): 1656.6, (64, 2): 1225.5, (128, 1): 1115.2, (256, 1): 1546.3},
    (DEEPSEEK_V3, 8192, 1): {(128, 1): 6769.9, (256, 1): 7299.5},
    (DEEPSEEK_V3, 8192, 2): {(128, 1): 3576.5, (256, 1): 3782.6},
}

# Another run, of few rows an expert. As above; (rows of a tile, tiles of a warpgroup, warpgroups) of synchronous tiles.
FEW_ROWS: dict[Case, dict[tuple[int, ...], float]] = {
    (MIXTRAL, 8, 1): {(16, 2): 135.8, (32, 2): 141.0, (16, 2, 2): 125.1, (16, 2, 4): 140.2},
    (MIXTRAL, 16, 1): {(16, 2): 135.1, (32, 2): 140.5, (16, 2, 2): 125.0, (16, 2, 4): 138.8},
    (MIXTRAL, 32, 1): {(16, 2): 141.2, (32, 2): 144.7, (16, 2, 2): 134.2, (16, 2, 4): 146.0},
    (QWEN3, 8, 1): {(16, 2): 37.0, (32, 2): 38.7, (16, 2, 2): 33.8, (16, 2, 4): 41.2},
    (QWEN3, 16, 1): {(16, 2): 47.2, (32, 2): 49.3, (16, 2, 2): 42.6, (16, 2, 4): 40.6},
    (QWEN3, 32, 1): {(16, 2): 56.6, (32, 2): 59.0, (16, 2, 2): 50.7, (16, 2, 4): 57.1},
    (QWEN3, 64, 1): {(16, 2): 66.0, (32, 2): 69.1, (16, 2, 2): 59.7, (16, 2, 4): 58.9},
    (QWEN3, 128, 1): {(16, 2): 68.6, (32, 2): 70.5, (16, 2, 2): 64.8, (16, 2, 4): 63.0},
    (DEEPSEEK_V3, 32, 1): {(16, 2): 615.8, (32, 2): 633.5, (16, 2, 2): 573.9, (16, 2, 4): 579.3},
    (DEEPSEEK_V3, 128, 1): {(16, 2): 1113.1, (32, 2): 1167.7, (16, 2, 2): 975.4, (16, 2, 4): 930.9},
}
# The memory-bound kernel in that run. It takes rows by index, which for tiles are copied first.
MEMORY_BOUND: dict[Case, float] = {
    (MIXTRAL, 8, 1): 122.8,
    (MIXTRAL, 16, 1): 125.5,
    (MIXTRAL, 32, 1): 149.9,
    (QWEN3, 8, 1): 29.3,
    (QWEN3, 16, 1): 42.0,
    (QWEN3, 32, 1): 51.9,
    (QWEN3, 64, 1): 60.5,
    (QWEN3, 128, 1): 73.8,
    (DEEPSEEK_V3, 32, 1): 573.5,
    (DEEPSEEK_V3, 128, 1): 1025.4,
}

# A run of 2026-11-22, as launched: first products with rows by index, second ones with their rows in order; tiles whose
# activations come in digits, with the launch that makes them, beside what served these products before, by which is
# meant the fastest kernel of the tables above.
DIGITS: dict[Case, dict[tuple[int | str, ...], float]] = {
    (MIXTRAL, 8, 1): {(16, 2, "digits"): 119.5, ("before",): 122.3},
    (MIXTRAL, 16, 1): {(16, 2, "digits"): 105.2, ("before",): 111.6},
    (MIXTRAL, 32, 1): {(16, 2, "digits"): 121.5, (32, 2, "digits"): 122.4, ("before",): 134.5},
    (MIXTRAL, 64, 1): {
        (16, 2, "digits"): 147.8,
        (32, 2, "digits"): 128.4,
        (64, 2, "digits"): 138.2,
        ("before",): 153.3,
    },
    (MIXTRAL, 128, 1): {(32, 2, "digits"): 192.2, (64, 2, "digits"): 173.4, ("before",): 186.2},
    (QWEN3, 16, 1): {(16, 2, "digits"): 40.6, ("before",): 40.3},
    (QWEN3, 32, 1): {(16, 2, "digits"): 56.1, ("before",): 54.6},
    (QWEN3, 64, 1): {(16, 2, "digits"): 58.3, ("before",): 62.9},
    (QWEN3, 128, 1): {(16, 2, "digits"): 61.4, (32, 2, "digits"): 62.6, ("before",): 66.6},
    (QWEN3, 256, 1): {(16, 2, "digits"): 73.0, (32, 2, "digits"): 68.9, (64, 2, "digits"): 74.9, ("before",): 76.2},
    (DEEPSEEK_V3, 32, 1): {(16, 2, "digits"): 556.2, ("before",): 572.4},
    (DEEPSEEK_V3, 128, 1): {(16, 2, "digits"): 898.2, ("before",): 912.5},
    (DEEPSEEK_V3, 256, 1): {(16, 2, "digits"): 924.8, (32, 2, "digits"): 929.8, ("before",): 968.5},
    (DEEPSEEK_V3, 512, 1): {
        (16, 2, "digits"): 1106.8,
        (32, 2, "digits"): 978.7,
        (64, 2, "digits"): 1056.4,
        ("before",): 1277.9,
    },
    (MIXTRAL, 8, 2): {(16, 2, "digits"): 66.1, ("before",): 75.8},
    (MIXTRAL, 32, 2): {(16, 2, "digits"): 66.7, (32, 2, "digits"): 68.1, ("before",): 76.2},
    (MIXTRAL, 64, 2): {(16, 2, "digits"): 104.0, (32, 2, "digits"): 72.0, (64, 2, "digits"): 77.0, ("before",): 82.3},
    (MIXTRAL, 128, 2): {(32, 2, "digits"): 135.8, (64, 2, "digits"): 97.2, ("before",): 93.8},
    (QWEN3, 32, 2): {(16, 2, "digits"): 32.6, ("before",): 40.6},
    (QWEN3, 64, 2): {(16, 2, "digits"): 35.2, ("before",): 34.4},
    (QWEN3, 128, 2): {(16, 2, "digits"): 36.6, (32, 2, "digits"): 36.4, ("before",): 37.0},
    (QWEN3, 256, 2): {(16, 2, "digits"): 43.9, (32, 2, "digits"): 42.1, (64, 2, "digits"): 47.3, ("before",): 44.9},
    (DEEPSEEK_V3, 32, 2): {(16, 2, "digits"): 288.1, ("before",): 295.3},
    (DEEPSEEK_V3, 128, 2): {(16, 2, "digits"): 464.8, ("before",): 471.7},
    (DEEPSEEK_V3, 256, 2): {(16, 2, "digits"): 479.5, (32, 2, "digits"): 479.7, ("before",): 487.3},
}


def tile_of(config: WgmmaConfig) -> tuple[int | str, ...]:
    """A tile as the tables above name it."""
    kind = (config.warpgroups,) if config.synchronous else ("digits",) if config.digits else ()
    return config.tokens, config.m_tiles, *kind
