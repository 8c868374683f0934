"""Decode steps of layers with latent attention: that they compute such layers, and what they must read."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bench import e2e_steps, latent_steps, steps
from bench.latent_steps import CASES, LatentModel
from bench.steps import Shape, StepCase

SMALL = LatentModel("small", 2, 128, 128, 4, 1, experts=4, topk=2, query_rank=128)
QUANTISED = [case for case in CASES if case.weights != "bf16"]  # torch's grouped products want a GPU


@pytest.mark.parametrize("case", QUANTISED, ids=lambda case: case.name)
def test_a_step_runs_and_depends_on_weights_and_cache(case: StepCase):
    torch.manual_seed(0)
    step = SMALL.step(case, Shape(2, 40), "cpu")
    out = step()
    assert out.shape == (2, 128) and bool(out.isfinite().all())
    assert torch.equal(step(), out), "the token that is appended is the same"
    step.parts[1]["cache"]["cache"].view(torch.uint8).zero_()
    assert not torch.equal(step(), out)


def test_torch_attention_computes_the_same():
    one = replace(SMALL, layers=1)
    ours, theirs = (one.step(StepCase("w4", "mla_bf16", sdpa), Shape(2, 70), "cpu") for sdpa in (False, True))
    theirs.hidden, theirs.parts = ours.hidden, [ours.parts[0] | {"cache": theirs.parts[0]["cache"]}]
    found = []
    for step in (ours, theirs):
        step.parts[0]["cache"]["cache"].fill_(0.5)  # whatever the order of pages
        found.append(step().double())
    assert 0 < found[0].norm() and (found[0] - found[1]).norm() < 2e-2 * found[0].norm()


def test_absorbed_attention_is_that_of_the_heads():
    """Keys and values of all heads made of the latent, in fp64."""
    torch.manual_seed(0)
    step = SMALL.step(StepCase("w4", "mla_bf16"), Shape(2, 40), "cpu")
    assert isinstance(step, latent_steps.LatentStep)
    parts, q = step.parts[0], torch.randn(2, 4 * latent_steps.QUERY).bfloat16()
    cache = parts["cache"]
    found = step.attend_latent(step.absorbed(q, parts), cache).transpose(0, 1) @ parts["value_up"]
    tokens = cache["cache"][cache["table"].long()].flatten(1, 2)[:, :40].double()
    latent, key = tokens.split((512, 64), dim=-1)
    keys = torch.einsum("btl,hnl->bthn", latent, parts["key_up"].double())
    nope, rope = q.view(2, 4, -1).double().split((128, 64), dim=-1)
    turned = torch.view_as_real(
        torch.view_as_complex(rope.unflatten(-1, (-1, 2))) * cache["rotation"][:, None]
    ).flatten(-2)
    scores = torch.einsum("bhn,bthn->bht", nope, keys) + torch.einsum("bhr,btr->bht", turned, key)
    weights = (scores * 192**-0.5).softmax(-1)
    values = torch.einsum("btl,hlv->bthv", latent, parts["value_up"].double())
    want = torch.einsum("bht,bthv->hbv", weights, values)
    assert (found.double() - want).norm() < 1e-2 * want.norm()


def test_a_step_reads_weights_and_cache():
    shape, case = Shape(64, 64), StepCase("w4", "mla_fp8")  # so many tokens that every expert has some
    step = SMALL.step(case, shape, "cpu")
    part = step.parts[0]
    weights = sum(part[name].keywords["weight"].nbytes for name in SMALL.products)
    absorbed = part["key_up"].nbytes + part["value_up"].nbytes + part["router"].nbytes
    experts = 4 * 3 * 128 * 128 * (0.5 + 2 / 128)
    assert step.bytes == pytest.approx(2 * (weights + absorbed + experts + part["cache"]["cache"].nbytes))


def test_every_model_is_measured_in_its_own_ways():
    points = e2e_steps.points(["deepseek-v3-layers"], [8], [8192])
    assert [point.case for point in points] == list(CASES)
    assert points[0].case.name == steps.BASELINE.name, "what others are compared with"
    assert points[0].case.weights == "bf16" and points[0].case.sdpa


@pytest.mark.parametrize(
    "kernel, kind",
    [
        ("kernel_cutlass_kernel_cute_kernelsmlakernelMlaKernel_object_at", "attention"),
        ("kernel_cutlass_kernel_cute_kernelsmla_cachekernelWrite", "append"),
        ("fmha_cutlassF_bf16_aligned_32x128_gmem_sm80", "attention"),
    ],
)
def test_kernels_are_told_apart_by_their_names(kernel, kind):
    assert e2e_steps.kind_of(kernel) == kind
