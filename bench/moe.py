"""Benchmark of layers of experts: one token to thousands, beside the floor of the active experts' bytes and peers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch

from bench import moe_router
from bench.linear import FEW_SAMPLES, MANY_FLOPS
from bench.moe_peers import PEERS, Bind, Calls, DenseExperts, MoePeer, MoeWeights, Routed
from bench.peers import AGREEMENT, relative_error
from bench.report import INVARIANT, OURS, aligned, in_markdown, number
from bench.suites import Bench, WrongOutput
from bench.timing import time_cold, time_cold_in_turn, time_graph_cold, time_host
from bench.why_not import short
from bench.workloads import BITS, GROUP_SIZE, MoeModel, MoeShape
from cute_kernels.formats.weights import integers
from cute_kernels.gemm import PackedWeight
from cute_kernels.gemm.experts import fused_moe, grouped_linear
from cute_kernels.gemm.experts.choice import chosen
from cute_kernels.gemm.experts.compile import entry_specs, layer_specs
from cute_kernels.gemm.experts.config import CombineConfig
from cute_kernels.gemm.experts.product import routing_function
from cute_kernels.gemm.experts.router.compile import RouterSpec
from cute_kernels.gemm.experts.router.config import IDS, RouterConfig
from cute_kernels.gemm.experts.spec import ExpertSpec
from cute_kernels.gemm.operands.fp8_config import INPUTS, RowsConfig
from cute_kernels.gemm.packed_experts import PackedExperts
from cute_kernels.gemm.problem import GroupedProblem
from cute_kernels.gemm.spec import GemmSpec
from cute_kernels.gemm.weight import padded_shape
from cute_kernels.runtime import KernelSpec
from layouts.weights.hopper import TILE_BYTES, TILE_N, tile_k

TOKENS = tuple(1 << i for i in range(14))
QUICK_TOKENS = (1, 32, 512, 4096)
TABLE_TOKENS = (1, 2, 4, 8, 32, 128, 512, 2048, 8192)  # of a table of few lines
CHECKED_TOKENS = 8
TOLERANCE = 6e-3  # relative error (norm): hidden activations and results are rounded to bf16 on the way
HOST_TOKENS = 8
HOST_CALLS = 20  # of up to six launches each, for which the GPU takes longer than the host: they must fit its queue
COMPARED = Calls._fields  # what is timed beside peers
NOT_YET = "the run ended before it was measured"  # of peers that are slow to start


MODELS = (
    MoeModel("Mixtral-8x7B", 8, 2, 4096, 14336),
    MoeModel("Qwen3-30B-A3B", 128, 8, 2048, 768),
    MoeModel("DeepSeek-V3", 256, 8, 7168, 2048),
)


def specs(models: Iterable[MoeModel] = MODELS, tokens: Iterable[int] = TOKENS) -> list[KernelSpec]:
    """The kernels that the benchmark runs."""
    found: dict[KernelSpec, None] = {
        RouterSpec(RouterConfig("int32", IDS)): None,
        GemmSpec(RowsConfig("bf16", makes=INPUTS)): None,
    }
    found |= {ExpertSpec(CombineConfig("bf16", source, bits)): None for source in ("bf16", "fp32") for bits in (0, 32)}
    for model in models:
        found |= dict.fromkeys(moe_router.specs(model))
        for count in tokens:
            problems = problems_of(MoeShape(model, count))
            for of_mode in (problems, [replace(problem, batch_invariant=True) for problem in problems]):
                layouts = [chosen(problem) for problem in of_mode]
                found |= dict.fromkeys(layer_specs(count * model.topk, of_mode, layouts))
            found |= dict.fromkeys(entry_specs(count, problems))
    return list(found)


def problems_of(shape: MoeShape) -> list[GroupedProblem]:
    """The two products of a layer."""
    model, places = shape.model, shape.tokens * shape.model.topk
    sizes = [(n, k, padded_shape((n, k), GROUP_SIZE)[1]) for n, k in model.products]
    return [GroupedProblem(places, model.experts, *size, integers(BITS, GROUP_SIZE), "bf16") for size in sizes]


def make_experts(count: int, n: int, k: int, seed: int, device: torch.device | str = "cuda") -> PackedExperts:
    """Random codes and scales that make products of about unit size; any bytes are codes in some order."""
    generator = torch.Generator(device).manual_seed(seed)
    n_pad, k_pad = padded_shape((n, k), GROUP_SIZE)
    tiles = (count, n_pad // TILE_N, k_pad // tile_k(BITS), TILE_BYTES)
    codes = torch.randint(0, 256, tiles, dtype=torch.uint8, generator=generator, device=device)
    groups = (count, n_pad // TILE_N, k_pad // GROUP_SIZE, TILE_N)
    spread = k**-0.5 / (1 << (BITS - 1))
    scales = spread * (0.5 + torch.rand(groups, generator=generator, device=device))
    return PackedExperts(codes, scales.to(torch.bfloat16), None, integers(BITS, GROUP_SIZE), (n, k))


def dense_of(weight: PackedExperts) -> torch.Tensor:
    """W [E, N, K] in bf16, an expert at a time."""
    dense = torch.empty((len(weight), *weight.shape), dtype=torch.bfloat16, device=weight.device)
    for target, expert in zip(dense, weight, strict=True):
        assert isinstance(expert, PackedWeight)
        target.copy_(expert.dequantize(torch.bfloat16))
    return dense


def make_weights(model: MoeModel, device: torch.device | str = "cuda") -> MoeWeights:
    packed = [make_experts(model.experts, n, k, i, device) for i, (n, k) in enumerate(model.products)]
    both = dense_of(packed[0])
    return MoeWeights(packed[0], packed[1], DenseExperts(both[:, ::2], both[:, 1::2], dense_of(packed[1])))


@dataclass
class Layer:
    """The weights of a layer, and each peer that is here with them as it wants them."""

    weights: MoeWeights
    peers: dict[str, Bind]
    why_not: dict[str, str]

    @staticmethod
    def of(weights: MoeWeights, peers: Iterable[MoePeer]) -> Layer:
        layer = Layer(weights, {}, {})
        for peer in peers:
            reason = peer.missing()
            try:
                if reason is None:
                    layer.peers[peer.name] = peer.prepare(weights)
            except Exception as error:  # one peer's failure must not lose the others' results
                reason = short(error)
            if reason is not None:
                layer.why_not[peer.name] = reason
        return layer


@dataclass(frozen=True)
class Inputs:
    """Tokens and where they go: `Routed` for peers, in bf16 and int32."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor

    @staticmethod
    def of(shape: MoeShape, device: torch.device | str = "cuda") -> Inputs:
        generator = torch.Generator(device).manual_seed(shape.tokens)
        x = torch.randn((shape.tokens, shape.model.hidden), generator=generator, device=device).to(torch.bfloat16)
        scores = torch.rand((shape.tokens, shape.model.experts), generator=generator, device=device)
        weights, ids = scores.topk(shape.model.topk)
        return Inputs(x, ids.int(), weights / weights.sum(1, keepdim=True))


