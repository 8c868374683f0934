"""What a warp makes of raw cache rows: the readers' own code, run in NumPy, against the dequantised rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from cute_kernels.attention.config import HEADS_PER_WARP, DecodeConfig
from cute_kernels.attention.schedule import Problem, candidate_configs
from cute_kernels.attention.tiles import dense_tile, int4_tile
from cute_kernels.kv_formats import DenseFormat, Int4Format
from cute_kernels.runtime import native
from layouts import banks
from layouts.kv.tile import BLOCK_TOKENS, WORD_BYTES
from tests.attention import warp
from tests.attention.warp import COLUMN, Float32, Int32, Int64, Warp

pytestmark = pytest.mark.skipif(native.dsl_version() is None, reason="the readers are written in nvidia-cutlass-dsl")

SOFTMAX_SCALE = 0.11
ROUNDING = 2.0**-20  # relative to the sum of absolute terms: a few roundings to fp32
TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Case:
    """A kernel configuration and how many query heads of its last KV head exist."""

    config: DecodeConfig
    group: int

    def __str__(self) -> str:
        return f"{self.config.name}-{self.group}"


def case(kv_format: str, head_dim: int, num_kv_heads: int = 1, group: int = 8, q_dtype: str = "bf16", **extra) -> Case:
    problem = Problem(1, 4096, num_kv_heads * group, num_kv_heads, head_dim, kv_format, q_dtype, **extra)
    return Case(candidate_configs(problem)[0], group)


INT4_CASES = [
    *(case(f"int4_g{g}", d, q_dtype=q) for g in (1, 2, 4, 8) for d in (64, 128, 256) for q in ("bf16", "fp16")),
    *(case(f"int4_g{g}", d, num_kv_heads=heads) for g in (1, 8) for d in (64, 128) for heads in (3, 8, 32)),
    case("int4_g1", 128, group=5),
    case("int4_g4", 128, group=1, q_dtype="fp16"),
    case("int4_g2", 64, num_kv_heads=10, group=3),
    case("int4_g1", 128, aligned=False),
    case("int4_g8", 256, num_kv_heads=2, aligned=False),
]
DENSE_CASES = [case(f, d, q_dtype=f, group=g) for f in ("bf16", "fp16") for d in (64, 128, 256) for g in (8, 3)]

every_int4_case = pytest.mark.parametrize("case", INT4_CASES, ids=str)
every_dense_case = pytest.mark.parametrize("case", DENSE_CASES, ids=str)


@dataclass
class Rig:
    """A reader with its warp, and what lies in the block that it looks at.

    The block is the last one of the last slice of the tile's last head: everything before it must be stepped over.
    """

    reader: Any
    state: Any
    warp: Warp
    block_offset: int
    keys: np.ndarray  # fp64 [32, head_dim]
    values: np.ndarray
    queries: np.ndarray  # fp64 [8, head_dim]; heads past the group repeat the last one

    @property
    def tile_bytes(self) -> int:
        return self.reader.config.tile_bytes

    def token(self, j: int) -> np.ndarray:
        """Token of each lane in row half j."""
        return np.asarray(self.reader.token(self.state, j))

    def scores(self) -> np.ndarray:
        """Scores in powers of two [32 tokens, 8 heads], as the kernel takes them from the reader."""
        result = np.full((BLOCK_TOKENS, HEADS_PER_WARP), np.nan)
        for j, columns in enumerate(self.reader.scores(self.state, Int32(0), self.block_offset)):
            for column in range(2):
                result[self.token(j), 2 * COLUMN + column] = columns[column] * self.state.score_scale
        return result

    def weighted_values(self, probabilities: np.ndarray, remaining: int = BLOCK_TOKENS) -> np.ndarray:
        """P V [8 heads, head_dim] for probabilities [32 tokens, 8 heads], tokens from ``remaining`` on masked."""
        address = Int32(self.tile_bytes)
        headers = self.reader.load_value_scales(self.state, address, self.block_offset)
        if remaining < BLOCK_TOKENS:
            self.reader.mask_values(self.state, address, self.block_offset, headers, Int32(remaining))
        held = [[Float32(probabilities[self.token(j), 2 * COLUMN + column]) for column in range(2)] for j in range(4)]
        self.reader.accumulate(self.state, address, self.block_offset, held, headers)
        return self.outputs()

    def outputs(self) -> np.ndarray:
        result = np.full((HEADS_PER_WARP, self.reader.config.head_dim), np.nan)
        for column, first, run in self.reader.outputs(self.state):
            for i, value in enumerate(run):
                result[2 * COLUMN + column, np.asarray(first) + i] = value
        return result


def make_rig(monkeypatch: pytest.MonkeyPatch, case: Case, keys: torch.Tensor, values: torch.Tensor, seed=0) -> Rig:
    """A warp in front of a tile whose last head's last block holds the given cache rows [32, row]."""
    from cute_kernels.attention import reader_dense, reader_int4

    config = case.config
    dense = isinstance(config.format, DenseFormat)
    rng = np.random.default_rng(seed)
    shared = rng.integers(0, 256, 2 * config.tile_bytes, dtype=np.uint8)  # the rest of the tile: anything
    write = write_dense_block if dense else write_int4_block
    for operand, rows in enumerate((keys, values)):
        write(shared[operand * config.tile_bytes :], config, rows)
    torch.manual_seed(seed)
    q = torch.randn(case.group, config.head_dim).to(TORCH_DTYPES[config.q_dtype])
    emulated = Warp(shared, q.view(torch.uint8).numpy().reshape(-1).copy())
    emulated.install(monkeypatch, reader_dense if dense else reader_int4)
    # Typed for the GPU's scalars, which the warp's stand for.
    reader: Any = reader_dense.DenseReader(config) if dense else reader_int4.Int4Reader(config)
    state = reader.make_state(Int32(warp.LANES), Int32(config.num_heads - 1), Int32(config.num_slices - 1))
    words = reader.fetch_query(Int64(0), Int32(0), Int32(0), case.group, state.lane)
    reader.take_query(state, words, Float32(SOFTMAX_SCALE))
    form = config.format
    return Rig(
        reader=reader,
        state=state,
        warp=emulated,
        block_offset=reader.block_offset(config.blocks_per_slice - 1),
        keys=form.dequantize(keys, config.head_dim, torch.float64).numpy(),
        values=form.dequantize(values, config.head_dim, torch.float64).numpy(),
        queries=q.double().numpy()[np.minimum(np.arange(HEADS_PER_WARP), case.group - 1)],
    )


