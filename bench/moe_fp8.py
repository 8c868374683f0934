"""Layers of experts with products in FP8 beside the same layers' 16-bit products, the rounding of x included."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from bench.linear import FEW_SAMPLES, MANY_FLOPS
from bench.linear_fp8 import row_specs
from bench.moe import MODELS, Inputs, check
from bench.report import aligned, number
from bench.suites import Bench
from bench.timing import capture, time_cold_in_turn
from bench.workloads import MoeModel, MoeShape
from cute_kernels import PackedExperts, fused_moe, quantize_activations, quantize_weight
from cute_kernels.formats.weights import weight_format
from cute_kernels.gemm.experts import stack_experts
from cute_kernels.gemm.experts.choice import chosen
from cute_kernels.gemm.experts.compile import layer_specs
from cute_kernels.gemm.experts.config import CombineConfig
from cute_kernels.gemm.experts.router.compile import RouterSpec
from cute_kernels.gemm.experts.router.config import IDS, RouterConfig
from cute_kernels.gemm.experts.spec import ExpertSpec
from cute_kernels.gemm.experts.wgmma.schedule import make_fp8_tiles
from cute_kernels.gemm.operands.fp8 import dequantize_activations
from cute_kernels.gemm.operands.fp8_config import INPUTS, PLAIN, RowsConfig, x_group
from cute_kernels.gemm.problem import GroupedProblem
from cute_kernels.gemm.spec import GemmSpec
from cute_kernels.gemm.weight import PackedWeight, padded_shape
from cute_kernels.runtime import KernelSpec

DISTINCT = 4  # experts; the others are copies of them, each in memory of its own
CHECKED_TOKENS = 4
TOLERANCE = 1e-2  # relative error (norm): hidden activations near the middle of two codes go to either


@dataclass(frozen=True)
class Fp8Layer:
    """A model's layer of experts in a weight format, and with how many tokens it is measured."""

    model: MoeModel
    format: str
    tokens: tuple[int, ...]

    def problems(self, tokens: int) -> list[GroupedProblem]:
        """The two products."""
        form, places = weight_format(self.format), tokens * self.model.topk
        sizes = [(n, k, padded_shape((n, k), form.group_size or None)[1]) for n, k in self.model.products]
        return [GroupedProblem(places, self.model.experts, *size, form, "bf16") for size in sizes]


LAYERS = (
    Fp8Layer(MoeModel("gpt-oss-120b", 128, 4, 2880, 2880), "mxfp4", (1, 4, 16, 128, 1024, 8192)),
    Fp8Layer(MODELS[-1], "fp8_block", (16, 128, 1024, 8192)),
)


def specs(layers: Iterable[Fp8Layer] = LAYERS) -> list[KernelSpec]:
    """The kernels that the benchmark runs."""
    found: dict[KernelSpec, None] = {
        RouterSpec(RouterConfig("int32", IDS)): None,
        GemmSpec(RowsConfig("bf16", makes=INPUTS)): None,
        GemmSpec(RowsConfig("bf16", makes=PLAIN)): None,
    }
    found |= {ExpertSpec(CombineConfig("bf16", source, bits)): None for source in ("bf16", "fp32") for bits in (0, 32)}
    for layer in layers:
        for tokens in layer.tokens:
            problems = layer.problems(tokens)
            assignments = tokens * layer.model.topk
            found |= dict.fromkeys(layer_specs(assignments, problems, [chosen(problem) for problem in problems]))
            found |= dict.fromkeys(spec for one in problems for spec in row_specs(one.format, one.k_pad))
            found |= {ExpertSpec(make_fp8_tiles(problem).config): None for problem in problems}
    return list(found)


def make_experts(layer: Fp8Layer, device: str) -> tuple[PackedExperts, PackedExperts]:
    """Gate and up in turn, and down."""

    def of_product(seed: int, n: int, k: int) -> PackedExperts:
        generator = torch.Generator(device).manual_seed(seed)
        dense = (torch.randn(n, k, generator=generator, device=device) * k**-0.5 for _ in range(DISTINCT))
        made = [quantize_weight(w, format=layer.format, dtype=torch.bfloat16) for w in dense]
        return stack_experts([made[e % DISTINCT] for e in range(layer.model.experts)])

    first, second = (of_product(i, n, k) for i, (n, k) in enumerate(layer.model.products))
    return first, second


