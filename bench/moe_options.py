"""Options of layers of experts beside the plain call: few tokens and many of models with few and many experts."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch

from bench.moe import MODELS, Inputs, make_experts
from bench.options import PLACES, READS, Bar, Option, run_cases
from bench.peers import relative_error
from bench.suites import Bench, WrongOutput
from bench.workloads import MoeModel, MoeShape
from cute_kernels.gemm.experts import fused_moe

TOKENS = (1, 32, 512)
INVARIANT = Bar(0.15)
TOLERANCE = 5e-3  # relative error (norm): what is between the products is rounded to bf16


def shapes(models: Iterable[MoeModel] = MODELS[:2], tokens: Iterable[int] = TOKENS) -> list[MoeShape]:
    return [MoeShape(model, count) for model in models for count in tokens]


def options_of(shape: MoeShape, device: str = "cuda") -> dict[str, Option]:
    """By name. "half of the experts" has ids of the other half, which add nothing, as with experts on two GPUs."""
    model, inputs = shape.model, Inputs.of(shape, device)
    gate_up, down = (make_experts(model.experts, n, k, i, device) for i, (n, k) in enumerate(model.products))
    x, ids, weights = inputs.x, inputs.ids, inputs.weights
    wide = torch.zeros(shape.tokens, 2 * model.hidden, dtype=x.dtype, device=device)
    wide[:, : model.hidden] = x

    def option(bar: Bar = PLACES, own_bytes: int = 0, **changes: Any) -> Option:
        given = {"x": x, "topk_weights": weights, "topk_ids": ids} | changes
        return Option(partial(fused_moe, gate_up=gate_up, down=down, **given), own_bytes, bar)

    return {
        "plain": option(),
        "fp32 out": option(READS, 2 * x.numel(), out_dtype=torch.float32),
        "64-bit ids": option(own_bytes=4 * ids.numel(), topk_ids=ids.long()),
        "bf16 shares": option(topk_weights=weights.bfloat16()),
        "strided x": option(READS, x=wide[:, : model.hidden]),
        "half of the experts": option(topk_ids=torch.where(ids < model.experts // 2, ids, -1)),
        "batch invariant": option(INVARIANT, batch_invariant=True),
    }


def check(options: dict[str, Option]) -> None:
    """WrongOutput where a result is not the plain one; of half of the experts, where it is not the other half short."""
    plain = options["plain"].call
    assert isinstance(plain, partial)
    want = plain().float()
    for name, option in options.items():
        assert isinstance(option.call, partial)
        found = option.call().float()
        if name == "half of the experts":
            ids, some = plain.keywords["topk_ids"], option.call.keywords["topk_ids"]
            found = found + partial(plain, topk_ids=torch.where(some < 0, ids, -1))().float()
        error = relative_error(found, want)
        if not error <= TOLERANCE:
            raise WrongOutput(f"{name}: relative error {error:.2e}, at most {TOLERANCE:g}")


def run(bench: Bench, chosen: Iterable[MoeShape]) -> None:
    """A row for each shape under the record's key "options"."""
    cases = [(shape, "w4g128-bf16") for shape in chosen]
    run_cases(bench, cases, lambda shape, _: options_of(shape), check)
