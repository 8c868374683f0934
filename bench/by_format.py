"""Weight formats in turn, with activations in 16 bits: products of few rows, and layers of experts of two models.

All formats of a row are timed in turn, against the streaming floor of what is packed. Bars: MXFP4 and NVFP4 1.2 of the
floor, FP8 1.15, up to 16 rows; experts 1.4 of it at one to four tokens, 1.2 from 8, MXFP4 within 5 % of INT4 in groups
of 32 on the same layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from statistics import geometric_mean
from typing import Any

import torch

from bench.bars import fastest_peer
from bench.format_peers import FormatPeer, Peers
from bench.kernels import make_ready, needed_by, needed_by_cases
from bench.linear import CHECKED_ROWS, FEW_SAMPLES, LAYERS, MANY_FLOPS, disagreement
from bench.linear import check as check_rows
from bench.moe import Inputs
from bench.moe import check as check_tokens
from bench.moe_fp8 import Fp8Layer, make_experts
from bench.report import Record, aligned, in_markdown, number
from bench.suites import Bench
from bench.timing import Protocol, capture, time_cold_in_turn
from bench.workloads import MoeModel, MoeShape
from cute_kernels import PackedExperts, fused_moe, quantize_weight, quantized_linear
from cute_kernels.gemm import PackedWeight
from cute_kernels.gemm.experts import ClampedSwiglu
from cute_kernels.gemm.weight import TILE_N
from cute_kernels.runtime import KernelSpec

FORMATS = ("mxfp4", "nvfp4", "fp8", "fp8_block", "w4g128")  # FP8 with a scale a row, which per tensor is stored as, too
ROWS = (1, 4, 16)
EXPERT_FORMATS = {
    MoeModel("gpt-oss-120b", 128, 4, 2880, 2880): ("mxfp4", "nvfp4", "w4g32"),
    MoeModel("Qwen3-30B-A3B", 128, 8, 2048, 768): ("nvfp4", "fp8", "fp8_block", "w4g128"),
}
TOKENS = (1, 4, 16, 64)
CHECKED_TOKENS = 4
ACTIVATION = ClampedSwiglu()
BIAS_STD = 0.1


def _row(
    bench: Bench,
    calls: Mapping[str, Callable[[], object]],
    sizes: Mapping[str, int],
    others: Mapping[Any, Callable[[], object]] | None = None,
    protocol: Protocol | None = None,
) -> tuple[dict[str, Any], dict[Any, float]]:
    """Returns (time, bytes and floor of each format, times of others); calls: by format."""
    others = others or {}
    times = time_cold_in_turn({**calls, **others}, bench.flush, protocol or bench.protocol)
    found = {}
    for name in calls:
        time, floor = times[name], bench.floor(max(1, sizes[name] // 64) * 64)
        about = {"bytes": sizes[name], "floor_us": floor.us, "floor_ratio": time.median_us / floor.us}
        found[name] = {"us": time.median_us, "min_us": time.min_us, **about}
    return found, {name: times[name].median_us for name in others}


def told(row: Mapping[str, Any]) -> str:
    """A row in a line."""
    parts = [f"{name} {one['us']:.2f} ({one['floor_ratio']:.2f})" for name, one in row["formats"].items()]
    for form, peers in row.get("peers", {}).items():
        parts += [f"{form} by {name} {one['us']:.2f}" for name, one in peers.items() if one["us"]]
    return f"{row['name']}: us (of the floor): {', '.join(parts)}"


# -- products ----------------------------------------------------------------------------------------------------------


def linear_specs(layers: Iterable[tuple[int, int]], rows: Iterable[int], device: str) -> list[KernelSpec]:
    """The kernels of all products."""
    rows = tuple(rows)

    def calls_of(layer: tuple[int, int], form: str) -> list[Callable[[], object]]:
        weight = _like_packed(layer, form, device)
        xs = (torch.empty(m, layer[1], dtype=torch.bfloat16, device=device) for m in rows)
        return [partial(quantized_linear, x, weight) for x in xs]

    return needed_by_cases(partial(calls_of, *case) for case in product(layers, FORMATS))


def _like_packed(shape: tuple[int, int], form: str, device: str) -> PackedWeight:
    """A packed weight of a size whose numbers mean nothing."""
    tile = quantize_weight(torch.zeros((TILE_N, shape[1]), dtype=torch.bfloat16, device=device), format=form)
    tiles = -(-shape[0] // TILE_N)
    codes, scales = (part.new_empty((tiles, *part.shape[1:])) for part in (tile.codes, tile.scales))
    return replace(tile, codes=codes, scales=scales, shape=shape, check_values=False)


def run_linear(
    bench: Bench,
    seconds: float,
    layers: Iterable[tuple[int, int]] = LAYERS,
    rows: Iterable[int] = ROWS,
    peers: Iterable[FormatPeer] = (),
) -> None:
    """One row per layer and number of rows under "linear_formats"; after so many seconds the other layers are left.

    Calls are timed as they are, not in graphs, as the floor is: a graph of one launch takes 2.4 us more.
    """
    found: list[dict[str, Any]] = []
    layers, rows, peers = tuple(layers), tuple(rows), tuple(peers)
    bench.attempt("kernels", lambda: make_ready(linear_specs(layers, rows, bench.device), bench.say))
    bench.recorder.set("timed", "calls")

    def of_layer(n: int, k: int) -> None:
        w = torch.randn((n, k), device=bench.device, generator=torch.Generator(bench.device).manual_seed(0))
        w *= k**-0.5
        weights = {form: quantize_weight(w, format=form, dtype=torch.bfloat16) for form in FORMATS}
        xs = [torch.randn((m, k), device=bench.device).bfloat16() for m in rows]
        by_form = {form: _wanted(weight, xs) for form, weight in weights.items()}
        others = Peers.of(weights, xs, peers)
        if peers:
            others.add_cublas(w.bfloat16())
        del w
        for i, x in enumerate(xs):
            row = _linear_row(bench, x, weights, {form: want[i] for form, want in by_form.items()}, others)
            found.append({"name": f"{n} x {k}, M = {len(x)}", "shape": {"n": n, "k": k, "m": len(x)}} | row)
            bench.recorder.set("linear_formats", found)
            bench.say(told(found[-1]))

    for n, k in layers:
        if bench.recorder.seconds() > seconds:
            bench.say(f"{n} x {k} and what follows are left out after {seconds:.0f} s")
            return
        bench.attempt(f"formats: {n} x {k}", partial(of_layer, n, k))


def _checked(x: torch.Tensor) -> torch.Tensor:
    """Some rows, the first and the last among them."""
    return torch.linspace(0, len(x) - 1, min(len(x), CHECKED_ROWS), device=x.device).long()


def _wanted(weight: PackedWeight, xs: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The checked rows of products, in fp32."""
    dense = weight.dequantize(torch.float32)
    return [x[_checked(x)].float() @ dense.T for x in xs]


