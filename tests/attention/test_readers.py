"""What a warp makes of cache rows: the readers' own code, run in NumPy, against the dequantised rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from functools import cache

import numpy as np
import pytest
import torch

from cute_kernels.attention.candidates import candidate_configs
from cute_kernels.attention.decode_config import DecodeConfig, tiles_of
from cute_kernels.attention.problem import AttentionProblem
from cute_kernels.attention.tiles import cannot_read
from cute_kernels.formats.kv import FORMATS, HEAD_DIMS, format_of
from cute_kernels.runtime import native
from cute_kernels.runtime.composed import changed
from layouts import banks
from layouts.kv.swizzled_tile import SwizzledTile
from layouts.kv.tile import WORD_BYTES, RowTile
from simulator import Backend, Float32, Warp
from tests.attention.cases import Q_DTYPES
from tests.attention.rig import (
    SOFTMAX_SCALE,
    Operand,
    Rig,
    last_block,
    make_rig,
    random_int4_rows,
    random_operand,
    random_probabilities,
)
from tests.each import each

pytestmark = pytest.mark.skipif(native.dsl_version() is None, reason="the readers are written in nvidia-cutlass-dsl")

ROUNDING = 2.0**-20  # relative to the sum of absolute terms: a few roundings to fp32
FP16_ROUNDING = 2.0**-11
KERNEL_FORMATS = [name for name in FORMATS if not name.endswith("_head") or name.endswith("token_head")]
FAMILIES = ["bf16", "int4_g1", "int4_g4", "int8_token_head", "int8_g4", "e4m3_token_head"]
FAMILIES += ["int8_tensor", "int8_channel", "e4m3_tensor", "e5m2"]


@dataclasses.dataclass(frozen=True)
class Case:
    """A kernel configuration and how many query heads of its last KV head exist."""

    config: DecodeConfig
    group: int = 8

    def __str__(self) -> str:
        return f"{self.config.name}-{self.group}"

    def rig(self, run_on: Callable[[Backend], None], seed: int = 0, **options) -> Rig:
        operands = [random_operand(self.config, index, 2 * seed + index, **options) for index in range(2)]
        return make_rig(run_on, self.config, operands, self.group, seed)


def case(
    k_format: str,
    v_format: str | None = None,
    head_dim: int = 128,
    v_head_dim: int | None = None,
    *,
    num_kv_heads: int = 1,
    group: int = 8,
    q_dtype: str = "bf16",
    blocks_per_warp: int = 1,
    aligned: bool = True,
) -> Case:
    formats = (k_format, v_format or k_format)
    q_dtype = next((name for name in formats if name in ("bf16", "fp16")), q_dtype)
    heads = (num_kv_heads * 8, num_kv_heads)
    problem = AttentionProblem(1, 4096, *heads, head_dim, v_head_dim or head_dim, *formats, q_dtype, aligned=aligned)
    config = changed(candidate_configs(problem)[0], blocks_per_warp=blocks_per_warp)
    return Case(config, group)


def alike() -> list[Case]:
    """Cases whose K and V have one format."""
    found = [
        case(name, head_dim=d) for name in KERNEL_FORMATS for d in HEAD_DIMS if not cannot_read(format_of(name), d)
    ]
    found += [case(f"int4_g{g}", head_dim=d, q_dtype="fp16") for g in (1, 2, 4, 8) for d in (64, 128, 256)]
    found += [case(name, head_dim=64, q_dtype="fp16") for name in ("int8_g8", "int8_channel", "e4m3_tensor", "e5m2")]
    found += [
        case(name, head_dim=d, num_kv_heads=h) for name in ("int4_g1", "int8_g4") for d in (64, 96) for h in (3, 32)
    ]
    found += [
        case("int4_g8", num_kv_heads=8),
        case("int8_token_head", num_kv_heads=8),
        case("e4m3_token_head", head_dim=256, num_kv_heads=8),
        case("int4_g1", group=5),
        case("int4_g4", group=1, q_dtype="fp16"),
        case("int4_g2", head_dim=64, num_kv_heads=10, group=3),
        case("bf16", group=3),
        case("e5m2", group=2),
        case("int4_g1", aligned=False),
        case("int4_g8", head_dim=256, num_kv_heads=2, aligned=False),
        case("int8_token_head", aligned=False),
    ]
    return found


def pairs() -> list[Case]:
    """Cases of two formats, or of two widths."""
    found = [case(k, v) for k in FAMILIES for v in FAMILIES if k != v]
    found += [
        case("int8_tensor", "int4_g2", 192, 128),
        case("e4m3_token_head", "e5m2", 192, 128),
        case("fp16", "fp16", 192, 128),
        case("bf16", "int8_channel", 64, 80),
        case("int8_channel", "fp16", 96, 256),
        case("int4_g1", "int8_token_head", 80, 64),
        case("int4_g1", "int8_tensor", num_kv_heads=8),
        case("int8_channel", "int4_g4", num_kv_heads=32),
        case("e5m2", "e4m3_token_head", 64, 64, num_kv_heads=3),
    ]
    return found


def several_blocks() -> list[Case]:
    found = [
        case(name, blocks_per_warp=blocks, group=group)
        for name in ("bf16", "int4_g1", "int4_g8", "int8_token_head", "int8_channel", "e4m3_tensor")
        for blocks, group in ((2, 16), (4, 27))
    ]
    found += [case("int8_g2", "int4_g1", 64, blocks_per_warp=2, group=11)]
    return found + [case(name, blocks_per_warp=2, group=13) for name in ("int4_g4", "int4_g8")]


@cache
def cases() -> list[Case]:
    return [*alike(), *pairs(), *several_blocks()]


def value_cases() -> list[Case]:
    """One case of each reader of V and its tile, whatever K is beside it."""
    found: dict[Hashable, Case] = {}
    for one in cases():
        config = one.config
        own = (config.v, tiles_of(config)[1], config.mainloop, config.q_dtype, config.shares_queries, one.group)
        found.setdefault(own, one)
    return list(found.values())


every_case = each("case", cases)
every_value_case = each("case", value_cases)
every_int4_case = each("case", lambda: [c for c in cases() if c.config.formats[1].codes == "u4"])


def assert_equal_to_fp32_rounding(
    got: np.ndarray, left: np.ndarray, right: np.ndarray, slack: np.ndarray | float = 0.0, rounding: float = ROUNDING
):
    """got == left @ right, up to fp32 roundings of terms as large as |left| @ |right| + slack."""
    allowed = rounding * (np.abs(left) @ np.abs(right)) + ROUNDING * slack
    error = np.abs(got - left @ right)
    assert np.isfinite(got).all()
    assert (error <= allowed).all(), f"off by {np.max(error / allowed):.1f} times what rounding explains"


def summed_apart(operand: Operand) -> np.ndarray:
    """fp64 [32, head_dim]: how large the terms of an element are that are added up apart before they cancel."""
    form = operand.form
    if form.codes == "u4":
        _, scale, shift = form.row(operand.head_dim).unpack(operand.rows)
        return np.repeat((15 * scale + shift.abs()).double().numpy(), operand.head_dim // form.num_groups, axis=1)
    if form.codes == "int8":
        if not form.header_bytes:
            return np.full(operand.values.shape, 128.0 * 1.5)
        scale = form.row(operand.head_dim).unpack(operand.rows)[1].double().numpy()
        return np.repeat(128 * scale, operand.head_dim // form.num_groups, axis=1)
    return np.zeros(operand.values.shape)


@every_case
def test_scores_are_those_of_the_dequantised_rows(case: Case, run_on):
    """Codes as fp16 operands, permuted columns, scales and shifts folded in per group: all of it cancels out."""
    rig = case.rig(run_on, 1, scale_exponents=(-8, 4))
    natural = rig.scores() / (SOFTMAX_SCALE * Warp.LOG2_E)
    apart = summed_apart(random_operand(case.config, 0, 2, (-8, 4)))
    # Scales per column are multiplied with the queries, which then do not fit fp16 exactly.
    rounding = FP16_ROUNDING if case.config.formats[0].given_scale == "channel" else ROUNDING
    slack = apart @ np.abs(rig.queries.T)
    assert_equal_to_fp32_rounding(natural, rig.keys, rig.queries.T, slack, rounding)


@each("case", lambda: [case(name, group=5) for name in FAMILIES if name != "bf16"] + several_blocks()[2:])
def test_an_infinite_query_spoils_its_own_scores_alone(case: Case, run_on):
    """The power of 2 that queries have in common is that of the finite ones."""
    rig = case.rig(run_on, 1)
    want = rig.scores()
    q = torch.from_numpy(rig.queries[: case.group]).to(Q_DTYPES[case.config.q_dtype])
    q[2, 17] = torch.inf
    with np.errstate(invalid="ignore"):
        rig.take_queries(q, case.group)
        found = rig.scores()
    others = np.arange(want.shape[1]) != 2
    assert np.isnan(found[:, 2]).all() and np.array_equal(found[:, others], want[:, others])


@every_case
def test_outputs_are_those_of_the_dequantised_rows(case: Case, run_on):
    rig = case.rig(run_on, 2)
    p = random_probabilities(case.config, 3)
    slack = 20.0 * p.T.sum(axis=1, keepdims=True) if case.config.formats[1].codes == "u4" else 0.0
    assert_equal_to_fp32_rounding(rig.weighted_values(p), p.T, rig.values, slack)


@each("case", lambda: [c for c in cases() if c.config.shares_queries])
def test_shared_queries_are_loaded_once_a_block_without_conflicts(case: Case, run_on):
    """A vector per B register and sum for both tiles of 16 tokens: the compiler would keep what is loaded twice."""
    rig = case.rig(run_on, 5)
    stored = rig.query_accesses()
    rig.scores()
    loaded = rig.query_accesses()[len(stored) :]
    assert {access.kind for access in stored} == {"st"} and {access.kind for access in loaded} == {"ld"}
    assert sorted(a.addresses for a in loaded) == sorted(a.addresses for a in stored)
    assert all(banks.report(a.addresses, a.width, a.kind).conflicts == 0 for a in stored + loaded)
    lanes = {address for access in stored for address in access.addresses}
    assert len(lanes) == 32 * len(stored) and max(lanes) + 16 <= rig.query_start + case.config.query_bytes


@every_case
def test_every_byte_is_loaded_once_in_the_wavefronts_that_the_tiles_were_chosen_for(case: Case, run_on):
    """Whatever the number of query heads: fragments are decoded once and meet all blocks of queries.

    Wavefronts are of the addresses that the readers really compute, not of those that the tiles say they should.
    """
    rig = case.rig(run_on, 6)
    rig.scores()
    rig.weighted_values(random_probabilities(case.config, 7))
    tiles = tiles_of(case.config)
    bulk_rows = "word" not in case.config.copies and all(isinstance(tile, RowTile) for tile in tiles)
    for index, tile in enumerate(tiles):
        start = index * case.config.tile_bytes[0]
        accesses = rig.accesses_of(index)
        reports = [banks.report(a.addresses, a.width, a.kind) for a in accesses]
        if isinstance(tile, SwizzledTile):
            assert sum(report.wavefronts for report in reports) == tile.wavefronts
        elif bulk_rows:
            assert tile.wavefronts == tile.fewest_wavefronts
        if isinstance(tile, SwizzledTile) or bulk_rows:
            assert all(report.conflicts == 0 for report in reports)
        if isinstance(tile, SwizzledTile):
            loaded = [place for access in accesses for place in access.addresses]
            chunks = range(tile.num_chunks)
            first = (tile.num_heads - 1) * tile.head_bytes + start
            want = {first + tile.chunk_address(token, c) for token in last_block(case.config) for c in chunks}
            # An odd chunk at the end of a row is loaded with its empty neighbour.
            assert len(set(loaded)) == len(loaded) and want <= set(loaded)
            assert len(loaded) == len(want) * (tile.num_chunks + tile.num_chunks % 2) // tile.num_chunks
            continue
        first = (tile.num_heads - 1) * tile.row_words + tile.header_words
        words = range(tile.row_words - tile.header_words)
        tokens = last_block(case.config)
        want = {start + WORD_BYTES * (first + tile.token_offset(token) + w) for token in tokens for w in words}
        loads = [frozenset(access.addresses) for access in accesses if access.width == WORD_BYTES]
        code_loads = [load for load in loads if load <= want]
        assert sum(map(len, code_loads)) == len(want) and frozenset().union(*code_loads) == want


@every_case
def test_rows_past_the_end_are_masked_by_row_and_cleared_to_zero(case: Case, run_on):
    """Garbage in one row of K touches that row's scores only; a row of V that is all zeros adds nothing."""
    config, left = case.config, 17
    operands = [random_operand(config, index, 8 + index) for index in range(2)]
    operands[0].rows.view(torch.uint8)[left:] = 0xFF  # NaN in scales, shifts and 16-bit elements
    operands[1].rows.view(torch.uint8)[left:] = 0
    rig = make_rig(run_on, config, operands, case.group)
    assert np.isfinite(rig.scores()[:left]).all()
    p = random_probabilities(config, 9)
    p[left:] = 0
    slack = 20.0 * p.T.sum(axis=1, keepdims=True) + 1e-30
    assert_equal_to_fp32_rounding(rig.weighted_values(p), p.T[:, :left], rig.values[:left], slack)


