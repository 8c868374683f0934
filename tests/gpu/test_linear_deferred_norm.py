"""Products around a deferred norm on a GPU: against fp64, against three launches, repeats, chains, graphs.

What the first product leaves and what the second one takes is one pair of kernels for each number of rows.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

from cute_kernels import NormedRows, PackedWeight, quantized_linear, quantized_linear_norm, rms_norm
from cute_kernels.gemm import deferred_ops
from cute_kernels.gemm.choice import chosen
from cute_kernels.gemm.deferred import DeferredParts, leaves_norm
from cute_kernels.gemm.deferred_choice import config_beside_a_norm
from cute_kernels.gemm.spec import GemmSpec
from cute_kernels.gemm.wgmma.deferred_config import GIVES, TAKES, DeferredKind
from cute_kernels.runtime.spec import KernelSpec
from tests.gpu.test_linear import activations, check_back_to_back, is_rounded
from tests.linear.cases import activated, known, problem_of, with_parts

pytestmark = pytest.mark.gpu

# (K of the first product, its N and so the K of the second, N of the second): clusters that reduce through DSMEM or
# exchange rows, parts of K in memory, several work tiles of a CTA, a last block of features that is not full.
PAIRS = [(1024, 1024, 520), (576, 768, 2048), (2048, 4096, 6144), (1024, 1024, 28_672), (1024, 8192, 1280)]
PAIRS += [(3584, 8192, 7168)]
ROWS = (1, 2, 8, 17, 32, 63, 64, 65)
# With 64 rows CTAs of the fourth take a norm in two work tiles.
DEFERRED_ROWS = [(PAIRS[2], 1), (PAIRS[3], 1), (PAIRS[2], 32), (PAIRS[3], 64), (PAIRS[4], 64), (PAIRS[5], 64)]
OTHER_PAIR, FEWER_ROWS = (512, 1024, 2048), (1, 8, 32, 64)
OTHERS = [(4, 128, True), (4, 64, False), (4, 32, True), (4, None, False), (8, 128, False), (8, 64, True)]
EPS, OFFSET = 1e-5, 0.25
SEVERAL_TILES = (231, 256)  # rows of few features: three tiles of 96 in clusters of four
CASES = [(*pair, m) for m in ROWS for pair in PAIRS] + [(*PAIRS[4], m) for m in SEVERAL_TILES]


def sides(k: int, hidden: int, n: int) -> list[tuple[DeferredKind, tuple[int, int]]]:
    """Of a pair, (N, K) by the side of the norm."""
    return [(GIVES, (hidden, k)), (TAKES, (n, hidden))]


def specs() -> list[KernelSpec]:
    """The kernels of this module."""
    found: dict[KernelSpec, None] = {}
    for k, hidden, n, m in CASES:
        for kind, size in sides(k, hidden, n):
            problem = problem_of(m, *size, 4, torch.bfloat16, 128, False)
            schedule = chosen(problem)
            config = config_beside_a_norm(problem, schedule, kind)
            found[GemmSpec(schedule.config)] = None
            if config is not None:
                found[GemmSpec(config)] = None
    return list(found | dict.fromkeys(specs_of_others()))


def specs_of_others() -> list[KernelSpec]:
    """Those of weights that ship no kernels around norms."""
    found: dict[KernelSpec, None] = {}
    for bits, group_size, zero_point in OTHERS:
        for m in FEWER_ROWS:
            for kind, size in sides(*OTHER_PAIR):
                problem = problem_of(m, *size, bits, torch.bfloat16, group_size, zero_point)
                schedule = chosen(problem)
                config = config_beside_a_norm(problem, schedule, kind)
                found |= {GemmSpec(schedule.config): None}
                if config is not None:
                    found[GemmSpec(config)] = None
    return list(found)


@cache
def weight_of(n: int, k: int, seed: int) -> tuple[PackedWeight, torch.Tensor]:
    """A weight, and what it stands for in fp64."""
    reference = known(n, k, group_size=128, seed=seed)
    return reference.pack().to("cuda"), reference.dense.cuda()


class Pair:
    """Two products and the norm between them."""

    def __init__(self, k: int, hidden: int, n: int, m: int):
        self.down, _ = weight_of(hidden, k, 0)
        self.up, self.dense = weight_of(n, hidden, 1)
        if is_rounded(problem_of(m, n, hidden, 4, torch.bfloat16, 128, False)):
            self.dense = self.dense.bfloat16().double()
        self.x, self.residual = activations(m, k, torch.bfloat16, m), activations(m, hidden, torch.bfloat16, 2)
        # Rows of very different sizes: each has a factor of its own.
        self.residual *= torch.logspace(-1, 2, m, device="cuda")[:, None].bfloat16()
        self.norm, self.bias = (activations(1, hidden, torch.bfloat16, seed)[0] for seed in (3, 8))

    def rows(self) -> NormedRows:
        options = {"residual": self.residual, "norm": self.norm, "norm_eps": EPS, "norm_offset": OFFSET}
        return quantized_linear_norm(self.x, self.down, self.bias, **options)

    def exact(self, rows: torch.Tensor) -> torch.Tensor:
        """The second product in fp64, of rows normed in fp64."""
        row = rows.double()
        normed = row * (row.square().mean(-1, keepdim=True) + EPS).rsqrt() * (self.norm.double() + OFFSET)
        return normed @ self.dense.T


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest of any row, of the row's norm."""
    return float(((found.double() - exact).norm(dim=-1) / exact.norm(dim=-1)).max())