def last_block(config: DecodeConfig) -> range:
    return range(config.tile_tokens - BLOCK_TOKENS, config.tile_tokens)


def write_int4_block(memory: np.ndarray, config: DecodeConfig, rows: torch.Tensor) -> None:
    tile = int4_tile(config)
    for token, row in zip(last_block(config), rows.numpy(), strict=True):
        first = WORD_BYTES * (tile.token_offset(token) + (config.num_heads - 1) * tile.row_words)
        memory[first : first + row.size] = row


def write_dense_block(memory: np.ndarray, config: DecodeConfig, rows: torch.Tensor) -> None:
    tile = dense_tile(config)
    start = (config.num_heads - 1) * tile.head_bytes
    for token, row in zip(last_block(config), rows.view(torch.uint8).numpy(), strict=True):
        for chunk, piece in enumerate(row.reshape(-1, 16)):
            first = start + tile.chunk_address(token, chunk)
            memory[first : first + 16] = piece


def random_int4_rows(config: DecodeConfig, scale_exponents: tuple[int, int], seed: int) -> torch.Tensor:
    """Rows of any codes, scales m * 2**e (m in 1..15 unless the range is one exponent wide), shifts in (-3, 3)."""
    assert isinstance(config.format, Int4Format)
    generator = torch.Generator().manual_seed(seed)
    shape = (BLOCK_TOKENS, config.format.num_groups)
    codes = torch.randint(0, 16, (BLOCK_TOKENS, config.head_dim), generator=generator, dtype=torch.uint8)
    exponents = torch.randint(*scale_exponents, shape, generator=generator).float()
    shifts = (6 * torch.rand(shape, generator=generator) - 3).half()
    return config.format.row(config.head_dim).pack(codes, exponents.exp2().half(), shifts)


def random_rows(config: DecodeConfig, seed: int) -> torch.Tensor:
    if isinstance(config.format, Int4Format):
        return random_int4_rows(config, (-8, 4), seed)
    torch.manual_seed(seed)
    return torch.randn(BLOCK_TOKENS, config.head_dim).to(config.format.cache_dtype)


def random_probabilities(seed: int, bits: int = 6) -> np.ndarray:
    """Multiples of 2**-bits in (0, 1]: exact in bf16 and, times a power-of-two scale, in fp16."""
    return np.random.default_rng(seed).integers(1, 2**bits + 1, (BLOCK_TOKENS, HEADS_PER_WARP)) / 2**bits


def assert_equal_to_fp32_rounding(
    got: np.ndarray, left: np.ndarray, right: np.ndarray, slack: np.ndarray | float = 0.0
):
    """got == left @ right, up to fp32 roundings of terms as large as |left| @ |right| + slack."""
    allowed = ROUNDING * (np.abs(left) @ np.abs(right) + slack)
    error = np.abs(got - left @ right)
    assert np.isfinite(got).all()
    assert (error <= allowed).all(), f"off by {np.max(error / allowed):.1f} times what rounding explains"


