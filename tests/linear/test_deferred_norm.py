"""Products around a deferred norm: their stores lane by lane in NumPy, which configurations have them, and calls."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("cutlass")

from cute_kernels import quantized_linear, quantized_linear_norm, rms_norm
from cute_kernels.linear import deferred as host
from cute_kernels.linear.deferred_choice import deferred, shipped_configs
from cute_kernels.linear.tuned import chosen
from cute_kernels.linear.wgmma import deferred_norm
from cute_kernels.linear.wgmma.config import WgmmaConfig
from cute_kernels.linear.wgmma.deferred_compile import ARGUMENTS
from cute_kernels.linear.wgmma.deferred_config import FACTOR_WARPS, GIVES, TAKES, DeferredKind, DeferredNormConfig
from cute_kernels.linear.wgmma.epilogue import Store
from cute_kernels.linear.wgmma.mainloops import MmaSync, ResidentLimbs
from cute_kernels.linear.wgmma.places import Corner
from cute_kernels.linear.wgmma.results import (
    EarlyDsmem,
    RowExchange,
    SequentialSplitK,
    StagedStore,
    TmaStore,
    WorkspaceSplitK,
    dsmem,
)
from cute_kernels.linear.wgmma.schedule import TileSchedule
from cute_kernels.weight_formats import integers
from layouts import banks
from simulator import stand_in
from tests.attention import warp as machine
from tests.gpu.specs import GPU
from tests.launchers import LOWEST_ADDRESS, given_to, recording
from tests.linear.cases import known, problem_of, random_weight, with_parts
from tests.linear.warpgroup import WarpgroupWarp
from tests.tensors import apart, offset

STAGING = 1 << 12
W4 = integers(4)
TILES = [
    WgmmaConfig(W4, "bf16", tile_m=8),
    WgmmaConfig(W4, "bf16", tile_m=32, n_tiles=2, block_k=128, reduction=WorkspaceSplitK()),
    WgmmaConfig(W4, "bf16", tile_m=48),
    WgmmaConfig(W4, "bf16", tile_m=64, block_k=128, reduction=RowExchange()),
    WgmmaConfig(W4, "bf16", tile_m=80, reduction=WorkspaceSplitK()),
]
LIMBS = replace(
    TILES[0], block_k=128, num_stages=8, mainloop=ResidentLimbs(32, loads=True, ahead=True), reduction=dsmem(2, 2)
)
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
        self.config = DeferredNormConfig(tiles, GIVES)
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
        for ordinal in range(self.config.stored_tiles):
            for warp in range(4):
                store = store_of(warp)
                self.subject.bring_weights(self.operands, self.shape, store, self.corner(ordinal), ordinal)
                residuals = self.subject.residuals
                residuals.bring_first(self.operands, self.shape, store, self.corner(ordinal), ordinal, early=True)

    def store(self, acc: np.ndarray, ordinal: int, chunk: int) -> None:
        done, tile_m = self.config.tiles.chunks[chunk]
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
    for ordinal in range(given.config.stored_tiles):
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
        config = DeferredNormConfig(tiles, kind)
        assert config.can_implement() is None
        assert config.extra_offset == 2 * tiles.chunk_m * 128 and config.extra_bytes > 0
        assert config.extra_offset + config.extra_bytes <= tiles.staging_bytes


@every_tile
@pytest.mark.parametrize("k", [256, 4096, 16384])
def test_accumulators_meet_the_root_of_their_row(tiles: WgmmaConfig, k: int, run_on):
    """From the third row on; sums of rows behind the last one are not read."""
    token = 0 if tiles.limbs else 2
    rows, parts = token + tiles.own_m - 3, k // 64
    squares = torch.rand(rows, parts, generator=torch.Generator().manual_seed(k)) * 100
    gpu = warp_with(run_on, squares)
    subject: Any = deferred_norm.TakingStore(DeferredNormConfig(tiles, TAKES))
    operands = SimpleNamespace(squares=0, parts=parts, inverse_k=np.float32(1 / k), eps=np.float32(1e-5))
    for warp in range(4 if subject.config.in_limbs else FACTOR_WARPS):
        if subject.config.in_limbs:
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
    subject: Any = deferred_norm.TakingStore(DeferredNormConfig(LIMBS, TAKES))
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
    subject: Any = deferred_norm.TakingStore(DeferredNormConfig(TILES[3], TAKES))
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
    "TMA": (WgmmaConfig(W4, "bf16", tile_m=256, num_stages=4, store=TmaStore()), TAKES, "TmaStore"),
    "multicast": (WgmmaConfig(W4, "bf16", tile_m=128, multicast=2, num_stages=4), TAKES, "2 CTAs that multicast"),
    "many rows": (WgmmaConfig(W4, "bf16", tile_m=160), GIVES, "128 rows that a CTA stores, not 160"),
    "many chunks": (
        WgmmaConfig(W4, "bf16", tile_m=96, store=StagedStore(32), num_stages=4),
        GIVES,
        "1 tiles of 3 chunks have no buffers",
    ),
    "rows of 16 in limbs": (
        replace(LIMBS, tile_m=16, mainloop=ResidentLimbs(16), reduction=dsmem(2)),
        TAKES,
        "in limbs of 8 rows",
    ),
    "limbs that meet factors": (
        replace(LIMBS, mainloop=replace(LIMBS.mainloop, factors="scaled")),
        TAKES,
        "rows that meet no factors",
    ),
    "limbs of which some leave early": (
        replace(LIMBS, n_tiles=2, mainloop=ResidentLimbs(16), reduction=EarlyDsmem()),
        GIVES,
        "EarlyDsmem",
    ),
    "another kind": (TILES[2], "both", "kind 'both' is not one of gives, takes"),
}


@pytest.mark.parametrize(("tiles", "kind", "reason"), REFUSED.values(), ids=list(REFUSED))
def test_what_has_no_such_store_is_refused_by_name(tiles: WgmmaConfig, kind: Any, reason: str):
    assert tiles.can_implement() is None
    assert reason in (DeferredNormConfig(tiles, kind).can_implement() or "")


def test_kernels_of_the_three_are_told_apart():
    names = {TILES[3].name, *(DeferredNormConfig(TILES[3], kind).name for kind in (GIVES, TAKES))}
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
    schedule = chosen(problem_of(m, n, k, 4, torch.bfloat16, 128), GPU)
    assert deferred(schedule, kind) is not None


def test_bundles_hold_what_steps_take():
    shipped = shipped_configs()
    for m, sizes in STEPS.items():
        for (n, k), kind in sizes.items():
            assert deferred(chosen(problem_of(m, n, k, 4, torch.bfloat16, 128), GPU), kind) in shipped
    assert all(config.can_implement() is None for config in shipped)


def test_rows_in_limbs_take_as_many_sums_as_they_ask_for_at_once():
    for k, takes in {16_384: True, 16_640: False, 32_768: False}.items():
        schedule = chosen(problem_of(1, 4096, k, 4, torch.bfloat16, 128), GPU)
        assert isinstance(schedule, TileSchedule) and schedule.config.limbs
        assert (deferred(schedule, TAKES) is not None) == takes
        assert deferred(schedule, GIVES) is not None


def test_ctas_of_several_work_tiles_take_a_norm_of_the_same_rows_and_give_none():
    for (m, n), takes in {(64, 57_344): True, (32, 128_256): True, (700, 8192): False}.items():
        schedule = chosen(problem_of(m, n, 4096, 4, torch.bfloat16, 128), GPU)
        assert isinstance(schedule, TileSchedule) and schedule.num_work_tiles > schedule.num_ctas
        assert DeferredNormConfig(schedule.config, TAKES).can_implement() is None or m == 700
        assert (deferred(schedule, TAKES) is not None) == takes
        assert deferred(schedule, GIVES) is None


# -- calls -------------------------------------------------------------------------------------------------------------

N, K = 512, 256
M, HALF = 48, torch.float16


def weight(n: int = N, k: int = K, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Any:
    return known(n, k, group_size=128, dtype=dtype).pack(**options)


def numbers(*size: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def given_of(rows: int = M, **changed: Any) -> dict[str, Any]:
    x = {"x": numbers(rows, K), "weight": weight(), "residual": numbers(rows, N, seed=1), "norm": numbers(N, seed=2)}
    return {**x, "norm_eps": 1e-5, **changed}


def test_on_a_cpu_the_two_calls_are_a_product_a_norm_and_a_product():
    given, following = given_of(norm_offset=1.0), weight(128, N)
    found = quantized_linear_norm(**given)
    rows = quantized_linear(given["x"], given["weight"], residual=given["residual"])
    assert torch.equal(found.rows, rows) and found.deferred is None
    normed = rms_norm(rows, given["norm"], eps=1e-5, weight_offset=1.0)
    assert torch.equal(found.normed(), normed)
    assert torch.equal(
        quantized_linear(found, following, activation="swiglu"),
        quantized_linear(normed, following, activation="swiglu"),
    )


def test_both_calls_are_traced_as_what_they_are_without_kernels():
    given, following = given_of(), weight(128, N)

    def layer(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        rows = quantized_linear_norm(**{**given, "x": x, "residual": residual})
        return quantized_linear(rows, following)

    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    assert torch.equal(compiled(given["x"], given["residual"]), layer(given["x"], given["residual"]))


WRONG = {
    "weight: got Tensor, want a PackedWeight": {"weight": torch.ones(N, K)},
    "x: got shape": {"x": numbers(M, K + 8)},
    "bias: got shape": {"bias": numbers(N + 8)},
    "residual: got NoneType, want a torch.Tensor": {"residual": None},
    "residual: got dtype torch.float32": {"residual": torch.ones(M, N)},
    "norm: got shape": {"norm": numbers(K)},
    "norm: got dtype torch.float16": {"norm": numbers(N, dtype=torch.float16)},
    "norm_eps: got -1.0": {"norm_eps": -1.0},
    "norm_offset: got nan": {"norm_offset": float("nan")},
    "weight: got 500 rows, want a multiple of 8": {
        "weight": weight(500), "residual": numbers(M, 500), "norm": numbers(500),
    },
}  # fmt: skip


@pytest.mark.parametrize("message", WRONG)
@pytest.mark.parametrize("on_gpu", [False, True])
def test_wrong_arguments_are_refused_by_name(message: str, on_gpu: bool):
    with recording() if on_gpu else nullcontext(), pytest.raises((TypeError, ValueError), match=f"^{message}"):
        quantized_linear_norm(**given_of(**WRONG[message]))


def test_rows_that_are_normed_are_not_normed_again():
    rows = quantized_linear_norm(**given_of())
    with pytest.raises(ValueError, match="^norm: got a tensor for x of NormedRows"):
        quantized_linear(rows, weight(128, N), norm=numbers(N))
    with recording(), pytest.raises(ValueError, match=r"^x: got shape \[48, 512\], want \[..., 256\]"):
        quantized_linear(quantized_linear_norm(**given_of()), weight())


def kinds(launches: list[Any]) -> list[str]:
    """Of launches: "gives", "takes", "norm", "inputs" or "product"."""
    found = []
    for symbol, _ in launches:
        parts = symbol.split("_")
        found.append(parts[-2] if parts[-1] == "norm" else {"norm": "norm"}.get(parts[0], "product"))
        found[-1] = "inputs" if symbol.startswith("linear_inputs") else found[-1]
    return found


def test_no_launch_lies_between_the_two_products():
    with recording() as cache:
        given = given_of(x=numbers(2, M // 2, K), residual=numbers(2, M // 2, N, seed=1))
        rows = quantized_linear_norm(**given)
        found = [quantized_linear(rows, weight(n, N), activation="swiglu") for n in (128, 64)]
    assert kinds(cache.launches) == ["gives", "takes", "takes"]
    assert rows.rows.shape == (2, M // 2, N) and [one.shape for one in found] == [(2, M // 2, 64), (2, M // 2, 32)]
    first, second = (given_to(ARGUMENTS[kind], *cache.launches[i].arguments) for i, kind in ((0, GIVES), (1, TAKES)))
    parts = rows.deferred
    assert parts is not None and parts.scaled.shape == (M, N) and parts.squares.shape == (M, N // 64)
    assert first.x.shape == (M, K) and first.norm == given["norm"].data_ptr() and first.out == rows.rows.data_ptr()
    assert first.scaled == second.x.data_ptr() == parts.scaled.data_ptr()
    assert first.squares == second.squares == parts.squares.data_ptr()
    assert (second.parts, second.inverse_k, second.eps) == (N // 64, 1 / N, 1e-5)
    assert first.residual == given["residual"].data_ptr() and first.offset == 0.0


OTHERWISE: dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {
    "one row": ({"x": numbers(1, K), "residual": numbers(1, N)}, {}, ["gives", "takes"]),
    "fp16": (
        {
            "x": numbers(M, K, dtype=HALF), "weight": weight(dtype=HALF), "residual": numbers(M, N, dtype=HALF),
            "norm": numbers(N, dtype=HALF),
        },
        {"weight": weight(128, N, HALF)},
        ["product", "norm", "product"],
    ),
    "no rows": ({"x": numbers(0, K), "residual": numbers(0, N)}, {}, []),
    "many rows": ({"x": numbers(20_000, K), "residual": numbers(20_000, N)}, {}, ["product", "norm", "product"]),
    "an fp32 norm": ({"norm": torch.ones(N)}, {}, ["product", "norm", "product"]),
    "an order": ({"weight": weight(perm=torch.arange(K - 1, -1, -1))}, {}, ["inputs", "gives", "takes"]),
    "rows apart": ({"x": numbers(M, 2 * K)[:, :K]}, {}, ["inputs", "gives", "takes"]),
    "residual apart": ({"residual": numbers(M, 2 * N)[:, :N]}, {}, ["product", "norm", "product"]),
    "batch-invariant": ({}, {"batch_invariant": True}, ["gives", "norm", "product"]),
    "fp32 results": ({}, {"out_dtype": torch.float32}, ["gives", "takes"]),
    "fp32 results and a residual": (
        {}, {"out_dtype": torch.float32, "residual": torch.ones(M, 128)}, ["gives", "norm", "product"],
    ),
    "fp32 results of a gate": (
        {}, {"out_dtype": torch.float32, "activation": "swiglu"}, ["gives", "norm", "product"],
    ),
    "an activation and a residual": (
        {}, {"activation": "silu", "residual": numbers(M, 128)}, ["gives", "norm", "product"],
    ),
    "a residual": ({}, {"residual": numbers(M, 128)}, ["gives", "takes"]),
    "out": ({}, {"out": numbers(M, 128)}, ["gives", "takes"]),
    "another order": (
        {}, {"weight": weight(128, N, perm=torch.arange(N - 1, -1, -1))}, ["gives", "norm", "product"],
    ),
    "results in pieces": ({}, {"weight": weight(100, N)}, ["gives", "norm", "product"]),
}  # fmt: skip


def test_nothing_is_made_for_a_product_that_does_not_take_it():
    for following, want in ((weight(128, N), "gives"), (weight(128, N, perm=torch.arange(N - 1, -1, -1)), "product")):
        with recording() as cache:
            quantized_linear_norm(**given_of(following=following))
        assert kinds(cache.launches) == [want]
    wrong = {
        r"a weight \[128, 256\], want one of 512 inputs": weight(128, K),
        "Tensor, want a PackedWeight": torch.ones(3),
    }
    for message, following in wrong.items():
        with recording(), pytest.raises((TypeError, ValueError), match=f"^following: got {message}"):
            quantized_linear_norm(**given_of(following=following))


@pytest.mark.parametrize(("first", "second", "want"), OTHERWISE.values(), ids=list(OTHERWISE))
def test_what_kernels_do_not_serve_is_served_by_launches_that_do(first, second, want):
    with recording() as cache:
        rows = quantized_linear_norm(**given_of(**first))
        quantized_linear(rows, **{"weight": weight(128, N), **second})
    assert kinds(cache.launches) == want


CALLS = {name: call for name, call in OTHERWISE.items() if call[2]}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_launches_the_same_after_any_other(name: str):
    def outcome_of(other: str) -> Any:
        first, second, _ = CALLS[other]
        del cache.launches[:]
        quantized_linear(quantized_linear_norm(**given_of(**first)), **{"weight": weight(128, N), **second})
        return kinds(cache.launches), [
            [value.shape if isinstance(value, torch.Tensor) else value for value in launch.arguments if small(value)]
            for launch in cache.launches
        ]

    def small(value: Any) -> bool:
        return isinstance(value, torch.Tensor) or value < LOWEST_ADDRESS

    with recording() as cache:
        want = outcome_of(name)
        for other in CALLS:
            outcome_of(other)
            assert outcome_of(name) == want, f"after {other}"


def test_fp32_results_that_three_warpgroups_along_k_stage_go_another_way():
    """Staged in fp32 they would take the memory of the factors."""
    schedule = chosen(problem_of(32, 6144, 4096, 4, torch.bfloat16, 128), GPU)
    assert isinstance(schedule, TileSchedule) and schedule.config.k_warpgroups == 3
    assert deferred(schedule, TAKES) is not None
    with recording(name=lambda device: GPU) as cache:
        other = random_weight(W4, torch.bfloat16, 6144, 4096)
        parts = host.DeferredParts(numbers(32, 4096), torch.ones(32, 64))
        rows = host.left_to_next(numbers(32, 4096), numbers(4096), 1e-5, 0.0, parts)
        del cache.launches[:]
        for dtype in (torch.bfloat16, torch.float32):
            quantized_linear(rows, other, out_dtype=dtype)
    assert kinds(cache.launches) == ["takes", "norm", "product"]


BAD_PARTS = {
    "x: got deferred.squares of dtype torch.float64": {"squares": torch.ones(M, N // 64).double()},
    "x: got deferred.scaled of dtype torch.float16": {"scaled": torch.ones(M, N).half()},
    r"x: got deferred.squares of shape \[40, 8\], want \[48, 8\]": {"squares": torch.ones(M - 8, N // 64)},
    r"x: got deferred.squares with strides \(16, 2\)": {"squares": torch.ones(M, N // 32)[:, ::2]},
}


@pytest.mark.parametrize("message", BAD_PARTS)
def test_parts_that_no_product_gives_are_refused(message: str):
    with recording():
        rows = quantized_linear_norm(**given_of())
        assert rows.deferred is not None
        quantized_linear(rows, weight(128, N))  # the like is served
        bad: Any = replace(rows.deferred, **BAD_PARTS[message])
        with pytest.raises((TypeError, ValueError), match=f"^{message}"):
            quantized_linear(with_parts(rows, bad), weight(128, N))


CHANGES = {
    "norm": {"norm": numbers(N, seed=5)},
    "rows": {"rows": numbers(M, N, seed=6)},
    "eps": {"norm_eps": 1e-3},
    "offset": {"norm_offset": 1.0},
}


@pytest.mark.parametrize("changed", CHANGES.values(), ids=list(CHANGES))
def test_what_was_left_of_a_norm_is_not_taken_for_another_one(changed: dict[str, Any]):
    """As where two branches norm the same rows, each with its own weight."""
    with recording() as cache:
        rows = replace(quantized_linear_norm(**given_of()), **changed)
        quantized_linear(rows, weight(128, N))
    assert rows.deferred is None and kinds(cache.launches) == ["gives", "norm", "product"]


APART = {
    "columns": lambda x: x.T.contiguous().T,
    "off 16 bytes": lambda x: offset(x, 2),
    "at an odd distance": lambda x: apart(x, 5),
    "a part of wider rows": apart,
    "one row for all": lambda x: x[:1].expand(x.shape),
}


@pytest.mark.parametrize("lay", APART.values(), ids=list(APART))
@pytest.mark.parametrize("on_gpu", [False, True])
def test_rows_in_any_strides_are_normed_before_a_product(lay, on_gpu: bool):
    norm, after = numbers(N, seed=2), weight(128, N)
    rows = lay(numbers(M, N))
    with recording() if on_gpu else nullcontext() as cache:
        found = quantized_linear(host.NormedRows(rows, norm), after), quantized_linear(rows, after, norm=norm)
    if cache is not None:
        assert kinds(cache.launches) == ["norm", "product"] * 2
    else:
        want = quantized_linear(rms_norm(rows.contiguous(), norm), after)
        assert all(torch.equal(one, want) for one in found)


@pytest.mark.parametrize("dynamic", [False, True])
def test_rows_in_any_strides_are_traced(dynamic: bool):
    norm, after = numbers(N, seed=2), weight(128, N)
    compiled = torch.compile(
        lambda x: quantized_linear(x, after, norm=norm), fullgraph=True, backend="eager", dynamic=dynamic
    )
    for lay in APART.values():
        torch.compiler.reset()  # each way to lie is another function
        rows = lay(numbers(M, N))
        assert torch.equal(compiled(rows), quantized_linear(rows, after, norm=norm))


def test_a_norm_off_16_bytes_is_refused_by_its_name():
    norm, message = offset(numbers(N), 2), "^norm: got a tensor that starts 2 bytes past a multiple of 16"
    with recording():
        for call in (
            lambda: host.NormedRows(numbers(M, N), norm),
            lambda: quantized_linear_norm(**given_of(norm=norm)),
        ):
            with pytest.raises(ValueError, match=message):
                call()


@pytest.mark.parametrize("on_gpu", [False, True])
def test_normed_rows_have_no_gradient_whatever_their_operands_have(on_gpu: bool):
    given = given_of(norm=torch.nn.Parameter(numbers(N)), residual=numbers(M, N).requires_grad_())
    with recording() if on_gpu else nullcontext():
        rows = quantized_linear_norm(**{**given, "x": given["x"].requires_grad_()})
        found = rows.rows, rows.normed(), quantized_linear(rows, weight(128, N))
    assert not any(one.requires_grad for one in found)


def test_results_do_not_take_the_place_of_rows_that_are_read():
    with recording():
        rows = quantized_linear_norm(**given_of())
        assert rows.deferred is not None
        with pytest.raises(ValueError, match="^out: got the memory of x"):
            quantized_linear(rows, weight(N, N), out=rows.deferred.scaled)