def reference(weights: MoeWeights, inputs: Inputs, chosen: torch.Tensor) -> torch.Tensor:
    """What the layer makes of the ``chosen`` tokens, in fp32 with hidden activations rounded once."""
    rows = []
    for token in chosen.tolist():
        x = inputs.x[token].float()
        total = torch.zeros(weights.down.shape[0], device=x.device)
        for expert, share in zip(inputs.ids[token].tolist(), inputs.weights[token], strict=True):
            gate, up, down = (part[expert].float() for part in weights.dense)
            hidden = torch.nn.functional.silu(gate @ x) * (up @ x)
            total += share * (down @ hidden.to(torch.bfloat16).float())
        rows.append(total)
    return torch.stack(rows)


def run(
    bench: Bench,
    models: Iterable[MoeModel] = MODELS,
    tokens: Iterable[int] = TOKENS,
    peers: Iterable[MoePeer] = PEERS,
) -> None:
    """One row per model and number of tokens under the record's key "moe", and of its router under "moe_router".

    Peers that are slow to start join in a second round, which measures every row anew, all in turn as ever: a run that
    ends before a peer has compiled itself has recorded all else.
    """
    found: dict[str, dict[str, Any]] = {}
    models, tokens, peers = tuple(models), tuple(tokens), tuple(peers)
    waiting = {peer.name: NOT_YET for peer in peers if peer.slow_start and peer.missing() is None}
    prompt = tuple(peer for peer in peers if peer.name not in waiting)
    for model in models:
        _run_model(bench, found, model, tokens, prompt, waiting)
    if waiting:
        for model in models:
            _run_model(bench, found, model, tokens, peers, {})