@pytest.mark.parametrize("k, hidden, n, m", CASES)
def test_a_product_of_deferred_rows_is_that_of_fp64(k, hidden, n, m):
    pair = Pair(k, hidden, n, m)
    given = pair.rows()
    assert torch.equal(given.rows, quantized_linear(pair.x, pair.down, pair.bias, residual=pair.residual))
    if given.deferred is not None:
        weighted = given.rows.float() * (pair.norm.float() + OFFSET)
        assert torch.equal(given.deferred.scaled, weighted.bfloat16())
        sums = given.rows.double().view(m, -1, 64).square().sum(-1)
        assert torch.allclose(given.deferred.squares.double(), sums, rtol=1e-6, atol=0)
    exact = pair.exact(given.rows)
    found = quantized_linear(given, pair.up, out_dtype=torch.float32)
    apart = quantized_linear(given.normed(), pair.up, out_dtype=torch.float32)
    assert error(found, exact) <= 1.3 * error(apart, exact) <= 1e-2  # both round a normed row once
    assert torch.equal(quantized_linear(given, pair.up, out_dtype=torch.float32), found)


@pytest.mark.parametrize("m", FEWER_ROWS)
@pytest.mark.parametrize(("bits", "group_size", "zero_point"), OTHERS)
def test_weights_of_other_formats_leave_norms_and_take_them(bits, group_size, zero_point, m):
    k, hidden, _ = OTHER_PAIR
    sizes = [size for _, size in sides(*OTHER_PAIR)]
    first, second = (known(*size, bits, group_size, zero_point, seed=i) for i, size in enumerate(sizes))
    down, up = first.pack().to("cuda"), second.pack().to("cuda")
    x, residual = activations(m, k, torch.bfloat16, m), activations(m, hidden, torch.bfloat16, 2)
    norm = activations(1, hidden, torch.bfloat16, 3)[0]
    given = quantized_linear_norm(x, down, residual=residual, norm=norm, norm_eps=EPS, norm_offset=OFFSET)
    assert given.deferred is not None or not leaves_norm(m, down, up)
    assert torch.equal(given.rows, quantized_linear(x, down, residual=residual))
    row = given.rows.double()
    normed = row * (row.square().mean(-1, keepdim=True) + EPS).rsqrt() * (norm.double() + OFFSET)
    exact = normed @ second.dense.cuda().T
    found, apart = (quantized_linear(rows, up, out_dtype=torch.float32) for rows in (given, given.normed()))
    assert error(found, exact) <= 1.3 * error(apart, exact) <= 2e-2
    assert torch.equal(quantized_linear(given, up, out_dtype=torch.float32), found)


