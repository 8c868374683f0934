"""Products in FP8 beside the same weights' 16-bit products, torch's own and DeepGEMM's, the rounding of x with and
without."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from functools import partial
from itertools import product
from typing import Any

import torch

from bench.peers import relative_error
from bench.report import aligned, number
from bench.suites import Bench, WrongOutput
from bench.timing import time_cold_in_turn
from bench.why_not import short
from cute_kernels import quantize_activations, quantize_weight, quantized_linear
from cute_kernels.formats.weights import WeightFormat, weight_format
from cute_kernels.gemm import PackedWeight
from cute_kernels.gemm.choice import chosen
from cute_kernels.gemm.fp8 import row_codes, takes_row_codes
from cute_kernels.gemm.operands.fp8 import dequantize_activations
from cute_kernels.gemm.operands.fp8_config import BY_GROUP, BY_ROW, PLAIN, ROUNDED, X_GROUP, RowsConfig, x_group
from cute_kernels.gemm.operands.fp8_schedule import fp8_schedule
from cute_kernels.gemm.problem import LinearProblem
from cute_kernels.gemm.spec import GemmSpec
from cute_kernels.gemm.weight import padded_shape
from cute_kernels.runtime import KernelSpec

FORMATS = ("fp8", "fp8_block", "w4g128", "mxfp4")
LAYERS = ((8192, 8192), (7168, 4096), (4096, 14336))  # N, K
ROWS = (1, 16, 64, 256, 1024, 8192)
TOLERANCE = 4e-3  # 3e-3 of sums, and a rounding to bf16
CHECKED_ROWS = 16
Calls = dict[str, Callable[[], torch.Tensor]]


def row_specs(form: WeightFormat, k_pad: int) -> list[KernelSpec]:
    """The kernels that round rows of x: for whoever asks, for products in FP8, and for those in 16 bits."""
    scales = BY_GROUP if x_group(form) else BY_ROW
    plain, tail = RowsConfig("bf16", scales, PLAIN), bool(k_pad % X_GROUP)
    configs = plain, RowsConfig("bf16", scales, half_last=tail), RowsConfig("bf16", scales, ROUNDED)
    return [GemmSpec(config) for config in configs]


def specs(
    layers: Iterable[tuple[int, int]] = LAYERS, rows: Iterable[int] = ROWS, formats: Iterable[str] = FORMATS
) -> list[KernelSpec]:
    """The kernels that the benchmark runs, those of products that torch serves among them."""
    found: dict[KernelSpec, None] = {}
    for (n, k), form, m in product(layers, map(weight_format, formats), rows):
        k_pad = padded_shape((n, k), form.group_size or None)[1]
        problem = LinearProblem(m, n, k, k_pad, form, "bf16")
        configs = chosen(problem).config, fp8_schedule(problem).config
        found |= dict.fromkeys([*map(GemmSpec, configs), *row_specs(form, k_pad)])
    return list(found)


def run(
    bench: Bench,
    layers: Iterable[tuple[int, int]] = LAYERS,
    rows: Iterable[int] = ROWS,
    formats: Iterable[str] = FORMATS,
) -> None:
    """One row per layer, format and number of rows under the record's key "linear_fp8"."""
    found: list[dict[str, Any]] = []
    rows = tuple(rows)

    def of_layer(n: int, k: int, form: str) -> None:
        w = torch.randn((n, k), device=bench.device, generator=torch.Generator(bench.device).manual_seed(0))
        weight = quantize_weight(w * k**-0.5, format=form, dtype=torch.bfloat16)
        for m in rows:
            found.append(measure(bench, form, weight, torch.randn((m, k), device=bench.device).bfloat16()))
            bench.recorder.set("linear_fp8", found)

    for n, k in layers:
        for form in formats:
            bench.attempt(f"linear, FP8 products: {form} {n} x {k}", partial(of_layer, n, k, form))


