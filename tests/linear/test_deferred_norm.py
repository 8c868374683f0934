"""Products around a deferred norm: their stores lane by lane in NumPy, and which configurations have them."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("cutlass")

from cute_kernels.formats.weights import integers
from cute_kernels.gemm.choice import chosen
from cute_kernels.gemm.deferred_choice import config_beside_a_norm, deferred, shipped_configs
from cute_kernels.gemm.wgmma import deferred_norm
from cute_kernels.gemm.wgmma.config import WgmmaConfig
from cute_kernels.gemm.wgmma.deferred_config import FACTOR_WARPS, GIVES, TAKES, DeferredKind, norm_of, with_norm
from cute_kernels.gemm.wgmma.epilogue import Store
from cute_kernels.gemm.wgmma.launch import TileSchedule
from cute_kernels.gemm.wgmma.mainloops import MmaSync, ResidentLimbs
from cute_kernels.gemm.wgmma.places import Corner
from cute_kernels.gemm.wgmma.results import (
    Dsmem,
    RowExchange,
    SequentialSplitK,
    StagedStore,
    WorkspaceSplitK,
)
from layouts import banks
from simulator import stand_in
from tests.attention import warp as machine
from tests.linear.cases import problem_of
from tests.linear.warpgroup import WarpgroupWarp

STAGING = 1 << 12
W4 = integers(4)
TILES = [
    WgmmaConfig(W4, "bf16", tile_m=8),
    WgmmaConfig(W4, "bf16", tile_m=32, n_tiles=2, block_k=128, reduction=WorkspaceSplitK()),
    WgmmaConfig(W4, "bf16", tile_m=48),
    WgmmaConfig(W4, "bf16", tile_m=64, block_k=128, reduction=RowExchange()),
    WgmmaConfig(W4, "bf16", tile_m=80, reduction=WorkspaceSplitK()),
]
LIMBS = replace(TILES[0], block_k=128, num_stages=8, mainloop=ResidentLimbs(32, loads=True), reduction=Dsmem(2, 2))
TILES.append(LIMBS)
every_tile = pytest.mark.parametrize("tiles", TILES, ids=lambda tiles: tiles.name)


def store_of(warp: int) -> Any:
    return stand_in(Store)(machine.Int32(STAGING), 0, machine.Int32(warp * 32 + machine.LANES), warp, machine.LANES)


def warp_with(run_on, *tensors: torch.Tensor) -> WarpgroupWarp:
    """A warp whose global memory has tensors one behind the other; shared memory that nobody wrote is NaN."""
    memory = np.concatenate([tensor.contiguous().view(torch.uint8).numpy().reshape(-1) for tensor in tensors])
    gpu = WarpgroupWarp(np.full(1 << 17, 0xFF, np.uint8), memory)
    run_on(gpu)
    return gpu


def accumulators(tiles: WgmmaConfig, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """[warp, place, lane], and the same as [tokens, 64]: features along the rows of an MMA, two tokens side by side."""
    acc = np.random.default_rng(seed).normal(size=(4, tiles.own_m // 2, 32)).astype(np.float32)
    found = np.empty((tiles.own_m, 64), np.float32)
    g, t = machine.LANES // 4, machine.LANES % 4
    for warp, place in np.ndindex(4, tiles.own_m // 2):
        block, i = divmod(place, 4)
        found[8 * block + 2 * t + i % 2, 16 * warp + g + 8 * (i // 2)] = acc[warp, place]
    return acc, found


class Given:
    """What a warpgroup gives of a tile: from the fifth row and the second tile of features on, but the last rows."""

    def __init__(self, tiles: WgmmaConfig, run_on):
        self.config = with_norm(tiles, GIVES)
        generator = torch.Generator().manual_seed(3)
        self.token, self.row, self.n = 4, 64, 64 * (1 + tiles.n_tiles)
        self.rows = self.token + tiles.own_m - 3
        self.residual = torch.randn(self.rows, self.n, generator=generator).bfloat16()
        self.norm = torch.randn(self.n, generator=generator).bfloat16()
        self.gpu = warp_with(run_on, self.residual, self.norm)
        self.subject: Any = deferred_norm.GivingStore(self.config)
        self.operands = SimpleNamespace(residual=0, norm=self.residual.nbytes, offset=np.float32(0.5))
        self.shape = SimpleNamespace(n=self.n)
        self.sums = torch.full((self.rows, self.n), torch.nan)
        self.scaled, self.squares = self.sums.clone(), torch.full((self.rows, self.n // 64), torch.nan)

    def corner(self, ordinal: int) -> Any:
        return stand_in(Corner)(self.row + 64 * ordinal, self.token, self.rows, 0)

    def bring(self) -> None:
        for ordinal in range(norm_of(self.config).stored_tiles(self.config)):
            for warp in range(4):
                store = store_of(warp)
                self.subject.bring_weights(self.operands, self.shape, store, self.corner(ordinal), ordinal)
                residuals = self.subject.residuals
                residuals.bring_first(self.operands, self.shape, store, self.corner(ordinal), ordinal, early=True)

    def store(self, acc: np.ndarray, ordinal: int, chunk: int) -> None:
        done, tile_m = self.config.chunks[chunk]
        for warp in range(4):
            own = [machine.Float32(value) for value in acc[warp]]
            self.subject.residuals.add(store_of(warp), own, done // 2, ordinal, chunk)
        for warp in range(4):
            factors = self.subject.factors_of(self.operands, store_of(warp), ordinal)
            for i in range(-(-tile_m // deferred_norm.TOKENS_AT_ONCE)):
                corner = self.corner(ordinal)
                self.put(self.subject.piece(self.shape, store_of(warp), corner, factors, ordinal, chunk, i))

    def put(self, piece: Any) -> None:
        """What `GivingStore.store_chunk` stores of it; nothing is stored twice."""
        for lane in np.flatnonzero(np.broadcast_to(piece.there, 32)):
            row, column = divmod(int(piece.place[lane]) // 2, self.n)
            for target, words in ((self.sums, piece.words), (self.scaled, piece.scaled)):
                assert target[row, column : column + 8].isnan().all()
                bits = np.stack([np.asarray(word)[lane] for word in words]).view(np.int16)
                target[row, column : column + 8] = torch.from_numpy(bits.copy()).view(torch.bfloat16).float()
            if lane % 8 == 0:
                self.squares.view(-1)[int(piece.sum_place[lane]) // 4] = float(piece.total[lane])


@every_tile
def test_rows_leave_with_their_weighted_selves_and_sums_of_squares(tiles: WgmmaConfig, run_on):
    given = Given(tiles, run_on)
    given.bring()
    for ordinal in range(norm_of(given.config).stored_tiles(tiles)):
        acc, results = accumulators(tiles, ordinal)
        for chunk in range(len(tiles.chunks)):
            given.store(acc, ordinal, chunk)
        there, columns = slice(given.token, given.rows), slice(given.row + 64 * ordinal, given.row + 64 * (ordinal + 1))
        sums = (
            (torch.from_numpy(results[: tiles.own_m - 3]) + given.residual[there, columns].float()).bfloat16().float()
        )
        assert torch.equal(given.sums[there, columns], sums)
        scaled = sums * (given.norm[columns].float() + 0.5)
        assert torch.equal(given.scaled[there, columns], scaled.bfloat16().float())
        assert torch.allclose(given.squares[there, 1 + ordinal], sums.square().sum(-1), rtol=1e-6)
    assert given.sums[: given.token].isnan().all() and given.sums[:, : given.row].isnan().all()
    assert all(place + size <= given.gpu.global_memory.size for place, size in given.gpu.reads)


@every_tile
def test_what_both_stores_keep_lies_beside_the_residual(tiles: WgmmaConfig):
    for kind in (GIVES, TAKES):
        config = with_norm(tiles, kind)
        assert config.can_implement() is None
        offset, size = norm_of(config).extra_offset(config), norm_of(config).extra_bytes(config)
        assert offset == 2 * tiles.chunk_m * 128 and size > 0
        assert offset + size <= tiles.staging_bytes


@every_tile
@pytest.mark.parametrize("k", [256, 4096, 16384])
def test_accumulators_meet_the_root_of_their_row(tiles: WgmmaConfig, k: int, run_on):
    """From the third row on; sums of rows behind the last one are not read."""
    token = 0 if tiles.limbs else 2
    rows, parts = token + tiles.own_m - 3, k // 64
    squares = torch.rand(rows, parts, generator=torch.Generator().manual_seed(k)) * 100
    gpu = warp_with(run_on, squares)
    subject: Any = deferred_norm.TakingStore(with_norm(tiles, TAKES))
    operands = SimpleNamespace(squares=0, parts=parts, inverse_k=np.float32(1 / k), eps=np.float32(1e-5))
    for warp in range(4 if tiles.limbs else FACTOR_WARPS):
        if tiles.limbs:
            subject.keep_asked(operands, store_of(warp), subject.ask(operands, store_of(warp).tid, rows))
        else:
            subject.make_factors(operands, subject.factors_of(store_of(0)), store_of(warp).tid, token, rows)
    acc, results = accumulators(tiles, 1)
    want = torch.from_numpy(results[: tiles.own_m - 3]).double()
    want *= (squares[token:].double().sum(-1, keepdim=True) / k + 1e-5).rsqrt()
    for warp in range(4):
        own = [machine.Float32(value) for value in acc[warp]]
        subject.scale(store_of(warp), own, 0)
        acc[warp] = own
    g, t = machine.LANES // 4, machine.LANES % 4
    for warp, place in np.ndindex(4, tiles.own_m // 2):
        block, i = divmod(place, 4)
        for lane in range(32):
            row = 8 * block + 2 * t[lane] + i % 2
            if row < tiles.own_m - 3:
                wanted = float(want[row, 16 * warp + g[lane] + 8 * (i // 2)])
                assert abs(acc[warp, place, lane] - wanted) <= 2e-6 * abs(wanted)
    assert {place // (4 * parts) for place, _ in gpu.reads} == set(range(token, rows))


@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("k", [256, 4096, 16384])
def test_sums_that_are_asked_for_at_once_make_the_same_factors(rows: int, k: int, run_on):
    squares = torch.rand(rows, k // 64, generator=torch.Generator().manual_seed(k)) * 100
    gpu = warp_with(run_on, squares)
    subject: Any = deferred_norm.TakingStore(with_norm(LIMBS, TAKES))
    operands = SimpleNamespace(squares=0, parts=k // 64, inverse_k=np.float32(1 / k), eps=np.float32(1e-5))
    for warp in range(4):
        asked = subject.ask(operands, store_of(warp).tid, rows)
        subject.keep_asked(operands, store_of(warp), asked)
    first = int(subject.factors_of(store_of(0))[0]) // 4
    found = gpu.shared_memory.view(np.float32)[first : first + rows]
    assert np.allclose(found, (squares.double().mean(-1) / 64 + 1e-5).rsqrt().numpy(), rtol=2e-6)
    assert len(gpu.reads) == squares.numel() // 4  # each once


def test_lanes_that_scale_do_not_meet_in_a_bank(run_on):
    gpu = warp_with(run_on, torch.zeros(1))
    subject: Any = deferred_norm.TakingStore(with_norm(TILES[3], TAKES))
    subject.scale(store_of(0), [machine.Float32(0.0)] * (TILES[3].own_m // 2), 0)
    assert len(gpu.accesses) == TILES[3].own_m // 8
    for access in gpu.accesses:
        assert banks.report(list(access.addresses), access.width, access.kind).conflicts == 0, access


# -- which products have such stores -----------------------------------------------------------------------------------

REFUSED = {
    "fp16": (replace(TILES[2], dtype="fp16"), GIVES, "a norm is deferred in bf16, not fp16"),
    "mma.sync": (WgmmaConfig(W4, "bf16", tile_m=16, block_k=128, mainloop=MmaSync()), TAKES, "MmaSync"),
    "a sequence of parts": (
        WgmmaConfig(W4, "bf16", tile_m=48, reduction=SequentialSplitK()),
        GIVES,
        "SequentialSplitK",
    ),
    "multicast": (WgmmaConfig(W4, "bf16", tile_m=128, multicast=2, num_stages=4), TAKES, "2 CTAs that multicast"),
    "many rows": (WgmmaConfig(W4, "bf16", tile_m=160), GIVES, "128 rows that a CTA stores, not 160"),
    "many chunks": (
        WgmmaConfig(W4, "bf16", tile_m=96, store=StagedStore(32), num_stages=4),
        GIVES,
        "1 tiles of 3 chunks have no buffers",
    ),
    "rows of 16 in limbs": (
        replace(LIMBS, tile_m=16, mainloop=ResidentLimbs(16), reduction=Dsmem(2)),
        TAKES,
        "in limbs of 8 rows",
    ),
    "another kind": (TILES[2], "both", "kind 'both' is not one of gives, takes"),
}


@pytest.mark.parametrize(("tiles", "kind", "reason"), REFUSED.values(), ids=list(REFUSED))
def test_what_has_no_such_store_is_refused_by_name(tiles: WgmmaConfig, kind: Any, reason: str):
    assert tiles.can_implement() is None
    assert reason in (with_norm(tiles, kind).can_implement() or "")


def test_kernels_of_the_three_are_told_apart():
    names = {TILES[3].name, *(with_norm(TILES[3], kind).name for kind in (GIVES, TAKES))}
    assert len(names) == 3


STEPS: dict[
    int, dict[tuple[int, int], DeferredKind]
] = {  # (n, k) by what a step of 1 or 32 requests to Llama-3-8B, or of 64 to Llama-2-70B's shard, wants of it
    1: {(4096, 4096): GIVES, (4096, 14_336): GIVES, (6144, 4096): TAKES, (28_672, 4096): TAKES},
    32: {(4096, 4096): GIVES, (4096, 14_336): GIVES, (6144, 4096): TAKES, (28_672, 4096): TAKES},
    64: {(8192, 1024): GIVES, (8192, 3584): GIVES, (1280, 8192): TAKES, (7168, 8192): TAKES},
}


@pytest.mark.parametrize(("m", "n", "k", "kind"), [(m, *size, kind) for m in STEPS for size, kind in STEPS[m].items()])
def test_products_of_steps_have_such_stores(m: int, n: int, k: int, kind: DeferredKind):
    problem = problem_of(m, n, k, 4, torch.bfloat16, 128)
    assert config_beside_a_norm(problem, chosen(problem), kind) is not None


def test_bundles_hold_what_steps_take():
    shipped = shipped_configs()
    for m, sizes in STEPS.items():
        for (n, k), kind in sizes.items():
            problem = problem_of(m, n, k, 4, torch.bfloat16, 128)
            assert config_beside_a_norm(problem, chosen(problem), kind) in shipped
    assert all(config.can_implement() is None for config in shipped)


def test_rows_in_limbs_take_as_many_sums_as_they_ask_for_at_once():
    for k, takes in {16_384: True, 16_640: False, 32_768: False}.items():
        schedule = chosen(problem_of(1, 4096, k, 4, torch.bfloat16, 128))
        assert isinstance(schedule, TileSchedule) and schedule.config.limbs
        assert (deferred(schedule, TAKES) is not None) == takes
        assert deferred(schedule, GIVES) is not None


def test_ctas_of_several_work_tiles_take_a_norm_of_the_same_rows_and_give_none():
    for (m, n), takes in {(64, 57_344): True, (32, 128_256): True, (700, 8192): False}.items():
        schedule = chosen(problem_of(m, n, 4096, 4, torch.bfloat16, 128))
        assert isinstance(schedule, TileSchedule) and schedule.num_work_tiles > schedule.num_ctas
        assert with_norm(schedule.config, TAKES).can_implement() is None or m == 700
        assert (deferred(schedule, TAKES) is not None) == takes
        assert deferred(schedule, GIVES) is None
