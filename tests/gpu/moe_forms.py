"""Layers of experts that tests of compiled calls and of modules share, of as many tokens as have kernels."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn import functional

from cute_kernels.gemm.experts import fused_moe, grouped_linear_reference
from cute_kernels.gemm.experts.choice import chosen
from cute_kernels.gemm.experts.reference import combine_reference, route_reference
from cute_kernels.gemm.experts.wgmma.schedule import GroupedTiles
from cute_kernels.gemm.packed_experts import PackedExperts, interleave_experts, stack_experts
from tests.gpu.test_moe import CUDA, problem
from tests.linear.cases import known

BF16, FP16 = torch.bfloat16, torch.float16
EXPERTS, TOPK, HIDDEN, INNER = 8, 2, 256, 192
TOKENS = (1, 5, 33, 200)
MORE_TOKENS = (2, 3, 8, 16, 40)
EVERY_TOKENS = (*TOKENS, *MORE_TOKENS)
PLACES = (12, 14, 60, 257)  # of grouped products
LAYER_TOLERANCE = 6e-3  # of the largest result: what is between the products is rounded, too


class Form(NamedTuple):
    """A format of experts."""

    bits: int
    dtype: torch.dtype
    group: int | None
    zero: bool = False


FORMS = {"w4": Form(4, BF16, 128), "w8 fp16": Form(8, FP16, 64)}
every_form = pytest.mark.parametrize("form", FORMS.values(), ids=list(FORMS))


def numbers(*shape: int, dtype: torch.dtype = BF16, device: str = CUDA, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def experts(n: int, k: int, form: Form, seed: int = 0) -> PackedExperts:
    seeds = range(100 * seed, 100 * seed + EXPERTS)
    return stack_experts([known(n, k, form.bits, form.group, form.zero, form.dtype, one).pack() for one in seeds])


def layer(form: Form, seed: int = 0, device: str = CUDA) -> tuple[PackedExperts, PackedExperts]:
    gate, up = (experts(INNER, HIDDEN, form, 3 * seed + i) for i in (1, 2))
    return interleave_experts(gate, up).to(device), experts(HIDDEN, INNER, form, 3 * seed).to(device)


def call(form: Form, tokens: int, seed: int = 0, device: str = CUDA) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, ids, some of them of no expert, and the experts' shares."""
    assert tokens in EVERY_TOKENS
    ids = torch.randint(-1, EXPERTS, (tokens, TOPK), generator=torch.Generator().manual_seed(seed))
    shares = numbers(tokens, TOPK, dtype=torch.float32, device="cpu", seed=seed + 1).softmax(-1)
    return numbers(tokens, HIDDEN, dtype=form.dtype, device=device, seed=seed), ids.to(device), shares.to(device)


def grouped_call(
    form: Form, places: int, seed: int = 0, device: str = CUDA
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, offsets of experts that have all places, one of them a third, some none, and the row of x at each place."""
    assert places in PLACES
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randint(0, EXPERTS, (places,), generator=generator)
    chosen[: places // 3] = EXPERTS // 2
    chosen[chosen == 1] = 2
    offsets = torch.bincount(chosen, minlength=EXPERTS).cumsum(0)
    rows = torch.randint(0, 50, (places,), generator=generator)
    x = numbers(50, HIDDEN, dtype=form.dtype, device=device, seed=seed)
    return x, functional.pad(offsets, (1, 0)).int().to(device), rows.int().to(device)


def mix_all(form: Form, id_dtypes: Iterable[torch.dtype], out_dtypes: Iterable[torch.dtype]) -> None:
    """Each number of tokens, on the CPU: what only chooses the kernels, whatever else a layer has."""
    weights = layer(form, device="cpu")
    for tokens in EVERY_TOKENS:
        x, ids, shares = call(form, tokens, device="cpu")
        for id_dtype in id_dtypes:
            for out_dtype in out_dtypes:
                fused_moe(x, *weights, shares, ids.to(id_dtype), out_dtype=out_dtype)


def exact_layer(form: Form, x: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """A layer on the CPU in fp32, but for the rounding between its products."""
    gate_up, down = layer(form, device="cpu")
    offsets, rows, places = route_reference(ids.cpu(), EXPERTS)
    hidden = exact_grouped(x, gate_up, offsets, rows=rows, activation="swiglu").to(x.dtype)
    return combine_reference(exact_grouped(hidden, down, offsets), places, shares.cpu(), torch.float32)


def exact_grouped(x: torch.Tensor, weight: PackedExperts, offsets: torch.Tensor, **options: Any) -> torch.Tensor:
    """A grouped product on the CPU in fp32, of W as the tensor cores see it."""
    here: dict[str, Any] = {name: one.cpu() if isinstance(one, torch.Tensor) else one for name, one in options.items()}
    places = x.shape[0] if here.get("rows") is None else here["rows"].shape[0]
    inputs = x.cpu() if is_rounded(weight, places) else x.cpu().float()  # to whose dtype the reference rounds W
    return grouped_linear_reference(inputs, weight.to("cpu"), offsets.cpu(), **here, out_dtype=torch.float32)


def is_rounded(weight: PackedExperts, places: int) -> bool:
    """Whether W is rounded to the dtype of x: in tiles, where a scale is not a whole row's nor x in limbs."""
    form = weight.bits, weight.dtype, weight.group_size, weight.zeros is not None
    layout = chosen(problem(places, len(weight), *weight.shape, *form))
    return weight.group_size is not None and isinstance(layout, GroupedTiles) and not layout.config.limbs