def _run_model(
    bench: Bench,
    found: dict[str, dict[str, Any]],
    model: MoeModel,
    tokens: Iterable[int],
    peers: Iterable[MoePeer],
    waiting: Mapping[str, str],
) -> None:
    """Measures a model's rows; found: rows by name. waiting: why peers that are to join later are not there."""

    routers: list[dict[str, Any]] = bench.recorder.data.get("moe_router", [])

    def work() -> None:
        layer = Layer.of(make_weights(model), peers)
        layer.why_not |= waiting
        if model.name not in bench.recorder.data.get("moe_host_us", {}):
            bench.attempt(f"moe: host cost, {model.name}", partial(_host_cost, bench, model, layer.weights))
        for count in tokens:
            shape = MoeShape(model, count)
            bench.attempt(f"moe: {shape.name}", partial(row, shape, layer))
            if moe_router.is_wanted(shape, routers):
                bench.attempt(f"moe: router, {shape.name}", partial(router_row, shape, layer))
        bench.floor.release()

    def router_row(shape: MoeShape, layer: Layer) -> None:
        routers.append(moe_router.measure(bench, shape, layer.weights))
        bench.recorder.set("moe_router", routers)

    def row(shape: MoeShape, layer: Layer) -> None:
        found[shape.name] = measure(bench, shape, layer)
        bench.recorder.set("moe", list(found.values()))

    bench.attempt(f"moe: {model.name}", work)