# -- INT4 --------------------------------------------------------------------------------------------------------------


@every_int4_case
def test_int4_scores_are_those_of_the_dequantised_rows(case: Case, monkeypatch):
    """Nibbles as fp16 subnormals, permuted columns, scale and shift folded in per group: all of it cancels out."""
    rows = random_rows(case.config, 1)
    rig = make_rig(monkeypatch, case, rows, rows)
    natural = rig.scores() / (SOFTMAX_SCALE * warp.Warp.LOG2_E)
    # Codes and shift are summed apart before they cancel.
    form = case.config.format
    assert isinstance(form, Int4Format)
    magnitude = form.row(case.config.head_dim).unpack(rows)
    apart = np.repeat((15 * magnitude[1] + magnitude[2].abs()).double().numpy(), rig.reader.tile.group_width, axis=1)
    assert_equal_to_fp32_rounding(natural, rig.keys, rig.queries.T, slack=apart @ np.abs(rig.queries.T))


@every_int4_case
def test_int4_outputs_are_those_of_the_dequantised_rows(case: Case, monkeypatch):
    rows = random_int4_rows(case.config, (-6, 1), 2)
    rig = make_rig(monkeypatch, case, rows, rows)
    p = random_probabilities(3)
    assert_equal_to_fp32_rounding(rig.weighted_values(p), p.T, rig.values, slack=20.0 * p.T.sum(axis=1, keepdims=True))


@every_int4_case
def test_int4_loads_have_no_bank_conflicts(case: Case, monkeypatch):
    """The addresses that the reader really computes, not those that the tile says it should."""
    rows = random_rows(case.config, 4)
    rig = make_rig(monkeypatch, case, rows, rows)
    rig.scores()
    rig.weighted_values(random_probabilities(5))
    config = case.config
    words = {access.width for access in rig.warp.accesses}
    assert words == {4, 4 * rig.reader.header_vector} and len(rig.warp.accesses) > config.head_dim // 8
    for access in rig.warp.accesses:
        report = banks.report(access.addresses, access.width, access.kind)
        if config.copy == "bulk":
            assert report.conflicts == 0, report.describe()