def _linear_row(
    bench: Bench, x: torch.Tensor, weights: Mapping[str, PackedWeight], want: Mapping[str, torch.Tensor], others: Peers
) -> dict[str, Any]:
    """The formats' and the peers' times, all in turn, of one number of rows; each is checked first."""
    own = {form: partial(quantized_linear, x, weight) for form, weight in weights.items()}
    errors = {form: check_rows(call(), _checked(x), want[form]) for form, call in own.items()}
    why_not, calls = dict(others.why_not), {}
    for key, call in others.products.items():
        reason = disagreement(call, x, _checked(x), want[key[0]]) if key[0] in want else None
        if reason is None:
            calls[key] = partial(call, x)
        else:
            why_not[key] = reason
    sizes = {form: weight.nbytes for form, weight in weights.items()}
    flops = 2 * x.numel() * next(iter(weights.values())).shape[0]
    formats, times = _row(bench, own, sizes, calls, _hasty(bench, flops))
    for form, one in formats.items():
        one["error"] = errors[form]
    row: dict[str, Any] = {"formats": formats}
    if times or why_not:
        row["peers"] = peers = {}
        for (form, name), us in times.items():
            peers.setdefault(form, {})[name] = {"us": us}
        for (form, name), reason in why_not.items():
            peers.setdefault(form, {})[name] = {"us": None, "why_not": reason}
    return row


