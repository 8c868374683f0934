"""What the kernels of this room are launched with beside their matrix: see `cute_kernels.linear.arguments`."""

from __future__ import annotations

from cute_kernels.linear.arguments import RESULT, Arguments

GROUPED = Arguments(
    ("codes", "scales", "zeros", "bias", "out", "workspace", "offsets", "rows"),
    (
        "n", "num_tiles", "k_blocks", "num_slices", "num_groups", "num_experts", "entry_shift", "x_slots",
        "first_entry", "max_entries", "max_parts", "slack", "waits", *RESULT,
    ),
)  # fmt: skip
RANGES = Arguments(
    ("codes", "scales", "bias", "out", "offsets", "rows"),
    ("n", "num_tiles", "k_blocks", "num_ctas", "num_experts", "places", "x_slots", "waits", *RESULT),
)
ASSIGNED = Arguments(
    ("codes", "scales", "bias", "out", "ids"),
    (
        "n", "num_tiles", "k_blocks", "num_ctas", "num_experts", "count", "x_slots", "id_words", "row_factor",
        "part_bits", "waits", *RESULT,
    ),
)  # fmt: skip
TILE_NUMBERS = ("n", "num_tiles", "k_blocks", "num_experts", "num_ctas", *RESULT)
TILES = Arguments(("codes", "scales", "zeros", "bias", "out", "offsets"), TILE_NUMBERS)
LIMB_TILES = Arguments(("codes", "scales", "x_scales", "bias", "out", "offsets"), (*TILE_NUMBERS, "x_scale_pitch"))
ROUTING = Arguments(("offsets", "rows", "places"), ("num_experts",))
COMBINE = Arguments(("results", "places", "weights"), ("topk", "num_experts", "part_bits"))
GATHER = Arguments(("end", "rows", "out"), ("places",))