@every_int4_case
def test_int4_loads_each_word_of_the_block_once_per_operand(case: Case, monkeypatch):
    """K and V bytes are read from shared memory once: 32-bit loads cover each code word of the block exactly once."""
    rows = random_rows(case.config, 6)
    rig = make_rig(monkeypatch, case, rows, rows)
    rig.scores()
    rig.weighted_values(random_probabilities(7))
    tile = rig.reader.tile
    start = (case.config.num_heads - 1) * tile.row_words
    want = {
        WORD_BYTES * (start + tile.token_offset(token) + tile.header_words + word) + operand * rig.tile_bytes
        for operand in range(2)
        for token in last_block(case.config)
        for word in range(tile.head_dim // 8)
    }
    loads = [frozenset(access.addresses) for access in rig.warp.accesses if access.width == 4]
    code_loads = [load for load in loads if load <= want]
    assert sum(map(len, code_loads)) == len(want) and frozenset().union(*code_loads) == want


@every_int4_case
@pytest.mark.parametrize("remaining", [0, 1, 17, 31])
def test_int4_rows_past_the_end_contribute_nothing_even_as_garbage(case: Case, remaining, monkeypatch):
    rows = random_int4_rows(case.config, (-6, 1), 8)
    rows[remaining:] = 0xFF  # scale and shift are NaN
    rig = make_rig(monkeypatch, case, rows, rows)
    assert np.isfinite(rig.scores()[:remaining]).all()
    p = random_probabilities(9)
    p[remaining:] = 0
    got = rig.weighted_values(p, remaining)
    slack = 20.0 * p.T.sum(axis=1, keepdims=True) + 1e-30
    assert_equal_to_fp32_rounding(got, p.T[:, :remaining], rig.values[:remaining], slack=slack)


@every_int4_case
def test_int4_log_scale_bounds_what_goes_through_the_mma(case: Case, monkeypatch):
    rows = random_rows(case.config, 10)
    rig = make_rig(monkeypatch, case, rows, rows)
    form = case.config.format
    assert isinstance(form, Int4Format)
    largest = form.row(case.config.head_dim).unpack(rows)[1].amax(dim=1).double().log2().numpy()
    headers = rig.reader.load_value_scales(rig.state, Int32(rig.tile_bytes), rig.block_offset)
    for j in range(4):
        np.testing.assert_allclose(rig.reader.log_scale(headers, j), largest[rig.token(j)], rtol=1e-6)


@pytest.mark.parametrize("magnitude", [0.0, 1e-30, 1e-5, 1.0, 3e4])
def test_int4_queries_of_any_magnitude_keep_their_bits(magnitude, monkeypatch):
    """Queries are brought into fp16's range by a power of two: scores of 1e-30 are as good as those of 1."""
    chosen = case("int4_g4", 128)
    rows = random_rows(chosen.config, 11)
    rig = make_rig(monkeypatch, chosen, rows, rows)
    q = (torch.from_numpy(rig.queries) * magnitude).bfloat16()
    rig.warp.global_memory[:] = q.view(torch.uint8).numpy().reshape(-1)
    words = rig.reader.fetch_query(Int64(0), Int32(0), Int32(0), chosen.group, rig.state.lane)
    rig.reader.take_query(rig.state, words, Float32(SOFTMAX_SCALE))
    rig.queries = q.double().numpy()
    natural = rig.scores() / (SOFTMAX_SCALE * warp.Warp.LOG2_E)
    slack = 130.0 * np.abs(rig.queries).sum(axis=1) + 1e-45
    assert_equal_to_fp32_rounding(natural, rig.keys, rig.queries.T, slack=slack)


# -- 16-bit ------------------------------------------------------------------------------------------------------------


@every_dense_case
def test_16_bit_scores_and_outputs_are_those_of_the_rows(case: Case, monkeypatch):
    keys, values = random_rows(case.config, 1), random_rows(case.config, 2)
    rig = make_rig(monkeypatch, case, keys, values)
    assert_equal_to_fp32_rounding(rig.scores() / (SOFTMAX_SCALE * warp.Warp.LOG2_E), rig.keys, rig.queries.T)
    p = random_probabilities(3)
    assert_equal_to_fp32_rounding(rig.weighted_values(p), p.T, rig.values)


@every_dense_case
def test_16_bit_loads_have_no_bank_conflicts(case: Case, monkeypatch):
    keys = random_rows(case.config, 1)
    rig = make_rig(monkeypatch, case, keys, keys)
    rig.scores()
    rig.weighted_values(random_probabilities(5))
    # Per operand: 32 tokens x head_dim x 2 bytes in matrices of 512 bytes, each read once.
    assert len(rig.warp.accesses) == 2 * BLOCK_TOKENS * 2 * case.config.head_dim // 512
    for access in rig.warp.accesses:
        report = banks.report(access.addresses, access.width, access.kind)
        assert report.wavefronts == report.minimum == 4, report.describe()


# -- accumulators ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [INT4_CASES[0], INT4_CASES[-1], DENSE_CASES[2]], ids=str)
def test_blocks_add_up_and_rescaling_scales_all_of_it(case: Case, monkeypatch):
    rows = random_rows(case.config, 1)
    rig = make_rig(monkeypatch, case, rows, rows)
    p = random_probabilities(2, bits=4)
    once = rig.weighted_values(p)
    rig.reader.rescale(rig.state, [Float32(0.5), Float32(0.25)])
    head_factors = np.tile([0.5, 0.25], 4)[:, None]
    np.testing.assert_allclose(rig.outputs(), once * head_factors, rtol=1e-6)
    np.testing.assert_allclose(rig.weighted_values(p), once * (1 + head_factors), rtol=1e-5, atol=1e-5)


@every_int4_case
@pytest.mark.parametrize("outlier", [0, 10], ids=["rows alike", "one large row"])
def test_int4_recentring_moves_sums_without_losing_any(case: Case, outlier: int, monkeypatch):
    """What is taken off the accumulators is kept elsewhere, exactly enough even where one row's scale says too much.

    With an outlier, the block's first row has a scale 2**20 times that of the others and a probability as much smaller:
    all tokens contribute alike, as they do when the likeliest token's row of V is small.
    """
    rows = random_int4_rows(case.config, (-outlier, 1 - outlier), 1)
    p = random_probabilities(2) * 2.0**outlier
    if outlier:
        first = random_int4_rows(case.config, (outlier, outlier + 1), 3)[0]
        rows[0] = first
        p[0] *= 4.0**-outlier
    rig = make_rig(monkeypatch, case, rows, rows)
    once = rig.weighted_values(p)
    rig.reader.recentre(rig.state)
    form = case.config.format
    assert isinstance(form, Int4Format)
    _, scale, shift = form.row(case.config.head_dim).unpack(rows)
    largest = np.repeat((15 * scale + shift.abs()).double().numpy(), rig.reader.tile.group_width, axis=1)
    error = np.abs(rig.outputs() - once) / (p.T @ largest)
    assert error.max() <= ROUNDING, f"off by {error.max():.1e} of the terms"
