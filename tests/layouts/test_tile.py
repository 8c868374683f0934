"""Tiles of the decode kernel: every shipped configuration reads without bank conflicts and misses no element."""

from functools import cache
from itertools import pairwise, product

import pytest

from cute_kernels.attention.compile import shipped_specs
from cute_kernels.attention.decode_config import DecodeConfig, tiles_of
from cute_kernels.attention.tiles import MappedTile
from cute_kernels.formats.kv import HEAD_DIMS
from layouts import banks
from layouts.kv.swizzled_tile import CHUNK_BYTES, LOAD_CHUNKS, MATRIX, SwizzledTile
from layouts.kv.tile import BLOCK_TOKENS, WORD_BYTES, RowTile, plan_tiles
from tests.each import each

LANES = range(32)
MMA_ROWS = 16  # of the A operand of mma.sync.m16n8k16
BULK_BYTES = 16  # size and addresses of cp.async.bulk are multiples of this
ROW_SHAPES = [(4, groups) for groups in (1, 2, 4, 8)] + [(8, groups) for groups in (1, 2, 4, 8)]


def shipped() -> list[DecodeConfig]:
    return [spec.config for spec in shipped_specs() if isinstance(spec.config, DecodeConfig)]


@cache
def shipped_tiles() -> dict[RowTile | SwizzledTile, DecodeConfig]:
    """The different tiles of the shipped configurations, each with one configuration that has it."""
    return {tile: config for config in reversed(shipped()) for tile in tiles_of(config)}