def _hasty(bench: Bench, flops: int) -> Protocol:
    """Few samples of long calls."""
    protocol = bench.protocol
    return protocol if flops <= MANY_FLOPS else replace(protocol, samples=min(protocol.samples, FEW_SAMPLES), warmup=1)


# -- experts -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OssLayer:
    """A layer of experts in a format, with the biases and the activation of gpt-oss."""

    gate_up: PackedExperts
    down: PackedExperts
    biases: tuple[torch.Tensor, torch.Tensor]

    @staticmethod
    def of(model: MoeModel, form: str, device: str) -> OssLayer:
        generator = torch.Generator(device).manual_seed(7)
        size = [(model.experts, n) for n, _ in model.products]
        drawn = (BIAS_STD * torch.randn(each, generator=generator, device=device) for each in size)
        first, second = (bias.bfloat16() for bias in drawn)
        return OssLayer(*make_experts(Fp8Layer(model, form, ()), device), (first, second))

    def call(self, inputs: Inputs) -> Callable[[], torch.Tensor]:
        given = {"gate_up_bias": self.biases[0], "down_bias": self.biases[1], "activation": ACTIVATION}
        return partial(fused_moe, inputs.x, self.gate_up, self.down, inputs.weights, inputs.ids, **given)

    def bytes_of(self, active: int) -> int:
        """Of the experts that have rows."""
        return (self.gate_up.nbytes + self.down.nbytes) * active // len(self.gate_up)

    def reference(self, inputs: Inputs, tokens: torch.Tensor) -> torch.Tensor:
        """What the layer makes of some tokens, in fp64 with hidden activations rounded once."""
        rows = []
        for token in tokens.tolist():
            total = torch.zeros(self.down.shape[0], dtype=torch.float64, device=inputs.x.device)
            for expert, share in zip(inputs.ids[token].tolist(), inputs.weights[token], strict=True):
                sums = _dense(self.gate_up, expert) @ inputs.x[token].double() + self.biases[0][expert].double()
                hidden = ACTIVATION.reference(sums[::2], sums[1::2]).bfloat16().double()
                total += share.double() * (_dense(self.down, expert) @ hidden + self.biases[1][expert].double())
            rows.append(total)
        return torch.stack(rows)


def _dense(experts: PackedExperts, expert: int) -> torch.Tensor:
    one = experts[expert]
    assert isinstance(one, PackedWeight)
    return one.dequantize(torch.float32).double()


def run_experts(
    bench: Bench,
    seconds: float,
    tokens: Iterable[int] = TOKENS,
    models: Mapping[MoeModel, Iterable[str]] = EXPERT_FORMATS,
) -> None:
    """One row per model and number of tokens under "moe_formats"; after so many seconds the rest is left."""
    found: list[dict[str, Any]] = []
    tokens = tuple(tokens)

    def of_model(model: MoeModel, forms: Iterable[str]) -> None:
        layers = {form: OssLayer.of(model, form, bench.device) for form in forms}
        every = {count: Inputs.of(MoeShape(model, count), bench.device) for count in tokens}
        calls = [layer.call(inputs) for layer in layers.values() for inputs in every.values()]
        bench.attempt("kernels", lambda: make_ready(needed_by(calls), bench.say))
        for count, inputs in every.items():
            if bench.recorder.seconds() > seconds:
                bench.say(f"{model.name}: {count} tokens and what follows are left out after {seconds:.0f} s")
                return
            bench.attempt(f"formats: {model.name}, {count} tokens", partial(of_tokens, model, layers, count, inputs))

    def of_tokens(model: MoeModel, layers: Mapping[str, OssLayer], count: int, inputs: Inputs) -> None:
        found.append({"name": f"{model.name}, {count} tokens", **_expert_row(bench, model, layers, count, inputs)})
        bench.recorder.set("moe_formats", found)
        bench.say(told(found[-1]))

    for model, forms in models.items():
        bench.attempt(f"formats: {model.name}", partial(of_model, model, forms))