@every_value_case
def test_the_log_scale_bounds_what_goes_through_the_mma(case: Case, run_on):
    operands = [random_operand(case.config, index, 10 + index, (-8, 4)) for index in range(2)]
    rig = make_rig(run_on, case.config, operands, case.group)
    form, headers = operands[1].form, rig.headers()
    if not form.has_header:
        assert headers is None and rig.value_reader.log_scale(headers, 0) is None
        return
    scales = form.row(operands[1].head_dim).unpack(operands[1].rows)[1]
    largest = scales.double().amax(dim=1).log2().numpy()
    for j in range(4):
        np.testing.assert_allclose(rig.value_reader.log_scale(headers, j), largest[rig.token(j)], rtol=1e-6)


@pytest.mark.parametrize("kv_format", ["int4_g2", "int8_token_head", "int8_g8", "e4m3_token_head"])
def test_rows_whose_scales_are_zero_have_a_finite_log_scale(kv_format, run_on):
    chosen = case(kv_format)
    operands = [random_operand(chosen.config, index, index) for index in range(2)]
    operands[1].rows[:] = 0
    rig = make_rig(run_on, chosen.config, operands)
    assert np.isfinite(rig.value_reader.log_scale(rig.headers(), 0)).all()
    assert not rig.weighted_values(random_probabilities(chosen.config, 1)).any()