def row_tiles(
    head_dim: int, bits: int, groups: int, heads: int, contiguous: bool = True, words: int = 4
) -> tuple[RowTile, RowTile]:
    """Of K and of V, as alike as they can be."""
    tokens = max(8 // heads, 1) * BLOCK_TOKENS
    keys, values = (RowTile(head_dim, bits, groups, heads, tokens, op, contiguous, words) for op in ("k", "v"))
    return plan_tiles(keys, values)


def unshipped_tiles() -> list[RowTile]:
    """What is compiled on demand: other head dims, odd numbers of heads, copies by words."""
    counts = [(3, True, 4), (2, False, 4), (8, True, 4), (1, True, 1)]
    return [
        tile
        for d in HEAD_DIMS
        for bits, groups in ROW_SHAPES
        for heads, contiguous, words in counts
        if d // groups % 8 == 0
        if contiguous or words == 1 or heads * (4 * groups + d * bits // 8) % BULK_BYTES == 0
        for tile in row_tiles(d, bits, groups, heads, contiguous, words)
    ]


@cache
def row_tiles_of_all() -> list[RowTile]:
    found = [tile for tile in shipped_tiles() if isinstance(tile, RowTile)]
    return list(dict.fromkeys(found + unshipped_tiles()))


def bulk_tiles() -> list[RowTile]:
    return [tile for tile in row_tiles_of_all() if tile.copy_words == 4]


def swizzled_tiles() -> list[SwizzledTile]:
    found = [tile for tile in shipped_tiles() if isinstance(tile, SwizzledTile)]
    found += [SwizzledTile(d, size, 2, 64) for d in HEAD_DIMS for size in (1, 2)]
    return [*found, SwizzledTile(128, 1, 1, 32, (2, 0, 1, 3, 4)), SwizzledTile(64, 1, 1, 32, (1, 2, 0, 3, 4))]


def name(tile: RowTile | SwizzledTile) -> str:
    if isinstance(tile, SwizzledTile):
        bits = "".join(map(str, tile.token_bits))
        return f"d{tile.head_dim}-{8 * tile.element_bytes}bit-t{tile.num_tokens}-{bits}"
    layout = f"{'contiguous' if tile.contiguous else 'strided'}-{'bulk' if tile.copy_words == 4 else 'word'}"
    rows = f"{tile.operand}-d{tile.head_dim}-{tile.code_bits}bit-g{tile.num_groups}"
    return f"{rows}-h{tile.num_heads}-t{tile.num_tokens}-{layout}"


every_row_tile = each("tile", row_tiles_of_all, ids=name)
every_bulk_tile = each("tile", bulk_tiles, ids=name)
every_swizzled_tile = each("tile", swizzled_tiles, ids=name)


def word_report(words: list[int], width: int = WORD_BYTES) -> banks.BankReport:
    return banks.report([word * WORD_BYTES for word in words], width=width)


def test_the_shipped_tiles_cover_every_row_format():
    int4 = {(d, 4, g) for d in (64, 128, 256) for g in (1, 2, 4, 8)}
    assert {
        (tile.head_dim, tile.code_bits, tile.num_groups) for tile in shipped_tiles() if isinstance(tile, RowTile)
    } == int4 | {(128, 8, 1)}
    assert {(tile.head_dim, tile.element_bytes) for tile in shipped_tiles() if isinstance(tile, SwizzledTile)} == {
        (64, 2),
        (128, 2),
        (256, 2),
        (128, 1),
    }


# -- rows: bank conflicts ---------------------------------------------------------------------------------------------


@every_bulk_tile
def test_headers_are_loaded_without_conflict(tile: RowTile):
    vector = tile.header_vector
    for j in range(4):
        for first in range(0, tile.header_words, vector):
            report = word_report([word + first for word in tile.header_reads(j)], width=WORD_BYTES * vector)
            assert report.conflicts == 0, report.describe()
            # 8 rows of 16 bytes are 128 bytes, but an access of 16 bytes a lane serves at most half a warp at a time.
            assert report.wavefronts == (2 if vector == 4 else 1)


@every_row_tile
def test_words_of_codes_are_loaded_in_the_wavefronts_that_the_bank_model_counts(tile: RowTile):
    """Every one without conflict where rows are copied in bulk; the least there can be is a wavefront a load."""
    loads = [tile.k_words(j, unit) for j in range(4) for unit in range(tile.k_units)]
    if tile.operand == "v":
        loads = [tile.v_words(j, odd, unit) for j in range(4) for odd in range(2) for unit in range(tile.v_units)]
    reports = [word_report(words) for words in loads]
    if tile.copy_words == 4:
        assert all(report.wavefronts == 1 for report in reports), reports[0].describe()
    codes = sum(report.wavefronts for report in reports)
    headers = [word + i for word in tile.header_reads(0) for i in range(tile.header_vector)]
    per_bank = [len({word for word in headers if word % 32 == bank}) for bank in range(32)]
    assert tile.wavefronts == codes + 4 * tile.header_words // tile.header_vector * max(per_bank)
    assert tile.fewest_wavefronts == len(loads) + 4 * tile.header_words // tile.header_vector


# -- rows: elements ----------------------------------------------------------------------------------------------------


@every_row_tile
def test_four_lanes_hold_the_words_of_every_unit_of_k(tile: RowTile):
    """Every word of codes is read once per row, by one lane or by as many as share it."""
    words = [unit * tile.k_unit // tile.run_codes + tile.k_word(t) for unit in range(tile.k_units) for t in range(4)]
    shared = 4 * tile.run_codes // tile.k_unit
    assert sorted(words) == sorted(word for word in range(tile.head_dim // tile.run_codes) for _ in range(shared))


@every_row_tile
def test_the_lanes_of_v_hold_every_column_of_the_output_once(tile: RowTile):
    places = [(u, g, code) for u in range(tile.v_units) for g in range(8) for code in range(tile.v_unit // 8)]
    assert [tile.v_column(*place) for place in places] == list(range(tile.head_dim))
    for unit, g, code in places:
        word = unit * tile.v_unit // tile.run_codes + tile.v_word(g)
        assert tile.v_column(unit, g, code) // tile.run_codes == word


@every_row_tile
def test_a_unit_never_straddles_two_groups(tile: RowTile):
    """One header serves all columns of a unit."""
    assert tile.group_width % tile.k_unit == 0 and tile.group_width % tile.v_unit == 0


@every_row_tile
def test_the_row_halves_hold_every_token_of_a_block_once(tile: RowTile):
    assert sorted(tile.token_bits) == list(range(5))
    tokens = [tile.block_token(g, j) for j in range(4) for g in range(8)]
    assert sorted(tokens) == list(range(BLOCK_TOKENS))


@every_row_tile
def test_row_strides_are_the_layout_of_a_blocks_rows(tile: RowTile):
    """A block's rows are an affine function of the bits of (g, j), whatever block it is: the kernel adds strides."""
    for block in range(tile.num_tokens // BLOCK_TOKENS):
        start = tile.token_offset(block * BLOCK_TOKENS)
        for g in range(8):
            for j in range(4):
                bits = [(g | j << 3) >> bit & 1 for bit in range(5)]
                by_strides = start + sum(bit * stride for bit, stride in zip(bits, tile.row_strides(), strict=True))
                assert tile.token_offset(block * BLOCK_TOKENS + tile.block_token(g, j)) == by_strides


# -- rows: bytes -------------------------------------------------------------------------------------------------------


@every_row_tile
def test_tokens_do_not_overlap_and_fit(tile: RowTile):
    offsets = [tile.token_offset(token) for token in range(tile.num_tokens)]
    assert all(after - before >= tile.token_words for before, after in pairwise(offsets))
    assert offsets[0] == 0 and offsets[-1] + tile.token_words <= tile.num_words


@every_row_tile
def test_copies_start_and_end_on_what_the_copy_instruction_wants(tile: RowTile):
    assert tile.num_tokens % tile.copy_tokens == 0
    # A tensor map brings what lies beside the heads' own words, too.
    words = tile.copy_pitch_words if isinstance(tile, MappedTile) else tile.copy_tokens * tile.token_words
    assert words % tile.copy_words == 0
    assert tile.copy_pitch_words % tile.copy_words == 0
    if not tile.contiguous:
        assert tile.copy_tokens == 1


@every_row_tile
def test_a_copy_is_one_run_of_tokens(tile: RowTile):
    """Within a copy the tokens touch, as they do in global memory."""
    for token in range(tile.num_tokens):
        copy, place = divmod(token, tile.copy_tokens)
        assert tile.token_offset(token) == copy * tile.copy_pitch_words + place * tile.token_words


@every_row_tile
def test_vector_loads_of_headers_are_aligned(tile: RowTile):
    for head in range(tile.num_heads):
        for token in range(tile.num_tokens):
            assert (tile.token_offset(token) + head * tile.row_words) % tile.header_vector == 0


@each("config", shipped, ids=lambda config: config.name)
def test_tiles_fit_the_shared_memory_that_their_configuration_counts(config: DecodeConfig):
    for tile, size in zip(tiles_of(config), config.tile_bytes, strict=True):
        assert tile.num_bytes <= size < tile.num_bytes + 128
        assert size % 128 == 0 and tile.num_tokens == config.tile_tokens
        assert tile.token_bits == config.token_bits


# -- bare elements -----------------------------------------------------------------------------------------------------


@every_swizzled_tile
@pytest.mark.parametrize("operand", ["k_row", "v_row"])
def test_every_ldmatrix_reads_all_banks(tile: SwizzledTile, operand: str):
    row_of = getattr(tile, operand)
    rows = [row_of(lane) for lane in LANES]
    total = 0
    for pair in range(2):
        first_token = pair << tile.token_bits[4]
        for first_chunk in range(0, tile.num_chunks, LOAD_CHUNKS):
            addresses = [tile.chunk_address(first_token + token, first_chunk + chunk) for token, chunk in rows]
            report = banks.report(addresses, width=16, kind="ldmatrix")
            assert report.wavefronts == report.minimum == 4, report.describe()
            total += report.wavefronts
    assert total == tile.wavefronts


@every_swizzled_tile
def test_every_chunk_has_its_own_place(tile: SwizzledTile):
    chunks = range(tile.num_panels * tile.row_chunks)
    addresses = [tile.chunk_address(token, chunk) for token in range(tile.num_tokens) for chunk in chunks]
    assert sorted(addresses) == list(range(0, tile.head_bytes, CHUNK_BYTES))
    assert (tile.num_panels - 1) * tile.row_chunks < tile.num_chunks <= tile.num_panels * tile.row_chunks


@every_swizzled_tile
def test_loads_of_a_block_differ_by_constants_and_the_place_in_a_panel(tile: SwizzledTile):
    """`load_offset`: what the kernel adds to a lane's address, which already knows the chunk's place in a panel."""
    panel_loads = tile.row_chunks // LOAD_CHUNKS
    for row_of in (tile.k_row, tile.v_row):
        for lane in LANES:
            token, chunk = row_of(lane)
            for pair in range(2):
                for load in range(-(-tile.num_chunks // LOAD_CHUNKS)):
                    at = tile.chunk_address(token, chunk + LOAD_CHUNKS * (load % panel_loads))
                    other = tile.chunk_address(token + (pair << tile.token_bits[4]), chunk + LOAD_CHUNKS * load)
                    assert other == at + tile.load_offset(pair, load)


@every_swizzled_tile
def test_the_four_matrices_are_the_registers_of_an_a_operand(tile: SwizzledTile):
    """Registers of A: rows 0-7 then 8-15 of the first 8 of the contraction, then the same of the last 8.

    K: rows are tokens, the contraction runs along columns. V is read transposed: rows are columns, tokens contract.
    """
    halves = [[tile_token(tile, g, half) for g in range(MATRIX)] for half in range(2)]
    for lane in LANES:
        matrix, g = divmod(lane, MATRIX)
        assert tile.k_row(lane) == (halves[matrix % 2][g], matrix // 2)
        assert tile.v_row(lane) == (halves[matrix // 2][g], matrix % 2)
    assert sorted(halves[0] + halves[1]) == list(range(MMA_ROWS))


def tile_token(tile: SwizzledTile, g: int, j: int) -> int:
    return sum((g >> bit & 1) << tile.token_bits[bit] for bit in range(3)) + (j << tile.token_bits[3])


# -- pairs of different tiles ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_heads", [1, 8])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_two_operands_of_raw_rows_share_an_order_without_conflicts(head_dim: int, num_heads: int):
    """Whatever their formats, and though each has its own copies: all pairs at 128 columns, elsewhere each format with
    itself and two others, other ones at each number of columns."""
    shapes = [(bits, groups) for bits, groups in ROW_SHAPES if head_dim // groups % 8 == 0]
    tokens, count = 256 // num_heads, len(shapes)
    steps = range(count) if head_dim == 128 else {0, 1 + head_dim // 16 % (count - 1), count // 2}
    for i, step in product(range(count), steps):
        keys = RowTile(head_dim, *shapes[i], num_heads, tokens, "k")
        values = RowTile(head_dim, *shapes[(i + step) % count], num_heads, tokens, "v")
        planned = plan_tiles(keys, values)
        assert planned[0].token_bits == planned[1].token_bits
        assert [tile.wavefronts for tile in planned] == [tile.fewest_wavefronts for tile in planned]


# Beside a swizzled tile, which wants eight tokens in a row, one head of raw rows has conflicts: wavefronts per load of
# (code bits, groups) as K and as V at head_dim 128. Eight heads have none.
CONFLICTS = {
    (4, 1): (2, 2),
    (4, 2): (2, 1),
    (4, 4): (1, 1),
    (4, 8): (1, 1),
    (8, 1): (4, 2),
    (8, 2): (2, 1),
    (8, 4): (1, 1),
    (8, 8): (1, 1),
}


@pytest.mark.parametrize("shape", ROW_SHAPES, ids=str)
@pytest.mark.parametrize("element_bytes", [1, 2])
@pytest.mark.parametrize("num_heads", [1, 8])
def test_raw_rows_beside_bare_elements_cost_what_the_table_says(shape, element_bytes: int, num_heads: int):
    bits, groups = shape
    bare = SwizzledTile(128, element_bytes, num_heads, 256 // num_heads)
    wavefronts = []
    for operand in ("k", "v"):
        rows = RowTile(128, bits, groups, num_heads, 256 // num_heads, operand)
        planned = plan_tiles(rows, bare)[0] if operand == "k" else plan_tiles(bare, rows)[1]
        assert sorted(planned.token_bits[:3]) == [0, 1, 2]
        words = planned.k_words(0, 0) if operand == "k" else planned.v_words(0, 0, 0)
        wavefronts.append(word_report(words).wavefronts)
    assert tuple(wavefronts) == (CONFLICTS[shape] if num_heads == 1 else (1, 1))