def _expert_row(
    bench: Bench, model: MoeModel, layers: Mapping[str, OssLayer], count: int, inputs: Inputs
) -> dict[str, Any]:
    """The formats' times in turn, of one number of tokens; each is checked first."""
    chosen = torch.linspace(0, count - 1, min(count, CHECKED_TOKENS)).long()
    own = {form: layer.call(inputs) for form, layer in layers.items()}
    errors = {form: check_tokens(call(), chosen, layers[form].reference(inputs, chosen)) for form, call in own.items()}
    active = int(inputs.ids.unique().numel())
    sizes = {form: layer.bytes_of(active) for form, layer in layers.items()}
    formats, _ = _row(bench, {form: capture(call) for form, call in own.items()}, sizes)
    for form, one in formats.items():
        one["error"] = errors[form]
    return {"shape": {"model": asdict(model), "tokens": count}, "active": active, "formats": formats}


# -- report -----------------------------------------------------------------------------------------------------------


def text(record: Record) -> str:
    """The run as an aligned table: microseconds, in brackets how many times the floor, the part of a peer's time."""
    failed = [f"failed: {failure['what']}: {failure['error'][:300]}" for failure in record["failures"]]
    lines = [str(record["environment"]["gpu"]), "", *aligned(_cells(record)), "", *_beside_peers(record), *failed]
    return "\n".join(lines)


def beside_peers(record: Record) -> dict[str, dict[str, float]]:
    """By format and row: what it takes of the fastest other library's time."""
    ratios: dict[str, dict[str, float]] = {}
    for row in record.get("linear_formats", []):
        for form, peers in row.get("peers", {}).items():
            best = fastest_peer(peers)
            if best is not None and form in row["formats"]:
                ratios.setdefault(form, {})[row["name"]] = row["formats"][form]["us"] / best[0]
    return ratios


def _beside_peers(record: Record) -> list[str]:
    """What each format takes of its fastest peer's time, in words, and why peers are not there."""
    every = [row.get("peers", {}) for row in record.get("linear_formats", [])]
    found = ((form, *peer) for peers in every for form, of_form in peers.items() for peer in of_form.items())
    reasons = dict.fromkeys(f"{form} by {name}: {one['why_not']}" for form, name, one in found if not one["us"])
    told = []
    for form, of_rows in beside_peers(record).items():
        worst = max(of_rows, key=of_rows.__getitem__)
        mean = geometric_mean(of_rows.values())
        told.append(f"{form} over its best peer: {mean:.3f} in the geometric mean, {of_rows[worst]:.2f} at {worst}")
    return [*told, *reasons]


def markdown(record: Record) -> str:
    """The same as a Markdown table."""
    head, *lines = _cells(record)
    how = "calls" if record.get("timed") == "calls" else "replays of a CUDA graph"
    about = f"median of {record.get('samples')} {how}, each with L2 made cold by reading 256 MB."
    about = " ".join([about, *(f"{line}." for line in _beside_peers(record))])
    return in_markdown(record, head, lines, about)


def _cells(record: Record) -> list[list[str]]:
    rows = [*record.get("linear_formats", []), *record.get("moe_formats", [])]
    names = list(dict.fromkeys(name for row in rows for name in row["formats"]))
    cells = [["layer", *names]]
    for row in rows:
        cells.append([row["name"], *(_cell(row, name) for name in names)])
    return cells


def _cell(row: Record, form: str) -> str:
    """Time, how many times the floor, and what part it is of the fastest other library's time."""
    one = row["formats"].get(form)
    if one is None:
        return "-"
    best = fastest_peer(row.get("peers", {}).get(form, {}))
    beside = "" if best is None else f", {number(one['us'] / best[0], 2)} of {best[1]}"
    return f"{number(one['us'], 2)} ({number(one['floor_ratio'], 2)}){beside}"
