"""Experts with FP8 activations and few rows on a GPU, by 16-bit products of rounded rows: against fp64 on the rounded
operands, and bit for bit those of 16-bit calls."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn import functional

from cute_kernels import PackedExperts, fused_moe, grouped_linear, quantize_experts
from cute_kernels.formats.weights import weight_format
from cute_kernels.gemm.experts.plan import LayerForm, gathering, moe_plan_of
from cute_kernels.gemm.experts.product import product_of, rounding
from cute_kernels.gemm.operands.fp8 import fp8_rows
from cute_kernels.gemm.packed_experts import ExpertsForm
from cute_kernels.gemm.weight import padded_shape
from cute_kernels.runtime import KernelSpec, arch_of, load_many
from tests.gpu.compiled import assert_replays, compiled
from tests.gpu.specs import products_needed_by
from tests.linear.test_fp8 import relative_error

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("row_kernels")]

BF16, CUDA = torch.bfloat16, "cuda"
TOLERANCE = 1e-2  # hidden activations near the middle of two codes go to either


class Case(NamedTuple):
    """A layer of experts, and the calls that it is tested with. down: the format of the second weight, if another."""

    form: str
    experts: int
    hidden: int
    inner: int
    topk: int
    tokens: tuple[int, ...]
    down: str = ""

    @property
    def formats(self) -> tuple[str, str]:
        return self.form, self.down or self.form

    def forms(self, activations: str | None) -> list[ExpertsForm]:
        """The forms of both products on a CPU."""
        forms, found = map(weight_format, self.formats), []
        for size, form in zip(((2 * self.inner, self.hidden), (self.hidden, self.inner)), forms, strict=True):
            k_pad = padded_shape(size, form.group_size or None)[1]
            found.append(ExpertsForm(self.experts, *size, k_pad, form, BF16, -1, activations))
        return found


CASES = {
    "as gpt-oss": Case("mxfp4", 16, 2880, 2880, 4, (1, 3, 8)),
    "as DeepSeek-V3": Case("fp8_block", 32, 7168, 512, 8, (1, 4)),
    "4 bits, sorted": Case("w4g128", 72, 512, 384, 2, (1, 33, 72)),
    "a scale a row, sorted": Case("fp8", 72, 512, 256, 2, (5, 33)),
    "blocks, sorted": Case("fp8_block", 72, 512, 256, 2, (5, 33)),
    "rows in order of places": Case("mxfp4", 71, 512, 256, 2, (33, 71)),
    "no whole pieces": Case("mxfp4", 8, 260, 132, 2, (1, 8)),
    "tiles of limbs": Case("w4g128", 71, 512, 384, 2, (33, 71)),
    "tiles of 16 bits": Case("mxfp8", 16, 512, 256, 4, (33,)),
    "two formats": Case("fp8_block", 32, 512, 384, 4, (1, 65), "w4g128"),
}
CALLS = [(name, tokens) for name, case in CASES.items() for tokens in case.tokens]
every_call = pytest.mark.parametrize("name, tokens", CALLS)


def specs() -> list[KernelSpec]:
    """The kernels of this module."""

    def plan_all() -> None:
        for name, tokens in CALLS:
            case = CASES[name]
            for activations in ("fp8", None):  # and those of the 16-bit calls that these are compared with
                first, second = case.forms(activations)
                for out_dtype in (BF16, torch.float32):
                    moe_plan_of(LayerForm(tokens, case.topk, 64, first, second), out_dtype)
            places = tokens * case.topk
            product, rounds = product_of(places, case.forms("fp8")[0]), rounding(50, places, case.forms("fp8")[0])
            assert rounds is not None
            if not product.gathers:
                gathering(places, case.forms(None)[0])

    return products_needed_by(plan_all)


@pytest.fixture(scope="module")
def row_kernels() -> None:
    """Every kernel of these tests, in memory: from a bundle or the cache, or compiled in parallel now."""
    load_many(specs(), arch_of())


def numbers(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator(CUDA).manual_seed(seed), device=CUDA).to(BF16)


@functools.lru_cache(maxsize=1)
def layer(name: str) -> tuple[PackedExperts, PackedExperts]:
    case = CASES[name]
    sizes = (2 * case.inner, case.hidden), (case.hidden, case.inner)
    gate_up, down = (
        quantize_experts(numbers(case.experts, n, k, seed=n) * k**-0.5, format=form, dtype=BF16)
        for (n, k), form in zip(sizes, case.formats, strict=True)
    )
    return gate_up, down


def call(name: str, tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, ids, and the experts' shares. Half of the experts have no rows, and an assignment is of no expert."""
    case, generator = CASES[name], torch.Generator().manual_seed(seed)
    ids = torch.rand(tokens, case.experts // 2, generator=generator).argsort(1)[:, : case.topk] * 2
    ids[-1, -1] = -1
    shares = torch.rand(tokens, case.topk, generator=generator) + 0.1
    return numbers(tokens, case.hidden, seed=seed + 10), ids.to(CUDA), shares.to(CUDA)


def poison() -> None:
    """Leaves NaN in the memory that the next allocations get."""
    held = [torch.full((size,), math.nan, dtype=BF16, device=CUDA) for size in (*[1 << 17] * 64, 1 << 26)]
    del held


def exact(name: str, x: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """A layer in fp64 on rounded operands."""
    gate_up, down = layer(name)

    def product(x: torch.Tensor, weight: PackedExperts, expert: int) -> torch.Tensor:
        return weight[expert].dequantize(torch.float32).double() @ fp8_rows(x[None], weight.format)[0].double()

    found = torch.zeros(len(x), CASES[name].hidden, dtype=torch.float64, device=CUDA)
    for token, slot in (ids >= 0).nonzero().tolist():
        expert = int(ids[token, slot])
        sums = product(x[token], gate_up, expert)
        hidden = (functional.silu(sums[::2]) * sums[1::2]).to(BF16)
        found[token] += shares[token, slot].double() * product(hidden, down, expert)
    return found


@every_call
def test_a_layer_of_few_rows_is_exact_on_rounded_operands(name, tokens):
    x, ids, shares = call(name, tokens)
    want = exact(name, x, ids, shares)
    for dtype in (BF16, torch.float32):
        out = torch.full((tokens, CASES[name].hidden), math.nan, dtype=dtype, device=CUDA)
        poison()
        fused_moe(x, *layer(name), shares, ids, activations="fp8", out=out)
        assert relative_error(out, want) < TOLERANCE
    assert relative_error(fused_moe(x, *layer(name), shares, ids), want) > TOLERANCE  # which rounds nothing


@every_call
@pytest.mark.parametrize("by_index", [False, True])
def test_a_grouped_product_of_few_rows_is_the_16_bit_product_of_rounded_rows(name, tokens, by_index):
    """Bit for bit. Some experts have no rows, and the last places have no expert."""
    case, weight = CASES[name], layer(name)[0]
    places, generator = tokens * case.topk, torch.Generator().manual_seed(tokens)
    counts = torch.bincount(torch.randint(0, case.experts, (places - places // 4,), generator=generator) // 2 * 2)
    counts = functional.pad(counts, (1, case.experts - len(counts)))
    offsets, used = counts.cumsum(0).int().to(CUDA), int(counts.sum())
    rows = torch.randint(0, 50, (places,), generator=generator).int().to(CUDA)
    x = numbers(50 if by_index else places, case.hidden)
    in_order = fp8_rows(x, weight.format).to(BF16)[rows.long() if by_index else slice(None)].contiguous()
    out = torch.full((places, weight.shape[0]), 7.0, dtype=BF16, device=CUDA)
    poison()
    grouped_linear(x, weight, offsets, rows=rows if by_index else None, activations="fp8", out=out)
    assert torch.equal(out[:used], grouped_linear(in_order, weight, offsets)[:used])
    assert torch.all(out[used:] == 7.0)


@every_call
def test_what_is_not_finite_makes_its_tokens_results_nan_and_no_others(name, tokens):
    x, ids, shares = call(name, tokens)
    x[0, 5] = torch.inf
    x[tokens // 2, -1] = torch.nan
    y = fused_moe(x, *layer(name), shares, ids, activations="fp8")
    bad = torch.zeros(tokens, dtype=torch.bool, device=CUDA)
    bad[[0, tokens // 2]] = True
    assert y[bad].isnan().all() and y[~bad].isfinite().all()


@every_call
def test_a_captured_layer_takes_new_inputs_and_routing(name, tokens):
    weights = layer(name)

    def step(x: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        return fused_moe(x, *weights, shares, ids, activations="fp8")

    for function in (step, compiled(step)):
        assert_replays(function, call(name, tokens), [call(name, tokens, seed) for seed in (1, 2)])


@every_call
def test_layers_behind_each_other_read_what_those_before_have_written(name, tokens):
    """Each begins while the last one ends: on rows of its result, by ids and weights that have just been made of it."""
    case, weights = CASES[name], layer(name)
    router = numbers(case.hidden, case.experts, seed=5).float()

    def chain(pause: Callable[[], Any]) -> torch.Tensor:
        x = numbers(tokens, case.hidden)
        for _ in range(20):
            shares, ids = (x.float() @ router).softmax(-1).topk(case.topk)
            pause()
            y = fused_moe(x, *weights, shares, ids, activations="fp8")
            pause()
            again = fused_moe(y, *weights, shares, ids, activations="fp8")  # no launch of another kind between
            pause()
            x = functional.layer_norm((x + y + again).float(), (case.hidden,)).to(BF16)
        return x

    wanted = chain(torch.cuda.synchronize)
    assert wanted.isfinite().all()
    for _ in range(3):
        assert torch.equal(chain(lambda: None), wanted)


def test_calls_on_two_streams_do_not_disturb_each_other():
    name, tokens = "4 bits, sorted", 33
    weights, calls = layer(name), [call(name, tokens, seed) for seed in (3, 4)]

    def step(x: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        return fused_moe(x, *weights, shares, ids, activations="fp8")

    wanted, streams = [step(*given) for given in calls], [torch.cuda.Stream() for _ in calls]
    torch.cuda.synchronize()
    for _ in range(20):
        found = []
        for stream, given in zip(streams, calls, strict=True):
            with torch.cuda.stream(stream):
                found.append(step(*given))
        torch.cuda.synchronize()
        assert all(torch.equal(one, want) for one, want in zip(found, wanted, strict=True))
