"""What FP8 products are made of, run by the simulator: queries in E4M3, probabilities where their values are, and the
range that E4M3 leaves them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from cute_kernels.attention.problem import AttentionProblem
from cute_kernels.device.softmax import LOWEST, OnlineSoftmax

pytest.importorskip("cutlass")

from cute_kernels.attention.compile import CAUSAL_PAGES
from cute_kernels.attention.extend_policies import WARPGROUP_ROWS
from cute_kernels.attention.extend_schedule import choose, choose_fp8
from cute_kernels.attention.mainloops import fp8
from cute_kernels.attention.mainloops import tile_queries as queries
from cute_kernels.attention.mainloops.tile_queries import WARP_ROWS, QueryLoader
from cute_kernels.attention.mainloops.tile_softmax import Rows, Softmax
from cute_kernels.device import wgmma_tiles
from cute_kernels.device.wgmma_tiles import sum_place
from simulator import LANES, Float32, Int32, Meanings, Uint32, Warp, running, stand_in

WARPS = 4


def config_of(q_dtype: str):
    _, config = choose_fp8(
        choose(AttentionProblem.ragged(128, "e4m3_tensor", "e4m3_tensor", q_dtype, 64, CAUSAL_PAGES))
    )
    assert config.can_implement() is None
    return config


class Machine(Warp):
    """A warp that rounds to E4M3."""

    def meanings(self) -> Meanings:
        own = {
            "tell_of_piece": lambda loader, *given: self.tell_of_piece(loader, *given),
        }
        return replace(super().meanings(), modules={queries: {"pack_e4m3x4": self.pack_e4m3x4}, QueryLoader: own})

    def tell_of_piece(self, loader: QueryLoader, power: Any, scales: Any, warp: Any, lane: Any, step: Any) -> None:
        """By all lanes of a row, who know the same."""
        row = warp * WARP_ROWS + step * loader.step_rows + lane // loader.row_lanes
        self.store_shared(scales + row * 4, 0, [power])

    def pack_e4m3x4(self, values: list[Any]) -> Any:
        codes = torch.from_numpy(np.stack([np.broadcast_to(value, (32,)) for value in values], 1).astype(np.float32))
        return Uint32(codes.to(torch.float8_e4m3fn).view(torch.uint8).numpy().view(np.uint32)[:, 0])


def converted(config: Any, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(operands that queries [64, columns] become as fp64, their rows' powers [64, 1])."""
    codes = config.query_bytes
    scales = codes + config.query_code_bytes
    machine = Machine(np.zeros(scales + 4 * WARPGROUP_ROWS, np.uint8), np.zeros(16, np.uint8))
    row, piece = np.arange(WARPGROUP_ROWS)[:, None, None], np.arange(config.columns // 8)[None, :, None]
    places = piece // 8 * queries.SLAB_BYTES + row * 128 + (piece % 8 ^ row % 8) * 16 + np.arange(16)
    machine.shared_memory[places] = q.view(torch.uint8).numpy().reshape(WARPGROUP_ROWS, -1, 16)
    with running(machine):
        loader = QueryLoader(config)
        for warp in range(WARPS):
            loader.convert(None, None, Int32(0), Int32(codes), Int32(scales), Int32(warp), Int32(LANES))
    powers = torch.from_numpy(machine.shared_memory[scales:].view(np.float32).astype(np.float64))[:, None]
    if not config.fp8:
        halves_of_rows = machine.shared_memory[places].reshape(WARPGROUP_ROWS, -1)
        return torch.from_numpy(halves_of_rows).view(torch.float16).double(), powers
    column = np.arange(128)[None]
    row = row[:, 0]
    tile = machine.shared_memory[codes + row * 128 + (column // 16 ^ row % 8) * 16 + column % 16]
    return torch.from_numpy(tile).view(torch.float8_e4m3fn).double(), powers


INTO_HALVES, WIDE = (
    choose(AttentionProblem.ragged(head_dim, "int8_token_head", "int8_token_head", "bf16", 64, CAUSAL_PAGES))
    for head_dim in (128, 512)
)


@pytest.mark.parametrize("config", [INTO_HALVES, WIDE], ids=["128 columns", "512 columns"])
@pytest.mark.parametrize("least, greatest", [(-90, 25), (-90, 120), (29, 120)])
def test_queries_in_bf16_become_fp16_of_the_same_numbers(least, greatest, config):
    """Whether or not some row of a warp is beyond what one power of 2 in bf16 brings into fp16."""
    exponents = torch.randint(least, greatest, (WARPGROUP_ROWS, 1)).float()
    shape = WARPGROUP_ROWS, config.columns
    q = torch.rand(shape).add_(1e-2).mul_(exponents.exp2()).mul_(torch.randn(shape).sign()).bfloat16()
    q[5:7] = 0
    q[6, :2] = torch.tensor([1.0, 2.0**-28])
    found, powers = converted(config, q)
    top = found.abs().amax(1)
    assert (top[:5] >= 2**14).all() and (top < 2**15).all() and (powers > 0).all()
    assert torch.equal(found * powers, q.double())


def test_tiny_queries_become_fp16():
    q = torch.full((WARPGROUP_ROWS, 128), 2.0**-127).bfloat16()
    found, powers = converted(INTO_HALVES, q)
    assert torch.equal(found * powers, q.double())


@pytest.mark.parametrize("other", [torch.inf, -torch.inf, torch.nan])
def test_a_query_in_fp16_with_what_is_no_number_is_none(other):
    q = torch.randn(WARPGROUP_ROWS, 128).bfloat16()
    want = converted(INTO_HALVES, q)
    rows = torch.zeros(WARPGROUP_ROWS, dtype=torch.bool)
    q[3, 7], q[20, 0], rows[[3, 20]] = other, other, True
    found = converted(INTO_HALVES, q)
    assert (found[0] @ torch.randn(128, 3).double())[rows].isnan().all(), "its scores, whatever the keys are"
    assert all(torch.equal(one[~rows], other[~rows]) for one, other in zip(found, want, strict=True))


@pytest.mark.parametrize("q_dtype", ["bf16", "fp16"])
def test_queries_become_codes_and_a_power_of_2_for_each_row(q_dtype):
    config, dtype = config_of(q_dtype), {"bf16": torch.bfloat16, "fp16": torch.float16}[q_dtype]
    q = torch.randn(WARPGROUP_ROWS, 128).mul_(torch.randint(-9, 9, (WARPGROUP_ROWS, 1)).float().exp2()).to(dtype)
    q[5] = 0
    found, powers = converted(config, q)
    assert (powers == powers.log2().round().exp2()).all(), "powers of 2"
    greatest = found.abs().amax(1)
    assert (greatest[:5] >= 128).all() and not found[5].any() and (greatest <= 256).all(), (
        "which bring a row to the top of E4M3"
    )
    assert torch.equal(found, (q.double() / powers).to(torch.float8_e4m3fn).double())


@pytest.mark.parametrize("q_dtype", ["bf16", "fp16"])
def test_a_query_with_an_infinite_number_is_none_and_the_others_are_what_they_were(q_dtype):
    """E4M3 has no infinity; what is rounded to it saturates."""
    config, dtype = config_of(q_dtype), {"bf16": torch.bfloat16, "fp16": torch.float16}[q_dtype]
    q = torch.randn(WARPGROUP_ROWS, 128).to(dtype)
    want = converted(config, q)
    q[3, 7], q[20, 0] = torch.inf, -torch.inf
    found = converted(config, q)
    infinite = q.isinf().any(1)
    assert found[0][infinite].isnan().all()
    assert all(torch.equal(one[~infinite], other[~infinite]) for one, other in zip(found, want, strict=True))


def test_a_probability_meets_the_value_of_its_key():
    """The PTX manual: register r of 4 of lane (g, t) is row g + 8 (r % 2), columns 16 (r / 2) + 4t to 4t + 3 of A."""
    tokens = config_of("bf16").tile_tokens
    for t in range(4):
        for word in range(tokens // 8):
            step, register = divmod(word, 4)
            for byte, accumulator in enumerate(fp8.accumulators_of(word)):
                row, key = sum_place(accumulator)
                assert row == 8 * (register % 2)
                column = 32 * step + 16 * (register // 2) + 4 * t + byte
                assert key + 2 * t == column // 16 * 16 + fp8.KEYS_IN_ORDER[column % 16]
    used = sorted(i for word in range(tokens // 8) for i in fp8.accumulators_of(word))
    assert used == list(range(tokens // 2)), "each probability once"


def test_the_greatest_probability_is_two_to_the_eighth_and_none_is_more():
    """So that all of E4M3's powers of 2 serve; blocks whose scores rise little rescale nothing that they need not."""
    config = config_of("bf16")
    softmax, generator = Softmax(config), np.random.default_rng(0)
    state, references, totals = (stand_in(value) for value in (None, [Float32(LOWEST)] * 2, [Float32(0.0)] * 2))
    rows = Rows([], [stand_in(Float32(0.25))] * 2, state, [], OnlineSoftmax(references, totals))
    factors, highest = [Float32(0.0)] * 2, np.full((2, 8), -np.inf)
    with running(Warp(np.zeros(16, np.uint8), np.zeros(16, np.uint8))):
        for step in range(5):
            own = generator.normal(0, 40 * (step + 1), (config.tile_tokens // 2, 32)).astype(np.float32)
            values = [Float32(row) for row in own]
            by_row = own.reshape(-1, 2, 2, 8, 4).transpose(1, 3, 0, 2, 4).reshape(2, 8, -1)
            highest = np.maximum(highest, by_row.max(-1) * 0.25)
            softmax.weigh(values, rows, factors, [])
            for i, value in enumerate(values):
                reference = highest[i // 2 % 2].repeat(4) - 8
                np.testing.assert_allclose(value, np.exp2(own[i] * 0.25 - reference), rtol=1e-4, atol=1e-30)
                assert (np.asarray(value) <= 256.1).all()


def test_tiles_leave_room_for_rows_of_quarters():
    config = config_of("bf16")
    room, size = config.tile_rooms[1], config.tile_bytes[1]
    assert room == size + 8 * wgmma_tiles.ROW_BYTES and room % 1024 == 0
    quarters = torch.tensor([fp8.QUARTERS], dtype=torch.int32).view(torch.float8_e4m3fn).float()
    assert (quarters * 4 == 1).all(), "four lanes of a row add up the same sum"
    assert WARPS * WARP_ROWS == WARPGROUP_ROWS