def reference(gate_up: PackedExperts, down: PackedExperts, inputs: Inputs, tokens: torch.Tensor) -> torch.Tensor:
    """What a layer makes of some tokens, in fp64 on rounded operands."""

    def product(x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
        group = x_group(weight.format)
        return (
            weight.dequantize(torch.float32).double()
            @ dequantize_activations(*quantize_activations(x, group), group).double()
        )

    found = torch.zeros(len(tokens), down.shape[0], dtype=torch.float64, device=inputs.x.device)
    for total, token in zip(found, tokens.tolist(), strict=True):
        for expert, share in zip(inputs.ids[token].tolist(), inputs.weights[token], strict=True):
            sums = product(inputs.x[token], gate_up[expert])
            hidden = torch.nn.functional.silu(sums[::2]) * sums[1::2]
            total += share.double() * product(hidden.bfloat16(), down[expert])
    return found


def run(bench: Bench, layers: Iterable[Fp8Layer] = LAYERS) -> None:
    """One row per layer and number of tokens under the record's key "moe_fp8"."""
    found: list[dict[str, Any]] = []

    def of_layer(layer: Fp8Layer) -> None:
        weights = make_experts(layer, bench.device)
        for tokens in layer.tokens:
            shape = MoeShape(layer.model, tokens)
            bench.attempt(f"experts, FP8 products: {shape.name}", partial(row, layer, shape, weights))

    def row(layer: Fp8Layer, shape: MoeShape, weights: tuple[PackedExperts, PackedExperts]) -> None:
        found.append(measure(bench, layer.format, shape, *weights))
        bench.recorder.set("moe_fp8", found)

    for layer in layers:
        bench.attempt(f"experts, FP8 products: {layer.model.name}", partial(of_layer, layer))


def measure(bench: Bench, form: str, shape: MoeShape, gate_up: PackedExperts, down: PackedExperts) -> dict[str, Any]:
    """Checks a layer with FP8 products, and times it and the same with 16-bit ones in turn: graphs of one call each."""
    inputs = Inputs.of(shape, bench.device)
    own = partial(fused_moe, inputs.x, gate_up, down, topk_weights=inputs.weights, topk_ids=inputs.ids)
    rounded = partial(own, activations="fp8")
    tokens = torch.linspace(0, shape.tokens - 1, min(shape.tokens, CHECKED_TOKENS)).long()
    error = check(rounded(), tokens, reference(gate_up, down, inputs, tokens), TOLERANCE)
    flops, protocol = shape.flops(0) + shape.flops(1), bench.protocol
    if flops > MANY_FLOPS:
        protocol = replace(protocol, samples=min(protocol.samples, FEW_SAMPLES), warmup=1)
    calls = {"fp8": rounded, "16-bit": own, "rounding of x": partial(quantize_activations, inputs.x, 128)}
    times = time_cold_in_turn({name: capture(call) for name, call in calls.items()}, bench.flush, protocol)
    active = int(inputs.ids.unique().numel())
    return {
        "name": shape.name,
        "format": form,
        "error": error,
        "active": active,
        "weight_bytes": (gate_up.nbytes + down.nbytes) * active // len(gate_up),
        "us": {name: time.median_us for name, time in times.items()},
        "tflops": flops / times["fp8"].median_us * 1e-6,
    }


def text(record: dict[str, Any]) -> str:
    """The run as an aligned table; the bytes are those of all active experts, in each call."""
    rows = record.get("moe_fp8", [])
    cells = [["layer", "format", "active", "FP8 us", "16-bit us", "rounding of x", "TFLOPS", "TB/s", "error"]]
    for row in rows:
        us = row["us"]
        rate = row["weight_bytes"] / us["fp8"] * 1e-6
        times = [number(us[name]) for name in ("fp8", "16-bit", "rounding of x")]
        measured = [number(row["tflops"], 0), number(rate, 2), f"{row['error']:.1e}"]
        cells.append([row["name"], row["format"], str(row["active"]), *times, *measured])
    failed = [f"failed: {failure['what']}: {failure['error'][:300]}" for failure in record["failures"]]
    return "\n".join([str(record["environment"]["gpu"]), "", *aligned(cells), "", *failed])
