"""Products of a layer in one launch, without a GPU: what its warps compute in NumPy, what configurations promise."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("cutlass")

from cute_kernels import quantized_layer, quantized_linear, quantized_linear_norm
from cute_kernels.device.pipeline import Pipeline
from cute_kernels.gemm.layer import instructions
from cute_kernels.gemm.layer import memory as memory_of
from cute_kernels.gemm.layer.arguments import LAYER_PRODUCTS, PRODUCTS
from cute_kernels.gemm.layer.config import (
    EARLY_BYTES,
    EXCHANGE_WORDS,
    GROUP,
    STAGE_BYTES,
    STAGE_K,
    TILE_N,
    LayerProductsConfig,
    config_for,
)
from cute_kernels.gemm.layer.loads import Loader
from cute_kernels.gemm.layer.memory import Product
from cute_kernels.gemm.layer.multiply import FRAGMENT_N, FRAGMENTS, SUMS, Multiplier
from cute_kernels.gemm.layer.rows import PASSES, WARP_GROUPS, Row
from cute_kernels.runtime.workspace import COUNTER_SLAB_WORDS
from simulator.backend import Altered, Meanings
from simulator.plain import stand_in
from simulator.registers import Register
from tests.attention.warp import LANES, Int32, Warp, elements, from_halves, halves
from tests.launchers import given_to, recording
from tests.linear.cases import known
from tests.tensors import offset

STAGES, LIMBS, X_SCALES, SQUARES = 0, 1 << 16, 3 << 16, (3 << 16) + (1 << 12)
CODES, SCALES, X, NORM = 0, 1 << 20, (3 << 19) + 512, (3 << 19) + (1 << 16)


class LayerWarp(Warp):
    """A warp with what these launches have more."""

    def meanings(self) -> Meanings:
        found = super().meanings()
        own = {"multiply_bytes": self.multiply_bytes, "copy_elected": self.copy_elected}
        return Meanings(found.instructions, found.arch, found.cute, found.cutlass, found.scalars, {instructions: own})

    def load_relaxed(self, address, num_words: int, *, offset: int = 0):
        return self.load_global_words(address, offset, num_words, constant=False)

    def load_shared_part(self, address, offset: int, num_bytes: int):
        places = np.broadcast_to(np.asarray(address, np.int64) + offset, (32,))
        assert num_bytes == 2 and not (places % 2).any()
        return self.shared_memory.view(np.uint16)[places // 2].astype(np.uint32).view(Register)

    def to_float(self, x):
        return np.asarray(x, np.int32).astype(np.float32).view(Register)

    def greater_magnitude(self, a, b, *, dtype: str):
        left, right = (np.abs(elements(word, dtype)) for word in (a, b))
        return from_halves(np.where(left >= right, halves(a), halves(b)))

    def copy_elected(self, destination, source, num_bytes: int, barrier) -> None:
        target, start = int(np.asarray(destination).reshape(-1)[0]), int(np.asarray(source).reshape(-1)[0])
        assert not (target | start | num_bytes) % 16
        self.shared_memory[target : target + num_bytes] = self.global_memory[start : start + num_bytes]

    def multiply_bytes(self, sums, a, b):
        """The instruction's fragments, from the PTX manual."""
        row, column = LANES // 4, LANES % 4
        left, right = np.zeros((16, 32), np.int64), np.zeros((32, 8), np.int64)
        for i, word in enumerate(a):
            of_lanes = np.broadcast_to(np.asarray(word, np.uint32), (32,)).copy().view(np.int8).reshape(32, 4)
            for byte in range(4):
                left[row + 8 * (i % 2), 4 * column + byte + 16 * (i // 2)] = of_lanes[:, byte]
        for i, word in enumerate(b):
            of_lanes = np.broadcast_to(np.asarray(word, np.uint32), (32,)).copy().view(np.int8).reshape(32, 4)
            for byte in range(4):
                right[4 * column + byte + 16 * i, row] = of_lanes[:, byte]
        product = left @ right
        found = [product[row + 8 * (i // 2), 2 * column + i % 2] for i in range(4)]
        totals = [np.broadcast_to(np.asarray(c, np.int64), (32,)) + one for c, one in zip(sums, found, strict=True)]
        return [total.astype(np.int32).view(Register) for total in totals]


def bytes_of(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().view(torch.uint8).numpy().reshape(-1)


class Cta:
    """A CTA's memory, with one product's weight and row."""

    def __init__(self, n: int, k: int, run_on):
        self.config = LayerProductsConfig(-(-k // GROUP), 16)
        self.weight, generator = known(n, k, group_size=GROUP), torch.Generator().manual_seed(k + 1)
        self.x = torch.randn(1, k, generator=generator).bfloat16()
        self.norm = torch.rand(k, generator=generator).bfloat16()
        packed = self.weight.pack()
        memory = np.zeros(1 << 21, np.uint8)
        written = ((CODES, packed.codes), (SCALES, packed.scales), (X, self.x), (NORM, self.norm))
        for place, tensor in written:
            found = bytes_of(tensor)
            memory[place : place + len(found)] = found
        self.warp = LayerWarp(np.full(1 << 18, 0xAA, np.uint8), memory)
        run_on(self.warp)
        places = {"stages": STAGES, "limbs": LIMBS, "x_scales": X_SCALES, "squares": SQUARES}
        weights = Pipeline(stand_in(Barriers()), stand_in(Barriers()), 16)
        self.memory: Any = SimpleNamespace(**places, weights=weights)
        self.k, self.n = k, n

    def product(self, norm: bool) -> Product:
        """Its row is the result of another where a norm is taken of it."""
        return Product(*map(stand_in, (CODES, SCALES, NORM if norm else 0, 0, self.n, self.k, 0, 0, 0, 0, X % 4096)))

    def make_row(self, norm: bool, offset: float = 0.0) -> None:
        row, sizes = Row(self.config), stand_in(SimpleNamespace(offset=np.float32(offset), x=X))
        exchange = stand_in(SimpleNamespace(address=X - X % 4096))
        total = self.k // GROUP
        for warp in range(self.config.consumer_warps):
            for first in range(warp * WARP_GROUPS, total, PASSES * row.pass_groups):
                at = self.product(norm), exchange, int(norm), Int32(first), Int32(LANES)
                row.make_groups(sizes, self.memory, *at)

    def tile(self, number: int) -> np.ndarray:
        """A work tile's sums of 32 features, by one warp."""
        loader, multiplier = Loader(self.config), Multiplier(self.config)
        half, whole = number & 1, number >> 1
        codes = CODES + whole * self.k * 32 + half * 1024
        scales = SCALES + whole * self.k + half * 64
        acc = [np.zeros(32, np.float32).view(Register) for _ in range(SUMS)]
        for j in range(self.k // STAGE_K):
            here = self.memory.weights.producer_state_of(5 + j)
            loader.copy_stage(self.memory, here, codes, scales, j)
            multiplier.multiply_stage(acc, self.memory, here.stage, j, np.uint32(0x80808080), Int32(LANES))
        found, own = np.zeros(TILE_N, np.float32), LANES[::4]
        for fragment in range(FRAGMENTS):
            for k in range(2):
                found[FRAGMENT_N * fragment + 8 * k + own // 4] = acc[fragment * 2 + k][own]
        return found


def scalar(x: Any) -> int:
    """A number that is alike in all lanes."""
    (value,) = set(np.asarray(x).reshape(-1).tolist())
    return value


class Barriers:
    def __add__(self, _):
        return SimpleNamespace(toint=lambda: Int32(0))


@pytest.mark.parametrize("norm", [False, True])
def test_warps_multiply_a_work_tile_as_fp64_does(norm: bool, run_on):
    cta = Cta(128, 1024, run_on)
    cta.make_row(norm, 0.25)
    x = cta.x
    if norm:
        x = (x.float() * (cta.norm.float() + 0.25)).bfloat16()
        squares = cta.warp.shared_memory[SQUARES:].view(np.float32)[:8]
        exact = cta.x.double().square().view(8, GROUP).sum(-1)
        assert np.allclose(squares, exact.numpy(), rtol=1e-6)
    exact = (x.double() @ cta.weight.dense.T).numpy()[0]
    for number in range(4):
        wanted = exact[number * TILE_N : (number + 1) * TILE_N]
        assert np.allclose(cta.tile(number), wanted, rtol=0, atol=2e-5 * np.abs(exact).max())


@pytest.mark.parametrize("num_ctas, num_tiles", [(132, 192), (132, 128), (7, 40), (1, 3)])
def test_work_tiles_of_the_last_product_are_dealt_out(num_ctas: int, num_tiles: int, run_on):
    """Each CTA's first one is the only number of them that it draws."""
    run_on(LayerWarp(np.zeros(16, np.uint8), np.zeros(16, np.uint8)))
    loader, begin = Loader(LayerProductsConfig(32, 40)), 1000
    sizes: Any = stand_in(SimpleNamespace(waited_for=begin, num_ctas=num_ctas, num_tiles=begin + num_tiles))
    taken = []
    for first in range(begin, begin + num_ctas):
        taken.append([])
        while first < begin + num_tiles:
            taken[-1].append(first)
            first = scalar(loader.following(sizes, Int32(first)))
    assert sorted(tile for own in taken for tile in own) == list(range(begin, begin + num_tiles))
    assert max(map(len, taken)) - min(map(len, taken)) <= 1


def test_more_is_asked_for_where_nobody_waits(run_on):
    run_on(LayerWarp(np.zeros(16, np.uint8), np.zeros(16, np.uint8)))
    config = LayerProductsConfig(112, 40)
    loader, sizes = Loader(config), stand_in(SimpleNamespace(first_end=128, second_end=1024, num_ctas=132))
    wide = [tile for tile in range(1344) if scalar(loader.window_of(sizes, Int32(tile))) == config.wide_window]
    assert wide == list(range(128 + 132, 1024 - 132))
    few = stand_in(SimpleNamespace(first_end=32, second_end=200, num_ctas=132))
    assert all(scalar(loader.window_of(few, Int32(tile))) == config.window for tile in range(300))


@pytest.mark.parametrize("num_ctas", [1, 7, 132])
@pytest.mark.parametrize("n, k", [(4096, 4096), (8192, 8192), (256, 512)])
def test_the_first_weights_are_asked_for_once(n: int, k: int, num_ctas: int, run_on):
    warp, asked = LayerWarp(np.zeros(16, np.uint8), np.zeros(16, np.uint8)), []
    ask = {memory_of.numbers: {"prefetch_bulk_if": lambda *given: asked.append([scalar(x) for x in given])}}
    scales = 1 << 30
    product = Product(*map(stand_in, (0, scales, 0, 0, n, k, 0, 0, 0, 0, 0)))
    for cta in range(num_ctas):
        run_on(Altered(warp, modules=ask, arch={"block_idx": lambda cta=cta: (cta, 0, 0)}))
        memory_of.ask_early(stand_in(SimpleNamespace(num_ctas=num_ctas)), product)
    size = min(n * k // 2, EARLY_BYTES)
    there = {0: np.zeros(size, np.int8), scales: np.zeros(size // 32, np.int8)}
    for condition, address, num_bytes in asked:
        if condition:
            begin = scales if address >= scales else 0
            assert not (address | num_bytes) % 16 and address - begin + num_bytes <= len(there[begin])
            there[begin][address - begin : address - begin + num_bytes] += 1
    assert all((count == 1).all() for count in there.values())


def test_there_are_as_many_stages_as_there_is_room_for():
    for most_k, stages in ((4096, 40), (14336, 40), (28672, 32)):
        config = config_for(most_k)
        assert config is not None and config.num_stages >= stages
        assert config.shared_bytes + config.consumer_warps * (STAGE_BYTES + 16) > config.limits.shared_bytes
    assert config_for(1 << 18) is None


def layer_call(m: int, hidden: int = 512, heads: int = 256, inner: int = 768, qkv: int | None = 384, **weights: Any):
    """A call's arguments, on the CPU."""
    shapes = {"o": (hidden, heads), "gate_up": (2 * inner, hidden), "down": (hidden, inner)}
    if qkv is not None:
        shapes["qkv"] = (qkv, hidden)
    packed = {name: known(*shape, group_size=GROUP, seed=i).pack() for i, (name, shape) in enumerate(shapes.items())}
    generator = torch.Generator().manual_seed(m)
    x, residual = (torch.randn(m, size, generator=generator).bfloat16() for size in (heads, hidden))
    norms = {name: torch.rand(hidden, generator=generator).bfloat16() for name in ("norm", "following_norm")}
    return {"x": x, **packed, "residual": residual, **norms, "norm_eps": 1e-5, **weights}


@pytest.mark.parametrize(("m", "qkv"), [(1, 384), (1, None)])
def test_one_launch_has_all_products(m: int, qkv: int | None):
    given = layer_call(m, qkv=qkv)
    with recording() as cache:
        for _ in range(2):
            found = quantized_layer(**given)
    assert len(cache.launches) == 2 and found.rows.norm is given["following_norm"]
    assert found.rows.rows.shape == (m, 512) and (found.qkv is None) == (qkv is None)
    passed = given_to(LAYER_PRODUCTS, *cache.launches[1].arguments)
    names = [name for name in ("o", "gate_up", "down", "qkv") if name in given]
    for i, fields in enumerate(PRODUCTS):
        values = {field: getattr(passed, name) for field, name in fields.items()}
        if i >= len(names):
            assert not any(values.values())
            continue
        weight = given[names[i]]
        assert (values["n"], values["k"], values["gated"]) == (*weight.shape, int(names[i] == "gate_up"))
        assert (values["codes"], values["scales"]) == (weight.codes.data_ptr(), weight.scales.data_ptr())
    assert passed.x.data_ptr() == given["x"].data_ptr() and passed.residual == given["residual"].data_ptr()
    assert (passed.out_0, passed.out_1) == (0, 0) and passed.out_2 == found.rows.rows.data_ptr()
    assert (passed.norm_0, passed.norm_1, passed.norm_2) == (0, given["norm"].data_ptr(), 0)
    assert [getattr(passed, f"adds_{i}") for i in range(4)] == [0, 0, 1, 0] and passed.exchange == EXCHANGE_WORDS
    assert passed.num_ctas == min(132, sum(given[name].shape[0] for name in names) // TILE_N)


@pytest.mark.parametrize("why", ["rows", "zero points", "norm", "groups"])
def test_other_layers_are_launched_product_by_product(why: str):
    given = layer_call(2 if why == "rows" else 1)
    if why == "zero points":
        given["down"] = known(512, 768, group_size=GROUP, zero_point=True).pack()
    if why == "groups":
        given["o"] = known(512, 256, group_size=64).pack()
    if why == "norm":
        given["norm"] = given["norm"].float()
    with recording() as cache:
        quantized_layer(**given)
    assert len(cache.launches) >= 4


def test_a_cpu_computes_the_calls_that_a_layer_stands_for():
    given = layer_call(2)
    found = quantized_layer(**given)
    middle = quantized_linear_norm(
        given["x"], given["o"], residual=given["residual"], norm=given["norm"], norm_eps=1e-5
    )
    gated = quantized_linear(middle, given["gate_up"], activation="swiglu")
    rows = quantized_linear_norm(
        gated, given["down"], residual=middle.rows, norm=given["following_norm"], norm_eps=1e-5
    )
    assert torch.equal(found.rows.rows, rows.rows)
    assert found.qkv is not None and torch.equal(found.qkv, quantized_linear(rows, given["qkv"]))


def test_what_does_not_fit_is_refused_by_name():
    given = layer_call(2)
    wrong = {
        "gate_up": given["down"], "down": given["o"], "qkv": given["down"], "o": None,
        "residual": given["x"], "norm": given["norm"][1:], "following_norm": given["norm"][1:], "x": given["residual"],
    }  # fmt: skip
    for name, value in wrong.items():
        with pytest.raises((TypeError, ValueError), match=f"^{name}: "):
            quantized_layer(**{**given, name: value})


@pytest.mark.parametrize("name", ["gate_up", "down", "qkv"])
def test_weights_are_where_o_is_and_for_the_same_rows(name: str):
    given = layer_call(1)
    with recording() as cache:
        with pytest.raises(ValueError, match=f"^{name}: got a weight on meta"):
            quantized_layer(**{**given, name: given[name].to("meta")})
        scales = given[name].scales
        other = replace(given[name], scales=scales.half())
        with pytest.raises(TypeError, match=f"^{name}: got a weight for rows of torch.float16"):
            quantized_layer(**{**given, name: other})
    assert not cache.launches


@pytest.mark.parametrize("name", ["norm", "following_norm"])
def test_norms_off_16_bytes_are_refused_by_their_own_names(name: str):
    given = layer_call(1)
    with recording() as cache, pytest.raises(ValueError, match=f"^{name}: got a tensor that starts 2 bytes past"):
        quantized_layer(**{**given, name: offset(given[name], 2)})
    assert not cache.launches


def test_forty_graphs_have_words_of_their_own():
    assert 40 * -(-EXCHANGE_WORDS // 64) * 64 <= COUNTER_SLAB_WORDS
