"""Tiles of the decode kernel: every shipped configuration reads without bank conflicts and misses no element."""

from itertools import pairwise

import pytest

from cute_kernels.attention.compile import DecodeSpec, shipped_specs
from cute_kernels.attention.config import DecodeConfig
from cute_kernels.attention.tiles import tile_of
from layouts import banks
from layouts.kv.dense_tile import CHUNK_BYTES, MATRIX, DenseTile
from layouts.kv.tile import BLOCK_TOKENS, WORD_BYTES, Int4Tile

LANES = range(32)
MMA_ROWS = 16  # of the A operand of mma.sync.m16n8k16
BULK_BYTES = 16  # size and addresses of cp.async.bulk are multiples of this


def shipped_tiles() -> dict[Int4Tile | DenseTile, DecodeConfig]:
    """The different tiles of the shipped configurations, each with one configuration that has it."""
    configs = [spec.config for spec in shipped_specs() if isinstance(spec, DecodeSpec)]
    return {tile_of(config): config for config in reversed(configs)}


def unshipped_tiles() -> list[Int4Tile]:
    """What is compiled on demand: odd numbers of heads, copies by words."""
    counts = [(3, True, 4), (5, True, 4), (2, False, 4), (4, False, 4), (1, True, 1), (1, False, 1)]
    shapes = [
        (d, g, heads, contiguous, words)
        for d in (64, 128, 256)
        for g in (1, 2, 4, 8)
        for heads, contiguous, words in counts
    ]
    return [
        Int4Tile(d, g, heads, max(8 // heads, 1) * BLOCK_TOKENS, contiguous, words)
        for d, g, heads, contiguous, words in shapes
        if contiguous or words == 1 or heads * (4 * g + d // 2) % BULK_BYTES == 0
    ]


INT4_TILES = [tile for tile in shipped_tiles() if isinstance(tile, Int4Tile)]
ALL_INT4_TILES = INT4_TILES + unshipped_tiles()
DENSE_TILES = [tile for tile in shipped_tiles() if isinstance(tile, DenseTile)]


def name(tile: Int4Tile | DenseTile) -> str:
    if isinstance(tile, DenseTile):
        return f"dense-d{tile.head_dim}-t{tile.num_tokens}"
    layout = f"{'contiguous' if tile.contiguous else 'strided'}-{'bulk' if tile.copy_words == 4 else 'word'}"
    return f"d{tile.head_dim}-g{tile.num_groups}-h{tile.num_heads}-t{tile.num_tokens}-{layout}"


every_int4_tile = pytest.mark.parametrize("tile", ALL_INT4_TILES, ids=name)
every_shipped_int4_tile = pytest.mark.parametrize("tile", INT4_TILES, ids=name)
every_dense_tile = pytest.mark.parametrize("tile", DENSE_TILES, ids=name)


def word_report(words: list[int], width: int = WORD_BYTES) -> banks.BankReport:
    return banks.report([word * WORD_BYTES for word in words], width=width)


def test_the_shipped_tiles_cover_every_row_format():
    assert {(tile.head_dim, tile.num_groups) for tile in INT4_TILES} == {
        (d, g) for d in (64, 128, 256) for g in (1, 2, 4, 8)
    }
    assert {tile.head_dim for tile in DENSE_TILES} == {64, 128, 256}


# -- INT4: bank conflicts ---------------------------------------------------------------------------------------------


@every_shipped_int4_tile
def test_every_word_of_k_is_loaded_without_conflict(tile: Int4Tile):
    for j in range(4):
        for unit in range(tile.head_dim // tile.k_unit):
            report = word_report(tile.k_words(j, unit))
            assert report.wavefronts == 1, report.describe()


@every_shipped_int4_tile
def test_every_word_of_v_is_loaded_without_conflict(tile: Int4Tile):
    for j in range(4):
        for parity in range(2):
            for unit in range(tile.head_dim // tile.v_unit):
                report = word_report(tile.v_words(j, parity, unit))
                assert report.wavefronts == 1, report.describe()


@every_shipped_int4_tile
def test_scales_and_shifts_are_loaded_without_conflict(tile: Int4Tile):
    vector = min(4, tile.header_words)
    for j in range(4):
        for first in range(0, tile.header_words, vector):
            report = word_report([word + first for word in tile.header_reads(j)], width=WORD_BYTES * vector)
            assert report.conflicts == 0, report.describe()
            # 8 rows of 16 bytes are 128 bytes, but an access of 16 bytes a lane serves at most half a warp at a time.
            assert report.wavefronts == (2 if vector == 4 else 1)


# -- INT4: elements ----------------------------------------------------------------------------------------------------


@every_int4_tile
def test_the_lanes_of_a_row_contract_every_column_of_head_dim_once(tile: Int4Tile):
    """Slots (mma, register, half) of four lanes over all units: a permutation of the columns."""
    mmas, registers = (1, 1) if tile.k_unit == 8 else (tile.k_unit // MMA_ROWS, 2)
    columns = [
        tile.k_column(unit, t, mma, register, half)
        for unit in range(tile.head_dim // tile.k_unit)
        for t in range(4)
        for mma in range(mmas)
        for register in range(registers)
        for half in range(2)
    ]
    assert sorted(columns) == list(range(tile.head_dim))


@every_int4_tile
def test_the_columns_of_a_slot_lie_in_the_word_that_its_lane_loads(tile: Int4Tile):
    for unit in range(tile.head_dim // tile.k_unit):
        words = tile.k_words(0, unit)
        for t in range(4):
            first_column = 8 * (words[t] - tile.header_reads(0)[t] - tile.header_words)
            for half in range(2):
                assert first_column <= tile.k_column(unit, t, 0, 0, half) < first_column + 8


@every_int4_tile
def test_the_lanes_of_v_hold_every_column_of_the_output_once(tile: Int4Tile):
    columns = [
        tile.v_column(unit, g, nibble)
        for unit in range(tile.head_dim // tile.v_unit)
        for g in range(8)
        for nibble in range(tile.v_unit // 8)
    ]
    assert columns == list(range(tile.head_dim))


@every_int4_tile
def test_a_unit_never_straddles_two_groups(tile: Int4Tile):
    """One scale serves all columns of a unit."""
    assert tile.group_width % tile.k_unit == 0 and tile.group_width % tile.v_unit == 0


@every_int4_tile
def test_the_row_halves_hold_every_token_of_a_block_once(tile: Int4Tile):
    assert sorted(tile.token_bits) == list(range(5))
    tokens = [tile.block_token(g, j) for j in range(4) for g in range(8)]
    assert sorted(tokens) == list(range(BLOCK_TOKENS))


@every_int4_tile
def test_row_strides_are_the_layout_of_a_blocks_rows(tile: Int4Tile):
    """A block's rows are an affine function of the bits of (g, j), whatever block it is: the kernel adds strides."""
    for block in range(tile.num_tokens // BLOCK_TOKENS):
        start = tile.token_offset(block * BLOCK_TOKENS)
        for g in range(8):
            for j in range(4):
                bits = [(g | j << 3) >> bit & 1 for bit in range(5)]
                by_strides = start + sum(bit * stride for bit, stride in zip(bits, tile.row_strides(), strict=True))
                assert tile.token_offset(block * BLOCK_TOKENS + tile.block_token(g, j)) == by_strides


# -- INT4: bytes -------------------------------------------------------------------------------------------------------


@every_int4_tile
def test_tokens_do_not_overlap_and_fit(tile: Int4Tile):
    offsets = [tile.token_offset(token) for token in range(tile.num_tokens)]
    assert all(after - before >= tile.token_words for before, after in pairwise(offsets))
    assert offsets[0] == 0 and offsets[-1] + tile.token_words <= tile.num_words


@every_int4_tile
def test_copies_start_and_end_on_what_the_copy_instruction_wants(tile: Int4Tile):
    assert tile.num_tokens % tile.copy_tokens == 0
    assert tile.copy_tokens * tile.token_words % tile.copy_words == 0
    assert tile.copy_pitch_words % tile.copy_words == 0
    if not tile.contiguous:
        assert tile.copy_tokens == 1


@every_int4_tile
def test_a_copy_is_one_run_of_tokens(tile: Int4Tile):
    """Within a copy the tokens touch, as they do in global memory."""
    for token in range(tile.num_tokens):
        copy, place = divmod(token, tile.copy_tokens)
        assert tile.token_offset(token) == copy * tile.copy_pitch_words + place * tile.token_words


@every_int4_tile
def test_vector_loads_of_scales_and_shifts_are_aligned(tile: Int4Tile):
    vector = min(4, tile.header_words)
    for head in range(tile.num_heads):
        for token in range(tile.num_tokens):
            assert (tile.token_offset(token) + head * tile.row_words) % vector == 0


@pytest.mark.parametrize(
    ("tile", "config"),
    shipped_tiles().items(),
    ids=lambda value: name(value) if not isinstance(value, DecodeConfig) else "",
)
def test_a_tile_fits_the_shared_memory_that_its_configuration_counts(tile: Int4Tile | DenseTile, config: DecodeConfig):
    num_bytes = tile.num_bytes if isinstance(tile, DenseTile) else tile.num_words * WORD_BYTES
    assert num_bytes <= config.tile_bytes < num_bytes + 128
    assert config.tile_bytes % 128 == 0 and tile.num_tokens == config.tile_tokens


# -- 16-bit ------------------------------------------------------------------------------------------------------------


@every_dense_tile
@pytest.mark.parametrize("operand", ["k_row", "v_row"])
def test_every_ldmatrix_reads_all_banks(tile: DenseTile, operand: str):
    row_of = getattr(tile, operand)
    for first_token in range(0, tile.num_tokens, MMA_ROWS):
        for first_chunk in range(0, tile.head_dim // MATRIX, 2):
            rows = [row_of(lane) for lane in LANES]
            addresses = [tile.chunk_address(first_token + token, first_chunk + chunk) for token, chunk in rows]
            report = banks.report(addresses, width=16, kind="ldmatrix")
            assert report.wavefronts == report.minimum == 4, report.describe()


@every_dense_tile
def test_every_chunk_has_its_own_place(tile: DenseTile):
    addresses = [
        tile.chunk_address(token, chunk) for token in range(tile.num_tokens) for chunk in range(tile.head_dim // MATRIX)
    ]
    assert sorted(addresses) == list(range(0, tile.head_bytes, CHUNK_BYTES))


@every_dense_tile
def test_the_four_matrices_are_the_registers_of_an_a_operand(tile: DenseTile):
    """Registers of A: rows 0-7 then 8-15 of the first 8 of the contraction, then the same of the last 8.

    K: rows are tokens, the contraction runs along columns. V is read transposed: rows are columns, tokens contract.
    """
    matrices = {row: [getattr(tile, row)(8 * matrix) for matrix in range(4)] for row in ("k_row", "v_row")}
    assert matrices["k_row"] == [(0, 0), (8, 0), (0, 1), (8, 1)]
    assert matrices["v_row"] == [(0, 0), (0, 1), (8, 0), (8, 1)]
    for row in ("k_row", "v_row"):
        for lane in LANES:
            token, chunk = getattr(tile, row)(lane)
            first_token, first_chunk = matrices[row][lane // 8]
            assert (token, chunk) == (first_token + lane % 8, first_chunk)
