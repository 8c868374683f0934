"""Products whose rows are scaled, normed or permuted: against fp64, and against launches of their own."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import pytest
import torch

from cute_kernels import quantized_linear, rms_norm
from cute_kernels.gemm import NormedRows, quantize_weight
from cute_kernels.gemm.choice import chosen
from cute_kernels.gemm.spec import GemmSpec
from cute_kernels.runtime.spec import KernelSpec
from tests.gpu.test_linear import activations, check_back_to_back, exact_product
from tests.linear.cases import activated, known, problem_of

pytestmark = pytest.mark.gpu

DTYPES = (torch.bfloat16, torch.float16)
# (n, k): one, two, four and seven tiles of features; K in chunks, which is normed before; ends of rows in 128 inputs.
LAYERS = [(520, 1024), (6144, 4096), (28_672, 1024), (4096, 14_336), (1000, 1096), (384, 136)]
ROWS = (1, 2, 3, 4, 5, 8)
FORMS = [(128, True), (256, True), (32, False), (64, False)]  # group size, zero points: others that limbs take


def specs() -> list[KernelSpec]:
    """The kernels of this module."""
    found: dict[KernelSpec, None] = {}
    for dtype in DTYPES:
        for n, k in LAYERS:
            for m in (*ROWS, 9):
                found[GemmSpec(chosen(problem_of(m, n, k, 4, dtype, 128, False)).config)] = None
    found |= dict.fromkeys(specs_of_wide())
    for n, k in ((2048, 4096), *((300, k) for k in (128, 384, 640, 8192))):
        found[GemmSpec(chosen(problem_of(1, n, k)).config)] = None
    for (group_size, zero_point), (n, k), m in product(FORMS, LAYERS[:3], ROWS):
        found[GemmSpec(chosen(problem_of(m, n, k, 4, DTYPES[0], group_size, zero_point)).config)] = None
    return list(found)


WIDE = (28_672, 4096)  # up to 16 rows of it come in limbs that CTAs make
MORE_ROWS = (9, 13, 16)


def specs_of_wide() -> list[KernelSpec]:
    """The kernels of products of more rows in limbs."""
    return list(dict.fromkeys(GemmSpec(chosen(problem_of(m, *WIDE)).config) for m in MORE_ROWS))


def exact_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0) -> torch.Tensor:
    """In fp64, rounded once to x's dtype as a norm of its own would."""
    row = x.double()
    return (row * (row.square().mean(-1, keepdim=True) + eps).rsqrt() * (weight.double() + offset)).to(x.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n, k", LAYERS)
def test_a_norm_in_a_product_is_that_of_fp64(n, k, dtype):
    reference = known(n, k, dtype=dtype, group_size=128)
    weight = reference.pack().to("cuda")
    for m in ROWS:
        x = activations(m, k, dtype, m) * torch.logspace(-3, 3, m, device="cuda")[:, None].to(dtype)
        norm, bias = activations(1, k, dtype, 7)[0], activations(1, n, dtype, 8)[0]
        found = quantized_linear(x, weight, bias, norm=norm, norm_eps=1e-5, norm_offset=0.5, out_dtype=torch.float32)
        exact = exact_product(exact_norm(x, norm, 1e-5, 0.5), reference) + bias.double()
        # Here and there a normed number is rounded the other way.
        assert (found - exact).norm(dim=-1).max() <= 4e-4 * exact.norm(dim=-1).min(), m
        again = quantized_linear(x, weight, bias, norm=norm, norm_eps=1e-5, norm_offset=0.5, out_dtype=torch.float32)
        assert torch.equal(again, found), m


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n, k", LAYERS)
def test_an_input_scale_in_a_product_is_that_of_rows_scaled_before_bit_for_bit(n, k, dtype):
    plain = known(n, k, dtype=dtype, group_size=128).pack().to("cuda")
    scale = activations(1, k, dtype, 3)[0]
    for m in ROWS:
        x = activations(m, k, dtype, m)
        found = quantized_linear(x, replace(plain, input_scale=scale))
        assert torch.equal(found, quantized_linear(x * scale, plain)), m


@pytest.mark.parametrize("group_size, zero_point", FORMS)
@pytest.mark.parametrize("n, k", LAYERS[:3])
def test_an_input_scale_meets_zero_points_and_small_groups(n, k, group_size, zero_point):
    """The sums that zero points meet are those of scaled rows."""
    plain = known(n, k, 4, group_size, zero_point).pack().to("cuda")
    scale = activations(1, k, torch.bfloat16, 3)[0]
    for m in ROWS:
        x = activations(m, k, torch.bfloat16, m)
        found = quantized_linear(x, replace(plain, input_scale=scale))
        assert torch.equal(found, quantized_linear(x * scale, plain)), m


def in_order_of(k: int) -> torch.Tensor:
    return torch.randperm(k, generator=torch.Generator().manual_seed(k)).to("cuda", torch.int32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n, k", LAYERS)
def test_one_row_in_act_order_is_the_row_put_in_order_before_bit_for_bit(n, k, dtype):
    plain, order = known(n, k, dtype=dtype, group_size=128).pack().to("cuda"), in_order_of(k)
    weight = replace(plain, perm=order)
    for m in (1, 2):
        for seed in range(3):
            x = activations(m, k, dtype, seed)
            bias = activations(1, n, dtype, 8)[0]
            found = quantized_linear(x, weight, bias, activation="silu")
            assert torch.equal(found, quantized_linear(x[:, order.long()].contiguous(), plain, bias, activation="silu"))
            assert torch.equal(found, quantized_linear(x, weight, bias, activation="silu"))


@pytest.mark.parametrize("m", MORE_ROWS)
def test_more_rows_in_limbs_are_scaled_or_put_in_order_bit_for_bit(m):
    n, k = WIDE
    plain = quantize_weight(activations(n, k, torch.bfloat16), bits=4, group_size=128)
    x, scale = activations(m, k, torch.bfloat16, m), activations(1, k, torch.bfloat16, 3)[0]
    order = torch.randperm(k, generator=torch.Generator().manual_seed(m)).to("cuda", torch.int32)
    ways = [
        (replace(plain, input_scale=scale), x * scale),
        (replace(plain, perm=order), x[:, order.long()]),
        (replace(plain, input_scale=scale, perm=order), (x * scale)[:, order.long()]),
    ]
    for weight, prepared in ways:
        want = quantized_linear(prepared, plain)
        for _ in range(2):
            out = torch.full((m, n), math.nan, device="cuda", dtype=x.dtype)
            assert torch.equal(quantized_linear(x, weight, out=out), want)


def test_limbs_of_scaled_rows_wait_for_the_launch_that_makes_the_rows():
    n, k = WIDE
    weight = quantize_weight(activations(n, k, torch.bfloat16), bits=4, group_size=128)
    scale, norm = activations(2, k, torch.bfloat16, 3)
    scaled, start = replace(weight, input_scale=scale), activations(16, k, torch.bfloat16)
    x, out = torch.empty_like(start), torch.empty(16, n, device="cuda", dtype=start.dtype)

    def chain(after):
        for step in range(4):
            rms_norm(start * (step + 1.0), norm, weight_offset=float(step), out=x)
            after()
            quantized_linear(x, scaled, out=out)
            after()
        return out.clone()

    check_back_to_back(chain)


@pytest.mark.parametrize("k", [128, 384, 640, 8192])
def test_orders_that_change_nothing_and_everything(k):
    """With 128 inputs one CTA of a cluster has no k block; what lies around x is nobody's."""
    plain = known(300, k, group_size=128).pack().to("cuda")
    around = torch.full((3 * k,), math.nan, device="cuda", dtype=torch.bfloat16)
    x = around[k : 2 * k].copy_(activations(1, k, torch.bfloat16)[0])[None]
    for order in (torch.arange(k), torch.arange(k).flip(0), torch.arange(k).roll(1)):
        order = order.to("cuda", torch.int32)
        found = quantized_linear(x, replace(plain, perm=order))
        assert found.isfinite().all()
        assert torch.equal(found, quantized_linear(x[:, order.long()].contiguous(), plain))


def test_a_captured_product_puts_another_row_in_order():
    plain, order = known(2048, 4096, group_size=128).pack().to("cuda"), in_order_of(4096)
    weight, x = replace(plain, perm=order), activations(1, 4096, torch.bfloat16)
    out = quantized_linear(x, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        quantized_linear(x, weight, out=out)
    for seed in range(1, 4):
        x.copy_(activations(1, 4096, torch.bfloat16, seed))
        graph.replay()
        assert torch.equal(out, quantized_linear(x[:, order.long()].contiguous(), plain))


@pytest.mark.parametrize("group_size, zero_point", FORMS)
@pytest.mark.parametrize("n, k", LAYERS[:3])
def test_act_order_meets_zero_points_and_small_groups(n, k, group_size, zero_point):
    plain, order = known(n, k, 4, group_size, zero_point).pack().to("cuda"), in_order_of(k)
    x = activations(1, k, torch.bfloat16)
    found = quantized_linear(x, replace(plain, perm=order))
    assert torch.equal(found, quantized_linear(x[:, order.long()].contiguous(), plain))


def test_a_row_in_act_order_waits_for_the_launch_that_makes_it():
    """A chain of dependent launches; the order is loaded before the wait, the row after it."""
    up, down = (known(n, k, group_size=128).pack().to("cuda") for n, k in ((2048, 1024), (1024, 2048)))
    orders, start = [in_order_of(k) for k in (1024, 2048)], activations(1, 1024, torch.bfloat16)

    def chain(after) -> torch.Tensor:
        hidden = start.clone()
        for _ in range(8):
            wide = quantized_linear(hidden, replace(up, perm=orders[0]))
            after()
            hidden = quantized_linear(wide, replace(down, perm=orders[1]))
            hidden = hidden / hidden.norm()
            after()
        return hidden

    want = check_back_to_back(chain)
    unfused = start.clone()
    for _ in range(8):
        wide = quantized_linear(unfused[:, orders[0].long()].contiguous(), up)
        unfused = quantized_linear(wide[:, orders[1].long()].contiguous(), down)
        unfused = unfused / unfused.norm()
    assert torch.equal(want, unfused)


@pytest.mark.parametrize("m", [1, 2, 16, 64, 300])
def test_a_norm_before_a_layer_in_act_order_is_one_launch_and_bit_for_bit_that_of_two(m):
    n, k = 520, 1024
    plain, order = known(n, k, group_size=128).pack().to("cuda"), in_order_of(k)
    x, norm, scale = activations(m, k, torch.bfloat16, m), *activations(2, k, torch.bfloat16, 7)
    normed = rms_norm(x, norm, eps=1e-5, weight_offset=0.5)
    for weight, rows in (
        (replace(plain, perm=order), normed[:, order.long()]),
        (replace(plain, input_scale=scale), normed * scale),
        (replace(plain, perm=order, input_scale=scale), (normed * scale)[:, order.long()]),
    ):
        want = quantized_linear(rows.contiguous(), plain)
        assert torch.equal(quantized_linear(NormedRows(x, norm, 1e-5, 0.5), weight), want)
        assert torch.equal(quantized_linear(x, weight, norm=norm, norm_eps=1e-5, norm_offset=0.5), want)


@pytest.mark.parametrize("m", [1, 8, 9, 64])
@pytest.mark.parametrize("activation", [None, "silu", "gelu", "swiglu"])
def test_a_norm_goes_with_every_option(m, activation):
    weight = known(520, 1024, group_size=128).pack().to("cuda")
    x, norm, bias = (activations(*size, torch.bfloat16, size[0]) for size in ((m, 1024), (1, 1024), (1, 520)))
    columns = 260 if activation == "swiglu" else 520
    options = {"activation": activation, "residual": activations(m, columns, torch.bfloat16, 5), "bias": bias[0]}
    found = quantized_linear(x, weight, norm=norm[0], norm_eps=1e-6, **options)
    want = quantized_linear(rms_norm(x, norm[0], eps=1e-6), weight, **options)
    assert (found.float() - want.float()).norm() <= 4e-3 * want.float().norm()
    assert torch.equal(
        quantized_linear(x, weight, norm=norm[0].float(), norm_eps=1e-6, **options),
        quantized_linear(rms_norm(x, norm[0].float(), eps=1e-6), weight, **options),
    )
    with pytest.raises(ValueError, match="^norm: got a tensor that starts 2 bytes past a multiple of 16"):
        quantized_linear(x, weight, norm=torch.cat([norm[0][:1], norm[0]])[1:], **options)


def test_a_row_that_is_not_finite_leaves_the_others_alone():
    weight = known(520, 1024, group_size=128).pack().to("cuda")
    x, norm = activations(4, 1024, torch.bfloat16), torch.ones(1024, device="cuda", dtype=torch.bfloat16)
    want = quantized_linear(x, weight, norm=norm)
    x[2, 700] = float("inf")
    found = quantized_linear(x, weight, norm=norm)
    assert found[2].isnan().all()
    assert torch.equal(found[[0, 1, 3]], want[[0, 1, 3]])
    x[2] = 0
    assert quantized_linear(x, weight, norm=norm)[2].eq(0).all()


@pytest.mark.parametrize("m", [1, 4, 8])
def test_a_norm_waits_for_the_launch_that_makes_its_rows(m):
    """Layers in a chain of dependent launches, each of which reads what the last one has just written."""
    up, down = known(2048, 1024, group_size=128).pack().to("cuda"), known(1024, 1024, group_size=128, seed=1).pack()
    down = down.to("cuda")
    norm, start = activations(1, 1024, torch.bfloat16, 2)[0], activations(m, 1024, torch.bfloat16)

    def chain(after) -> torch.Tensor:
        hidden = start.clone()
        for _ in range(6):
            gated = quantized_linear(hidden, up, norm=norm, activation="swiglu")
            after()
            hidden = quantized_linear(gated, down, residual=hidden)
            after()
        return hidden

    want = check_back_to_back(chain)
    unfused = start.clone()
    for _ in range(6):
        gated = activated(quantized_linear(rms_norm(unfused, norm), up, out_dtype=torch.float32), "swiglu").bfloat16()
        unfused = quantized_linear(gated, down, residual=unfused)
    assert (want.float() - unfused.float()).norm() <= 2e-2 * unfused.float().norm()
