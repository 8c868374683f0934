"""Where copies put tokens and what is cleared behind a request's end, by the copier's own arithmetic."""

from __future__ import annotations

import pytest

from cute_kernels.attention.candidates import candidate_configs
from cute_kernels.attention.decode_config import DecodeConfig, tiles_of
from cute_kernels.attention.problem import AttentionProblem
from cute_kernels.formats.kv import HEAD_DIMS
from cute_kernels.runtime import native
from cute_kernels.runtime.composed import changed
from layouts.kv.swizzled_tile import CHUNK_BYTES, SwizzledTile
from layouts.kv.tile import WORD_BYTES, RowTile
from tests.layouts.dsl_oracle import traced

pytestmark = pytest.mark.skipif(native.dsl_version() is None, reason="the copier is written in nvidia-cutlass-dsl")


def configs() -> list[DecodeConfig]:
    pairs = [("bf16", "bf16"), ("int4_g1", "int4_g1"), ("int8_token_head", "int8_token_head"), ("e5m2", "e5m2")]
    pairs += [("int8_channel", "int4_g2"), ("int4_g4", "bf16")]
    return [
        candidate_configs(AttentionProblem(1, 4096, 8 * heads, heads, d, d, *pair, "bf16", aligned=aligned))[0]
        for pair in pairs
        for d, heads in ((64, 1), (80, 3), (128, 1), (128, 8), (192, 32))
        for aligned in (True, False)
        if d != 80 or "int4_g4" not in pair
    ]


CONFIGS = list(dict.fromkeys(configs()))
every_config = pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)


def value_row(config: DecodeConfig, token: int) -> set[int]:
    """Bytes of a tile of V that hold a token."""
    tile = tiles_of(config)[1]
    if isinstance(tile, RowTile):
        first = WORD_BYTES * tile.token_offset(token)
        return set(range(first, first + WORD_BYTES * tile.token_words))
    chunks = [
        h * tile.head_bytes + tile.chunk_address(token, c) for h in range(tile.num_heads) for c in all_chunks(tile)
    ]
    return {first + i for first in chunks for i in range(CHUNK_BYTES)}


def all_chunks(tile: SwizzledTile) -> range:
    return range(tile.num_panels * tile.row_chunks)


@every_config
def test_clearing_zeroes_every_row_behind_the_end_and_no_other(config: DecodeConfig):
    """What `TileCopier.clear_rows` runs over: in each part of the tile from `row_start` to the part's end."""
    from cute_kernels.attention.loads.copies import TileCopier

    values = TileCopier(config).operands[1]
    size = config.tile_bytes[1]
    assert size % values.run_bytes == 0
    for first in (0, 1, 17, 32, config.tile_tokens - 1):
        start = int(values.row_start(first))  # type: ignore[arg-type]
        assert start % WORD_BYTES == 0
        if values.run_bytes < size:
            assert start % CHUNK_BYTES == 0  # rows of parts are cleared 16 bytes at a time
        parts = range(0, size, values.run_bytes)
        cleared = {byte for part in parts for byte in range(part + start, part + values.run_bytes)}
        for token in range(config.tile_tokens):
            row = value_row(config, token)
            assert row <= cleared if token >= first else not row & cleared


@every_config
def test_barriers_count_the_arrivals_that_copies_make(config: DecodeConfig):
    """One arrival that announces bytes, if any are announced, and one of every thread that copies words."""
    from cute_kernels.attention.loads.copies import TileCopier

    copier = TileCopier(config)
    announced = any(copy != "word" for copy in config.copies)
    producer_threads = 32 * config.filling_warps
    assert copier.arrivals == announced + ("word" in config.copies) * producer_threads


@every_config
def test_the_lanes_of_the_copying_warps_share_a_tile_in_parts_of_one_page(config: DecodeConfig):
    from cute_kernels.attention.loads.copies import TileCopier

    copier = TileCopier(config)
    assert copier.lane_tokens * 32 >= config.tile_tokens
    assert all(max(copier.lane_tokens, run) % min(copier.lane_tokens, run) == 0 for run, _ in copier.bulk)
    if config.page_tokens:
        assert config.page_tokens % copier.lane_tokens == 0


@every_config
def test_bulk_copies_of_equal_size_are_issued_together(config: DecodeConfig):
    from cute_kernels.attention.loads.copies import TileCopier

    bulk = TileCopier(config).bulk
    assert sum(len(operands) for _, operands in bulk) == config.copies.count("bulk")
    for tokens, operands in bulk:
        assert all(operand.tile.copy_tokens == tokens for operand in operands)
    if len(set(config.format_names)) == 1 and config.copies[0] == "bulk":
        assert len(bulk) == 1


def test_every_tensor_map_of_a_contiguous_cache_is_entered_as_it_is():
    """Their copies name the block: there is no address that could be moved to it."""
    from cute_kernels.attention.loads.copies import RowMapSource, TensorMapSource, TileCopier

    sources = {"map": RowMapSource(*[None] * 4), "tma": TensorMapSource(*[None] * 4)}  # type: ignore[arg-type]
    few_heads = AttentionProblem(8, 4096, 32, 8, 128, 128, "int4_g1", "int4_g1", "bf16", q_len=3)
    found = [*candidate_configs(few_heads), *CONFIGS]
    operands = [operand for config in found for operand in TileCopier(config).operands if operand.copy in sources]
    assert {operand.copy for operand in operands} == {"map", "tma"}
    assert all(operand.enter(sources[operand.copy], 1) is sources[operand.copy] for operand in operands)


@pytest.mark.parametrize("element_bytes", [1, 2])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_tensor_maps_write_chunks_where_the_tile_says(head_dim: int, element_bytes: int):
    """The DSL's own layout of the shared memory that a tensor map fills, evaluated, for two heads and two stages."""
    from cute_kernels.attention.loads.copies import TensorMapOperand

    kv_format = {1: "e5m2", 2: "bf16"}[element_bytes]
    problem = AttentionProblem.uniform(1, 4096, 8, 1, head_dim, kv_format, "bf16")
    config = changed(candidate_configs(problem)[0], num_heads=2)
    operand = TensorMapOperand(config, 0)
    tile = operand.tile
    places = [
        (t, c, h, s) for t in (0, 1, 7, 8, 37) for c in range(tile.num_chunks) for h in range(2) for s in range(2)
    ]

    def evaluate() -> list[int]:
        layout = operand._layout(config.tile_tokens, config.mainloop.num_heads, 2).outer
        return [int(layout((t, c * (CHUNK_BYTES // element_bytes), h, s))) for t, c, h, s in places]

    # The swizzle is one of byte addresses: bits 4 up are XORed with those from 7 up, three of them or two.
    mask = tile.row_chunks - 1
    addresses = [element_bytes * offset for offset in traced(evaluate)]
    found = [address ^ (address >> 7 & mask) << 4 for address in addresses]
    assert found == [s * tile.num_bytes + h * tile.head_bytes + tile.chunk_address(t, c) for t, c, h, s in places]