@pytest.mark.parametrize("kv_format", ["int4_g4", "int8_tensor", "int8_channel", "int8_g8", "e4m3_token_head", "e5m2"])
@pytest.mark.parametrize("magnitude", [0.0, 1e-30, 1e-5, 1.0, 3e4])
def test_queries_of_any_magnitude_keep_their_bits(kv_format, magnitude, run_on):
    """Queries are brought into fp16's range by a power of two: scores of 1e-30 are as good as those of 1."""
    chosen = case(kv_format)
    rig = chosen.rig(run_on, 11)
    rig.take_queries((torch.from_numpy(rig.queries) * magnitude).bfloat16(), chosen.group)
    natural = rig.scores() / (SOFTMAX_SCALE * Warp.LOG2_E)
    slack = 200.0 * np.abs(rig.queries).sum(axis=1) + 1e-45
    rounding = FP16_ROUNDING if kv_format == "int8_channel" else ROUNDING
    assert_equal_to_fp32_rounding(natural, rig.keys, rig.queries.T, slack, rounding)


@pytest.mark.parametrize("kv_format", ["int8_tensor", "e4m3_tensor"])
def test_a_head_of_zeros_whose_given_scale_is_zero_has_scores_of_zero(kv_format, run_on):
    """Masked scores are -inf before they are scaled: the score scale must not be 0."""
    config = case(kv_format).config
    operands = [random_operand(config, index, index) for index in range(2)]
    operands[0].rows[:], operands[0].scale = 0, torch.zeros(())
    rig = make_rig(run_on, config, operands)
    assert (rig.key_state.score_scale > 0).all() and np.abs(rig.scores()).max() < 1e-30