def measure(bench: Bench, form: str, weight: PackedWeight, x: torch.Tensor) -> dict[str, Any]:
    """Checks and times one product in FP8, and all that it is compared with, in turn."""
    (m, k), n = x.shape, weight.shape[0]
    own = partial(quantized_linear, x, weight, activations="fp8")
    error = check(own(), x, weight)
    calls, why_not = peers_of(x, weight)
    calls = {"": own, "16-bit products": partial(quantized_linear, x, weight), **calls}
    times = time_cold_in_turn(calls, bench.flush, bench.protocol)
    us = times.pop("")
    return {
        "name": f"{n} x {k}, M = {m}",
        "format": form,
        "shape": {"n": n, "k": k, "m": m},
        "error": error,
        "us": us.as_dict(),
        "tflops": 2 * m * n * k / us.median_us * 1e-6,
        "peers": {name: {"us": time.median_us} for name, time in times.items()}
        | {name: {"us": None, "why_not": reason} for name, reason in why_not.items()},
    }


def check(y: torch.Tensor, x: torch.Tensor, weight: PackedWeight) -> float:
    """Relative error of some rows against fp64 on the rounded operands; WrongOutput if it is too large."""
    chosen, group = (
        torch.linspace(0, len(x) - 1, min(len(x), CHECKED_ROWS), device=x.device).long(),
        x_group(weight.format),
    )
    rows = dequantize_activations(*quantize_activations(x[chosen], group), group)
    error = relative_error(y[chosen], rows.double() @ weight.dequantize(torch.float32).double().T)
    if not (error <= TOLERANCE and bool(y.isfinite().all())):
        raise WrongOutput(f"relative error {error:.2e} (at most {TOLERANCE:g})")
    return error


def peers_of(x: torch.Tensor, weight: PackedWeight) -> tuple[Calls, dict[str, str]]:
    """Calls of the same product, x rounded before; and why others are not here."""
    group = x_group(weight.format)
    calls: Calls = {"rounding of x alone": lambda: quantize_activations(x, group)[0]}
    why_not: dict[str, str] = {}
    codes, scales = quantize_activations(x, group)
    if takes_row_codes(weight):
        columns, of_features = row_codes(weight).t(), weight.scales.view(torch.float32).view(1, -1)
        for name, fast in (("torch._scaled_mm", False), ("torch._scaled_mm, fast sums", True)):
            calls[name] = partial(
                torch._scaled_mm, codes, columns, scales, of_features[:, : weight.shape[0]].contiguous(),
                out_dtype=torch.bfloat16, use_fast_accum=fast,
            )  # fmt: skip
    if weight.format.key == "e4m3_g128f32":
        try:
            calls["DeepGEMM"] = _deep_gemm(codes, scales, weight)
        except Exception as error:  # one that is not there, or fails, must not lose the others
            why_not["DeepGEMM"] = short(error)
    return calls, why_not


def _deep_gemm(codes: torch.Tensor, scales: torch.Tensor, weight: PackedWeight) -> Callable[[], torch.Tensor]:
    """DeepGEMM's product of blocks of 128 x 128; each block has its first row's scale, so results are others."""
    library = importlib.import_module("deep_gemm")
    multiply = getattr(library, "fp8_gemm_nt", None) or library.gemm_fp8_fp8_bf16_nt
    (n, k), tiles = weight.shape, weight.codes.shape[0]
    rows = weight.unpack_tiles(0, tiles)[:n, :k].contiguous().view(torch.float8_e4m3fn)
    blocks = weight.scales.view(torch.float32)[::2, :, 0].contiguous()  # a block has two tiles of 64 rows
    out = torch.empty((len(codes), n), dtype=torch.bfloat16, device=codes.device)

    def call() -> torch.Tensor:
        multiply((codes, scales), (rows, blocks), out)
        return out

    call()
    return call


def text(record: dict[str, Any]) -> str:
    """The run as an aligned table."""
    rows = record.get("linear_fp8", [])
    names = list(dict.fromkeys(name for row in rows for name in row["peers"]))
    cells = [["format", "N x K, rows", "us", "error", "TFLOPS", *names]]
    for row in rows:
        others = [number(row["peers"].get(name, {}).get("us")) for name in names]
        us = number(row["us"]["median_us"])
        cells.append([row["format"], row["name"], us, f"{row['error']:.1e}", number(row["tflops"], 0), *others])
    failed = [f"failed: {failure['what']}: {failure['error'][:300]}" for failure in record["failures"]]
    return "\n".join([str(record["environment"]["gpu"]), "", *aligned(cells), "", *failed])