@pytest.mark.parametrize(("pair", "m"), DEFERRED_ROWS, ids=str)
def test_these_products_need_no_launch_between_them(pair, m):
    k, hidden, n = pair
    for kind, size in sides(k, hidden, n):
        problem = problem_of(m, *size, 4, torch.bfloat16, 128, False)
        assert config_beside_a_norm(problem, chosen(problem), kind) is not None
    assert Pair(k, hidden, n, m).rows().deferred is not None


@pytest.mark.parametrize("m", [1, 4, 17, 32, 64])
@pytest.mark.parametrize("activation", [None, "silu", "gelu", "swiglu"])
def test_deferred_rows_go_with_every_option(m, activation):
    pair = Pair(1024, 1024, 520, m)
    columns = 260 if activation == "swiglu" else 520
    bias, added = activations(1, 520, torch.bfloat16, 4)[0], activations(m, columns, torch.bfloat16, 5)
    given = pair.rows()
    normed = given.normed()
    for dtype in (torch.bfloat16, torch.float32):
        for options in ({}, {"bias": bias}, {"residual": added.to(dtype)}, {"bias": bias, "residual": added.to(dtype)}):
            options = {**options, "activation": activation, "out_dtype": dtype}
            found, want = (quantized_linear(x, pair.up, **options) for x in (given, normed))
            assert found.dtype == dtype and error(found.float(), want.double()) <= 8e-3
            out = torch.full_like(found, torch.nan)
            assert quantized_linear(given, pair.up, out=out, **options) is out and torch.equal(out, found)
    invariant = quantized_linear(given, pair.up, bias, activation=activation, batch_invariant=True)
    assert torch.equal(invariant, quantized_linear(normed, pair.up, bias, activation=activation, batch_invariant=True))


@pytest.mark.parametrize("m", [1, 17, 32, 64, 4000])
@pytest.mark.parametrize("activation", [None, "swiglu"])
def test_the_operators_are_the_two_calls_or_three_launches(m, activation):
    """Kernels leave the norm for the first four numbers of rows, and a launch makes it for the last."""
    pair = Pair(1024, 1024, 520, m)
    first, second = pair.down, pair.up
    rows, x, squares = deferred_ops.giving(
        pair.x, first.codes, first.scales, None, pair.bias, pair.residual, first.format.key, *first.shape, pair.norm,
        EPS, second.format.key, second.shape[0],
    )  # fmt: skip
    y = deferred_ops.taking(
        x, squares, rows, pair.norm, EPS, first.format.key, first.shape[1], second.codes, second.scales, None, None,
        second.format.key, *second.shape, activation,
    )  # fmt: skip
    given = quantized_linear_norm(pair.x, first, pair.bias, residual=pair.residual, norm=pair.norm, norm_eps=EPS)
    assert leaves_norm(m, first, second) == (m < 4000) == (given.deferred is not None)
    assert torch.equal(rows, given.rows) and torch.equal(y, quantized_linear(given, second, activation=activation))
    assert torch.equal(x, given.normed() if given.deferred is None else given.deferred.scaled)


@pytest.mark.parametrize(("pair", "m"), DEFERRED_ROWS, ids=str)
def test_results_repeat_to_the_bit_in_memory_that_held_nan(pair, m):
    (_, hidden, n), pair, first = pair, Pair(*pair, m), None
    for _ in range(10):
        poison = [torch.full((size,), torch.nan, device="cuda") for size in (m * hidden, m * hidden, m * n, m * 256)]
        del poison  # the allocator hands the same memory out again
        given = pair.rows()
        found = given.rows, quantized_linear(given, pair.up)
        first = first or found
        assert all(torch.equal(a, b) for a, b in zip(found, first, strict=True))
        assert not any(one.isnan().any() for one in found)


