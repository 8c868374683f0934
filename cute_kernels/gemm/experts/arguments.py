"""The arguments that kernels of experts are launched with. A kernel that makes limbs or codes of rows may run before
them; `cute_kernels.gemm.operands.fp8_config.ROWS` lists its arguments.

Arguments that :mod:`cute_kernels.gemm.arguments` lists have the same meaning here. Weights, scales and biases are those
of all experts, one after the other. x is [.., k].

    offsets, rows      int32 [num_experts + 1], the first place of each expert, and [places], the row of x at each place
    waits              1 if warps have to wait for the previous kernel before they read offsets and rows, or ids; 0 if
                       these were complete before the previous kernel let this kernel begin
    of `RANGES`        k_blocks: a multiple of a chunk's k blocks; x_slots: number of entries whose limbs fit in shared
                       memory at a time; places: rows of the result, at least 1
    of `ASSIGNED`      ids: address of ``count`` experts' ids, each ``id_words`` words of 32 bits; ids outside 0 to
                       num_experts - 1 go nowhere; out [count, ..], a row for each assignment; row_factor: as in
                       `AssignedSizes`. K is cut into 2**part_bits equal parts of k_blocks k blocks. With several parts,
                       out is [2**part_bits, count, ..] without activation, only the first part's results include the
                       bias, and `COMBINE` adds the parts up
    of `ENTRIES`       ids, count, id_words, row_factor: as in `ASSIGNED`; k and n whole k blocks and vectors
    of `TILES`         x [places, k], rows in the order of the places
    of `LIMB_TILES`    x [places, padded k] of 16 bits: for each 128 inputs first 128 high limbs, then 128 low limbs;
                       x_scales: fp32 [k blocks, x_scale_pitch], on 16 bytes; x_scale_pitch: a multiple of 4, large
                       enough for 68 scales from any place on
    `ROUTING`          topk_ids int32 or int64 [tokens, topk]; ids outside 0 to num_experts - 1 go nowhere; places
                       [tokens * topk], the place of each assignment, -1 if it goes nowhere; all but ids int32
    `COMBINE`          out [tokens, n] of the configuration's dtype; results [places, n] of its source, on 16 bytes;
                       places int32 [tokens, topk], the row of ``results`` of each assignment or -1; weights
                       [tokens, topk]. With ``id_bits`` results lie in the order of assignments, and places has ids of
                       experts instead; ids outside 0 to num_experts - 1 count for nothing. Results may then have
                       2**part_bits parts of K, [parts, tokens * topk, n], all of which are added up
"""

from __future__ import annotations

from cute_kernels.gemm.arguments import RESULT, matrix_arguments

RANGES = matrix_arguments(
    ("codes", "scales", "bias", "out", "offsets", "rows"),
    ("n", "num_tiles", "k_blocks", "num_ctas", "num_experts", "places", "x_slots", "waits", *RESULT),
)
ASSIGNED = matrix_arguments(
    ("codes", "scales", "bias", "out", "ids"),
    (
        "n", "num_tiles", "k_blocks", "num_ctas", "num_experts", "count", "x_slots", "id_words", "row_factor",
        "part_bits", "waits", *RESULT,
    ),
)  # fmt: skip
ENTRIES = matrix_arguments(
    ("codes", "scales", "zeros", "bias", "out", "ids"),
    ("n", "num_tiles", "k_blocks", "num_ctas", "num_experts", "count", "id_words", "row_factor", "waits", *RESULT),
)
TILE_NUMBERS = ("n", "num_tiles", "k_blocks", "num_experts", "num_ctas", *RESULT)
TILES = matrix_arguments(("codes", "scales", "zeros", "bias", "out", "offsets"), TILE_NUMBERS)
LIMB_ADDRESSES = ("codes", "scales", "x_scales", "bias", "out", "offsets")
LIMB_TILES = matrix_arguments(LIMB_ADDRESSES, (*TILE_NUMBERS, "x_scale_pitch"))
ROUTING = matrix_arguments(("offsets", "rows", "places"), ("num_experts",), "topk_ids")
COMBINE = matrix_arguments(("results", "places", "weights"), ("topk", "num_experts", "part_bits"), "out")