def measure(bench: Bench, shape: MoeShape, layer: Layer) -> dict[str, Any]:
    """Checks and times a layer and its two products, ours and the peers' in turn."""
    model, weights = shape.model, layer.weights
    inputs = Inputs.of(shape, weights.gate_up.device)
    out = torch.full((shape.tokens, model.hidden), torch.nan, dtype=torch.bfloat16, device=inputs.x.device)
    own = layer_call(weights, inputs, out)
    invariant = partial(own, batch_invariant=True)
    chosen = torch.linspace(0, shape.tokens - 1, min(shape.tokens, CHECKED_TOKENS)).long()
    want = reference(weights, inputs, chosen)
    check(invariant(), chosen, want)
    out.fill_(torch.nan)
    error = check(own(), chosen, want)
    routed = Routed.of(inputs.x, inputs.ids, inputs.weights, model.experts)
    calls = _own_calls(weights, inputs, routed, own)
    protocol = bench.protocol
    if shape.flops(0) > MANY_FLOPS:
        protocol = replace(protocol, samples=min(protocol.samples, FEW_SAMPLES), warmup=1)
    timed = {what: {"": calls[what]} for what in COMPARED}
    timed["layer"][INVARIANT] = invariant
    why_not = dict(layer.why_not)
    for name, bind in layer.peers.items():
        theirs, reason = _agreeing(bind, routed, chosen, want)
        if theirs is None:
            why_not[name] = reason
        else:
            for what, call in zip(COMPARED, theirs, strict=True):
                timed[what][name] = call
    times = {what: time_cold_in_turn(these, bench.flush, protocol) for what, these in timed.items()}
    second = time_cold(calls["second"], bench.flush, protocol)
    graph = time_graph_cold(own, bench.flush, protocol)
    active = int(inputs.ids.unique().numel())
    first_bytes, second_bytes = (shape.weight_bytes(i, active) for i in range(2))
    floors = [bench.floor(size // 64 * 64).us for size in (first_bytes, second_bytes, first_bytes + second_bytes)]
    own_us = times["first"].pop("").median_us, second.median_us, graph.median_us
    in_order = times["in_order"].pop("").median_us
    return {
        "name": shape.name,
        "shape": {"model": asdict(model), "tokens": shape.tokens},
        "active": active,
        "most_rows": int(routed.counts.max()),
        "error": error,
        "first": _product(own_us[0], floors[0], shape.flops(0)),
        "in_order": _product(in_order, floors[0], shape.flops(0)),
        "second": _product(own_us[1], floors[1], shape.flops(1)),
        "layer": _product(own_us[2], floors[2], shape.flops(0) + shape.flops(1)),
        "eager_us": times["layer"].pop("").median_us,
        "batch_invariant_us": times["layer"][INVARIANT].median_us,
        "peers": {name: {f"{what}_us": times[what][name].median_us for what in COMPARED} for name in times["first"]}
        | {name: {f"{what}_us": None for what in COMPARED} | {"why_not": reason} for name, reason in why_not.items()},
    }


def layer_call(weights: MoeWeights, inputs: Inputs, out: torch.Tensor) -> partial[torch.Tensor]:
    """The layer as it is measured."""
    return partial(fused_moe, inputs.x, weights.gate_up, weights.down, inputs.weights, inputs.ids, out=out)


class Routing(NamedTuple):
    """Where assignments are, int32: offsets [experts + 1], rows [places], places [tokens, topk]."""

    offsets: torch.Tensor
    rows: torch.Tensor
    places: torch.Tensor


def launch_routing(topk_ids: torch.Tensor, num_experts: int) -> Routing:
    """Sorts assignments, int32 or int64 [tokens, topk] with at least one, by expert."""
    count = topk_ids.numel()
    words = torch.empty(num_experts + 1 + 2 * count, dtype=torch.int32, device=topk_ids.device)
    offsets, rows, places = words.split((num_experts + 1, count, count))
    sort = routing_function(8 * topk_ids.element_size(), topk_ids.get_device())
    addresses = {"offsets": offsets.data_ptr(), "rows": rows.data_ptr(), "places": places.data_ptr()}
    sort(topk_ids=topk_ids, **addresses, num_experts=num_experts)
    return Routing(offsets, rows, places.view(topk_ids.shape))


def _own_calls(
    weights: MoeWeights, inputs: Inputs, routed: Routed, own: Callable[[], object]
) -> Mapping[str, Callable[[], object]]:
    """The layer, its first product as the layer computes it, with rows by index, and of rows in order, its second."""
    routing = launch_routing(inputs.ids, len(weights.gate_up))
    hidden = grouped_linear(inputs.x, weights.gate_up, routing.offsets, rows=routing.rows, activation="swiglu")
    first = partial(
        grouped_linear, inputs.x, weights.gate_up, routing.offsets, rows=routing.rows, activation="swiglu", out=hidden
    )
    in_order = partial(
        grouped_linear, routed.sorted_x, weights.gate_up, routing.offsets, activation="swiglu", out=hidden
    )
    results = grouped_linear(hidden, weights.down, routing.offsets)
    second = partial(grouped_linear, hidden, weights.down, routing.offsets, out=results)
    return {"first": first, "in_order": in_order, "second": second, "layer": own}


def _product(us: float, floor_us: float, flops: int) -> dict[str, float]:
    return {"us": us, "floor_us": floor_us, "floor_ratio": us / floor_us, "tflops": flops / us * 1e-6}


def _host_cost(bench: Bench, model: MoeModel, weights: MoeWeights) -> None:
    inputs = Inputs.of(MoeShape(model, HOST_TOKENS))
    call = layer_call(weights, inputs, torch.empty_like(inputs.x))
    host = dict(bench.recorder.data.get("moe_host_us", {}))
    host[model.name] = round(time_host(call, HOST_CALLS).median_us, 2)
    bench.recorder.set("moe_host_us", host)


def check(out: torch.Tensor, chosen: torch.Tensor, want: torch.Tensor, tolerance: float = TOLERANCE) -> float:
    """Relative error of the chosen tokens; WrongOutput if it is too large or any output is not finite."""
    error, finite = relative_error(out[chosen.to(out.device)], want), bool(torch.isfinite(out).all())
    if not (error <= tolerance and finite):
        raise WrongOutput(f"relative error {error:.2e} (at most {tolerance:g}), NaN or inf: {not finite}")
    return error


def _agreeing(
    bind: Bind, routed: Routed, chosen: torch.Tensor, want: torch.Tensor
) -> tuple[Calls, str] | tuple[None, str]:
    """A peer's calls if its layer is right and both its first products are the same in some order, else why not."""
    try:
        calls = bind(routed)
        errors = {
            "reference": relative_error(calls.layer()[chosen.to(want.device)], want),
            "product of rows by index": relative_error(*(call().sum(0, dtype=torch.float32) for call in calls[1::-1])),
        }
    except Exception as failure:
        return None, short(failure)
    for what, error in errors.items():
        if not error <= AGREEMENT:
            return None, f"disagrees with the {what}: relative error {error:.2e}"
    return calls, ""


# -- report -----------------------------------------------------------------------------------------------------------


def text(record: dict[str, Any]) -> str:
    """The run as an aligned table."""
    rows = record.get("moe", [])
    names = list(dict.fromkeys(name for row in rows for name in row["peers"]))
    header = [
        "model",
        "tokens",
        "active",
        "rows",
        "first us",
        "/ floor",
        "TFLOPS",
        "in order us",
        "second us",
        "/ floor",
    ]
    header += ["layer us", "/ floor", "eager", INVARIANT, *(f"{name}: {what}" for name in names for what in COMPARED)]
    lines = [str(record["environment"]["gpu"]), "", *aligned([header, *(_cells(row, names) for row in rows)]), ""]
    reasons = {name: peer["why_not"] for row in rows for name, peer in row["peers"].items() if "why_not" in peer}
    lines += [f"{name}: {reason}" for name, reason in reasons.items()]
    lines += [f"host cost of a layer, {name}: {us} us" for name, us in record.get("moe_host_us", {}).items()]
    lines += moe_router.lines(record.get("moe_router", []))
    lines += [
        f"{'ok     ' if bar['met'] else 'NOT MET'} {bar['what']}: {bar['measured']} ({bar['bar']})"
        for bar in record["bars"]
    ]
    lines += [f"{sum(bar['met'] for bar in record['bars'])} of {len(record['bars'])} bars met"]
    lines += [f"failed: {failure['what']}: {failure['error'][:300]}" for failure in record["failures"]]
    return "\n".join(lines)


def markdown(record: dict[str, Any], tokens: Iterable[int] = TABLE_TOKENS) -> str:
    """A line for each model and number of tokens: the first product over its floor, the layer, and the peers' times."""
    rows = [row for row in record.get("moe", []) if row["shape"]["tokens"] in tokens]
    if not rows:
        raise ValueError("record: got no measured layer of experts, want some")
    names = [name for name in dict.fromkeys(name for row in rows for name in row["peers"]) if _measured(rows, name)]
    head = ["model", "tokens", "floor", f"first product: {OURS}", "ratio to floor", "TFLOPS"]
    head += [*names, f"layer: {OURS}", *names]
    lines = []
    for row in rows:
        first, peers = row["first"], [row["peers"].get(name, {}) for name in names]
        cells = [row["shape"]["model"]["name"], str(row["shape"]["tokens"]), number(first["floor_us"])]
        cells += [f"**{number(first['us'])}**", number(first["floor_ratio"], 2), number(first["tflops"], 0)]
        cells += [number(peer.get("first_us")) for peer in peers]
        lines.append([*cells, f"**{number(row['eager_us'])}**", *(number(peer.get("layer_us")) for peer in peers)])
    about = f"us, median of {record.get('samples')} calls, cold L2, ours and others alternating; rows of x by index."
    return in_markdown(record, head, lines, about)


def _measured(rows: Iterable[dict[str, Any]], peer: str) -> bool:
    return any(row["peers"].get(peer, {}).get("first_us") is not None for row in rows)


def _cells(row: dict[str, Any], peers: Iterable[str]) -> list[str]:
    first, second, layer = row["first"], row["second"], row["layer"]
    return [
        row["shape"]["model"]["name"],
        str(row["shape"]["tokens"]),
        str(row["active"]),
        str(row["most_rows"]),
        number(first["us"]),
        number(first["floor_ratio"], 2),
        number(first["tflops"], 0),
        number(row.get("in_order", {}).get("us")),
        number(second["us"]),
        number(second["floor_ratio"], 2),
        number(layer["us"]),
        number(layer["floor_ratio"], 2),
        number(row["eager_us"]),
        number(row.get("batch_invariant_us")),
        *(number(row["peers"].get(name, {}).get(f"{what}_us")) for name in peers for what in COMPARED),
    ]