@pytest.mark.parametrize("m", [4, 32, 64])
def test_a_row_that_is_not_finite_leaves_the_others_alone(m):
    pair = Pair(1024, 1024, 520, m)
    want = quantized_linear(pair.rows(), pair.up)
    pair.residual[3, 700] = float("inf")
    found = quantized_linear(pair.rows(), pair.up)
    others = torch.arange(m, device="cuda") != 3
    assert found[3].isnan().all() and torch.equal(found[others], want[others])


def test_rows_of_zeros_are_what_a_norm_makes_of_them():
    """0 with an eps, NaN without one: as by `rms_norm`."""
    pair = Pair(1024, 1024, 520, 32)
    for tensor in (pair.x, pair.residual, pair.bias):
        tensor.zero_()
    for eps in (0.0, 1e-6):
        given = quantized_linear_norm(pair.x, pair.down, residual=pair.residual, norm=pair.norm, norm_eps=eps)
        found, want = quantized_linear(given, pair.up), quantized_linear(given.normed(), pair.up)
        assert given.deferred is not None and torch.equal(found.isnan(), want.isnan()) and not found.nan_to_num().any()


def test_sums_behind_the_last_row_are_not_read():
    """The kernel's tile has room for more rows than there are; what lies behind their sums is poison."""
    pair = Pair(1024, 1024, 520, 33)
    given = pair.rows()
    assert given.deferred is not None
    want = quantized_linear(given, pair.up)
    poisoned = []
    for part in (given.deferred.scaled, given.deferred.squares):
        whole = torch.full((64, part.shape[1]), torch.nan, dtype=part.dtype, device="cuda")
        whole[:33] = part
        poisoned.append(whole[:33])
    found = quantized_linear(with_parts(given, DeferredParts(*poisoned)), pair.up)
    assert torch.equal(found, want)
    with pytest.raises(ValueError, match="^x.deferred.squares: got a tensor on cpu, want it on cuda:0"):
        elsewhere = replace(given.deferred, squares=given.deferred.squares.cpu())
        quantized_linear(with_parts(given, elsewhere), pair.up)


def test_weights_that_are_prepared_for_and_others_go_the_way_of_three_launches():
    m, pair = 32, Pair(1024, 1024, 520, 32)
    given = pair.rows()
    scaled = replace(pair.up, input_scale=activations(1, 1024, torch.bfloat16, 6)[0])
    assert torch.equal(quantized_linear(given, scaled), quantized_linear(given.normed(), scaled))
    order = torch.randperm(1024, device="cuda").to(torch.int32)
    ordered = replace(pair.down, perm=order)
    rows = quantized_linear_norm(pair.x, ordered, residual=pair.residual, norm=pair.norm)
    assert torch.equal(rows.rows, quantized_linear(pair.x, ordered, residual=pair.residual))
    wide = quantized_linear_norm(pair.x, pair.down, residual=pair.residual, norm=pair.norm.float())
    assert wide.deferred is None and wide.normed().shape == (m, 1024)


@pytest.mark.parametrize("m", [1, 8, 17, 32, 64])
def test_no_launch_of_a_chain_is_overtaken_and_a_graph_computes_the_same(m):
    """Layers in a chain of dependent launches, each of which reads what the last one has just written."""
    pair = Pair(1024, 1024, 2048, m)
    start, (second, _) = pair.residual, weight_of(1024, 1024, 5)

    def chain(after) -> torch.Tensor:
        hidden = NormedRows(start.clone(), pair.norm, EPS)
        for _ in range(6):
            gated = quantized_linear(hidden, pair.up, activation="swiglu")
            after()
            hidden = quantized_linear_norm(gated, second, residual=hidden.rows, norm=pair.norm, norm_eps=EPS)
            after()
        return hidden.rows

    want = check_back_to_back(chain)
    unfused = start.clone()
    for _ in range(6):
        normed = rms_norm(unfused, pair.norm, eps=EPS)
        gated = activated(quantized_linear(normed, pair.up, out_dtype=torch.float32), "swiglu").bfloat16()
        unfused = quantized_linear(gated, second, residual=unfused)
    assert (want.float() - unfused.float()).norm() <= 2e-2 * unfused.float().norm()
