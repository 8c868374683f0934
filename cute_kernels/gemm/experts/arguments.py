"""The arguments that kernels of experts are launched with; they are listed nowhere else.

What :mod:`cute_kernels.gemm.arguments` has too means the same here, of all experts one after the other; x [.., k].

    offsets, rows      int32 [num_experts + 1], the first place of each expert, and [places], the row of x at each place
    waits              0 if offsets and rows, or ids, are older than the kernel before this one, which has waited for
                       them before it let this one begin; else 1
    of `RANGES`        k_blocks: a multiple of the k blocks of a chunk, of which there is room for x_slots times as
                       many; places: rows of the result, at least 1
    of `ASSIGNED`      ids: address of ``count`` experts' ids of ``id_words`` words of 32 bits, of which those outside 0
                       to num_experts - 1 go nowhere; out [count, ..], a row for each assignment; row_factor: as
                       `AssignedSizes`. k_blocks: of one of 2**part_bits equal parts of K, each of which has a result of
                       its own, out [2**part_bits, count, ..], the first with the bias: without activation, for
                       whoever adds them up
    of `ENTRIES`       ids, count, id_words, row_factor: as in `ASSIGNED`; k and n whole k blocks and vectors
    of `TILES`         x [places, k], rows in the order of the places
    of `LIMB_TILES`    x [places, padded k] of 16 bits: of each 128 inputs first the high limbs, then the low ones;
                       x_scales, on 16 bytes: fp32 [k blocks, x_scale_pitch], a multiple of 4 and large enough for 68
                       scales from any place on
    `ROUTING`          topk_ids int32 or int64 [tokens, topk]; ids outside 0 to num_experts - 1 go nowhere; places
                       [tokens * topk], the place of each assignment, -1 for those that go nowhere; all int32
    `COMBINE`          out [tokens, n] of the configuration's dtype; results [places, n] of its source, on 16 bytes;
                       places int32 [tokens, topk], the row of ``results`` of each assignment or -1; weights
                       [tokens, topk]. With ``id_bits`` places are the assignments' own, and what is given instead of
                       them are ids of experts, of which those outside 0 to num_experts - 1 count for nothing; their
                       results may be of 2**part_bits parts of K, [parts, tokens * topk, n], all of which are added up
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