# -- accumulators ------------------------------------------------------------------------------------------------------


@every_value_case
def test_blocks_add_up_and_rescaling_scales_all_of_it(case: Case, run_on):
    rig = case.rig(run_on, 1)
    p = random_probabilities(case.config, 2, bits=4)
    once = rig.weighted_values(p)
    factors = [0.5**i for i in range(1, case.config.columns + 1)]
    rig.value_reader.rescale(rig.value_state, [Float32(factor) for factor in factors])
    columns = np.arange(case.config.warp_queries)
    head_factors = np.array(factors)[columns // 8 * 2 + columns % 2][:, None]
    size = np.abs(once).max()
    np.testing.assert_allclose(rig.outputs(), once * head_factors, rtol=1e-6, atol=1e-6 * size)
    np.testing.assert_allclose(rig.weighted_values(p), once * (1 + head_factors), rtol=1e-5, atol=1e-5 * size)


@every_int4_case
@pytest.mark.parametrize("outlier", [0, 10], ids=["rows alike", "one large row"])
def test_int4_recentring_moves_sums_without_losing_any(case: Case, outlier: int, run_on):
    """What is taken off the accumulators is kept elsewhere, exactly enough even where one row's scale says too much.

    With an outlier, the block's first row has a scale 2**20 times that of the others and a probability as much smaller:
    all tokens contribute alike, as they do when the likeliest token's row of V is small.
    """
    operands = [random_operand(case.config, index, index, (-outlier, 1 - outlier)) for index in range(2)]
    form, d = operands[1].form, operands[1].head_dim
    assert form.codes == "u4"
    p = random_probabilities(case.config, 2) * 2.0**outlier
    if outlier:
        large = random_int4_rows(form, d, (outlier, outlier + 1), torch.Generator().manual_seed(3))
        operands[1].rows[0] = large[0]
        p[0] *= 4.0**-outlier
    rig = make_rig(run_on, case.config, operands, case.group)
    once = rig.weighted_values(p)
    rig.value_reader.recentre(rig.value_state)
    _, scale, shift = form.row(d).unpack(operands[1].rows)
    largest = np.repeat((15 * scale + shift.abs()).double().numpy(), d // form.num_groups, axis=1)
    error = np.abs(rig.outputs() - once) / (p.T @ largest)
    assert error.max() <= ROUNDING, f"off by {error.max():.1e} of the terms"
