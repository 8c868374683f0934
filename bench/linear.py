"""Benchmark of weight-only linear layers: one row of x to thousands, beside the floor of the weight bytes and peers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch

from bench import linear_apart
from bench.linear_peers import PEERS, LinearPeer, Product, Weights
from bench.peers import AGREEMENT, relative_error
from bench.random_weights import TORCH_DTYPES, Format
from bench.report import INVARIANT, aligned, in_markdown, number
from bench.suites import TOLERANCE, Bench, WrongOutput
from bench.timing import time_cold_in_turn, time_host
from bench.why_not import short
from cute_kernels.gemm import PackedWeight, quantized_linear
from cute_kernels.gemm.choice import chosen
from cute_kernels.gemm.quantize import pack_codes
from cute_kernels.gemm.spec import GemmSpec
from cute_kernels.runtime import KernelSpec

LAYERS = ((8192, 8192), (8192, 28672), (57344, 8192), (28672, 4096), (4096, 4096))  # N, K
# Of Llama-2-70B at eight GPUs, Llama-3-8B, Qwen3-14B and the like.
SHARDS = (
    *((1280, 8192), (8192, 1024), (7168, 8192), (8192, 3584)),
    *((6144, 4096), (4096, 14336), (5120, 2560), (5120, 12800)),
)
ROWS = tuple(1 << i for i in range(14))
QUICK_ROWS = (1, 16, 128, 1024)
BETWEEN_ROWS = (
    *(3, 5, 6, 7, 12, 20, 24, 28, 40, 48, 56, 72, 80, 96, 112, 136, 144, 160, 176, 192, 208, 224, 240),
    *(272, 320, 384, 448, 520, 600, 700, 768, 900, 1100, 1300, 1536, 1800, 2200, 3000),
)  # some numbers of rows that are no powers of two
FORMATS = (Format(4), Format(8))
OTHER_FORMATS = (Format(4, zero_point=True, dtype="fp16"),)  # of which there are records, too
CHECKED_ROWS = 16
MANY_FLOPS = 2e12  # of a call beyond which fewer samples do
FEW_SAMPLES = 5
HOST_ROWS = 16  # up to which the host's share of an eager call is measured: it does not depend on the rows
HOST_CALLS = 100


@dataclass(frozen=True)
class LinearShape:
    """One product: x [m, k] with W [n, k]."""

    n: int
    k: int
    m: int
    form: Format

    def as_dict(self) -> dict[str, Any]:
        """Sizes and bits, and what else of the format is not as in `FORMATS`."""
        usual = asdict(FORMATS[0])
        form = {name: value for name, value in asdict(self.form).items() if name == "bits" or value != usual[name]}
        return {"n": self.n, "k": self.k, "m": self.m, **form}

    @property
    def weight_bytes(self) -> int:
        """Codes, scales and zero points, which each call must read."""
        scale = 2 + self.form.zero_point
        return self.n * (self.k * self.form.bits // 8 + scale * self.form.num_groups(self.n, self.k))

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k

    @property
    def format(self) -> str:
        """Of `FORMATS` w4a16 and w8a16, of others as the command names them."""
        return f"w{self.form.bits}a16" if self.form in FORMATS else self.form.name

    @property
    def name(self) -> str:
        return f"{self.n} x {self.k}, M = {self.m}"


def specs(
    layers: Iterable[tuple[int, int]] = LAYERS,
    rows: Iterable[int] = ROWS,
    formats: Iterable[Format] = FORMATS,
) -> list[KernelSpec]:
    """The kernels that the benchmark runs; most of them ship."""
    found: dict[KernelSpec, None] = {}
    for n, k in layers:
        for form in formats:
            for m in rows:
                problem = form.problem(m, n, k)
                for of_mode in (problem, replace(problem, batch_invariant=True)):
                    found |= {GemmSpec(chosen(of_mode).config): None}
    return list(found)


def make_weights(n: int, k: int, form: Format, device: torch.device | str = "cuda") -> Weights:
    """Random codes, scales that make products of about unit size, zero points."""
    generator = torch.Generator(device).manual_seed(0)
    random = {"generator": generator, "device": device}
    codes = torch.randint(0, 1 << form.bits, (n, k), dtype=torch.uint8, **random)
    spread, groups = k**-0.5 / (1 << (form.bits - 1)), form.num_groups(n, k)
    scales = (spread * (0.5 + torch.rand((n, groups), **random))).to(TORCH_DTYPES[form.dtype])
    zeros = torch.randint(0, 1 << form.bits, (n, groups), dtype=torch.uint8, **random) if form.zero_point else None
    return Weights(codes, scales, form.bits, form.group_size, zeros)


def pack(weights: Weights) -> PackedWeight:
    n, k = weights.codes.shape
    return pack_codes(
        lambda start, stop: weights.codes[start:stop],
        weights.scales,
        weights.zeros,
        bits=weights.bits,
        group_size=weights.group_size or None,
        shape=(n, k),
    )


@dataclass
class Layer:
    """One weight as everybody wants it: packed here, prepared by each peer that is here.

    products: of each peer; by_row: those whose weight is `Weights.by_row`.
    """

    weights: Weights
    packed: PackedWeight
    products: dict[str, Product]
    why_not: dict[str, str]
    by_row: set[str] = field(default_factory=set)

    @staticmethod
    def of(weights: Weights, peers: Iterable[LinearPeer]) -> Layer:
        layer = Layer(weights, pack(weights), {}, {})
        for peer in peers:
            if peer.takes(weights):
                reason = peer.missing()
                try:
                    if reason is None:
                        layer.products[peer.name] = peer.prepare(weights.by_row if peer.by_row else weights)
                except Exception as error:  # one peer's failure must not lose the others' results
                    reason = short(error)
                if reason is not None:
                    layer.why_not[peer.name] = reason
                elif peer.by_row:
                    layer.by_row.add(peer.name)
        return layer

    @cached_property
    def dense(self) -> torch.Tensor:
        """W in fp32, of weights rounded to the dtype of x."""
        return self.weights.dense.float()

    @cached_property
    def dense_by_row(self) -> torch.Tensor:
        return self.weights.by_row.dense.float()


def run(
    bench: Bench,
    layers: Iterable[tuple[int, int]] = LAYERS,
    rows: Iterable[int] = ROWS,
    formats: Iterable[Format] = FORMATS,
    peers: Iterable[LinearPeer] = PEERS,
    earlier: dict[str, Any] | None = None,
) -> None:
    """One row per layer, format of weights and number of rows under the record's key "linear".

    earlier: record of a run of another process, whose peers' times are taken over: see `linear_apart`. ValueError if
    it is of another GPU, commit or protocol.
    """
    found: list[dict[str, Any]] = []
    rows, peers = tuple(rows), tuple(peers)
    if earlier is not None:
        linear_apart.check(earlier, bench.recorder.data)
        bench.recorder.set("peers_from", linear_apart.about(earlier))
    for n, k in layers:
        for form in formats:
            work = partial(_run_layer, bench, found, n, k, form, rows, peers, earlier)
            bench.attempt(f"linear: {LinearShape(n, k, 1, form).format} {n} x {k}", work)


def _run_layer(
    bench: Bench,
    found: list[dict[str, Any]],
    n: int,
    k: int,
    form: Format,
    rows: Iterable[int],
    peers: Iterable[LinearPeer],
    earlier: dict[str, Any] | None,
) -> None:
    layer = Layer.of(make_weights(n, k, form), peers)
    for m in rows:
        shape = LinearShape(n, k, m, form)
        try:
            row = measure(bench, shape, layer)
            found.append(linear_apart.with_peers(row, earlier) if earlier else row)
        except Exception as error:
            what = f"linear: {shape.format} {shape.name}"
            bench.say(f"{what}: FAILED: {bench.recorder.add_failure(what, error)[:300]}")
        bench.recorder.set("linear", found)


def measure(bench: Bench, shape: LinearShape, layer: Layer) -> dict[str, Any]:
    """Checks and times one product, ours and the peers' in turn: so they meet the same clocks."""
    x = torch.randn((shape.m, shape.k), device=layer.packed.device).to(layer.packed.dtype)
    out = torch.full((shape.m, shape.n), torch.nan, dtype=x.dtype, device=x.device)  # whatever is not written shows
    own = partial(quantized_linear, x, layer.packed, out=out)
    invariant = partial(own, batch_invariant=True)
    chosen = torch.linspace(0, shape.m - 1, min(shape.m, CHECKED_ROWS), device=x.device).long()
    some = x[chosen].float()
    want = some @ layer.dense.T
    check(invariant(), chosen, want)
    out.fill_(torch.nan)
    error = check(own(), chosen, want)
    calls: dict[str, Callable[[], object]] = {"": own, INVARIANT: invariant}
    why_not = dict(layer.why_not)
    for name, product in layer.products.items():
        reason = disagreement(product, x, chosen, some @ layer.dense_by_row.T if name in layer.by_row else want)
        if reason is None:
            calls[name] = partial(product, x)
        else:
            why_not[name] = reason
    protocol = bench.protocol
    if shape.flops > MANY_FLOPS:
        protocol = replace(protocol, samples=min(protocol.samples, FEW_SAMPLES), warmup=1)
    times = time_cold_in_turn(calls, bench.flush, protocol)
    us, invariant_us = times.pop(""), times.pop(INVARIANT).median_us
    floor = bench.floor(shape.weight_bytes)
    host_us = round(time_host(own, HOST_CALLS).median_us, 2) if shape.m <= HOST_ROWS else None
    return {
        "name": shape.name,
        "format": shape.format,
        "shape": shape.as_dict(),
        "weight_bytes": shape.weight_bytes,
        "error": error,
        "us": us.as_dict(),
        "batch_invariant_us": invariant_us,
        "host_us": host_us,
        "tflops": shape.flops / us.median_us * 1e-6,
        "floor": {"us": floor.us, "kernel": floor.kernel},
        "floor_ratio": us.median_us / floor.us,
        "peers": {name: {"us": time.median_us} for name, time in times.items()}
        | {name: {"us": None, "why_not": reason} for name, reason in why_not.items()},
    }


def check(out: torch.Tensor, chosen: torch.Tensor, want: torch.Tensor) -> float:
    """Relative error of the chosen rows; WrongOutput if it is too large or any output is not finite."""
    error, finite = relative_error(out[chosen], want), bool(torch.isfinite(out).all())
    if not (error <= TOLERANCE and finite):
        raise WrongOutput(f"relative error {error:.2e} (at most {TOLERANCE:g}), NaN or inf: {not finite}")
    return error


def disagreement(product: Product, x: torch.Tensor, chosen: torch.Tensor, want: torch.Tensor) -> str | None:
    """Why a peer's product is not timed."""
    try:
        error = relative_error(product(x)[chosen], want)
    except Exception as failure:
        return short(failure)
    return None if error <= AGREEMENT else f"disagrees with the reference: relative error {error:.2e}"


# -- report -----------------------------------------------------------------------------------------------------------


def text(record: dict[str, Any]) -> str:
    """The run as an aligned table."""
    rows = record.get("linear", [])
    names = list(dict.fromkeys(name for row in rows for name, peer in row["peers"].items() if peer["us"] is not None))
    cells = [["format", "N x K", "M", "us", "min", "floor", "/ floor", INVARIANT, "host", "TFLOPS", *names]]
    cells += [_cells(row, names) for row in rows]
    reasons = {
        f"{name} ({row['format']})": peer["why_not"]
        for row in rows
        for name, peer in row["peers"].items()
        if peer["us"] is None
    }
    lines = [str(record["environment"]["gpu"]), "", *aligned(cells), ""]
    lines += [f"{name}: {reason}" for name, reason in reasons.items()]
    lines += [
        f"{'ok     ' if bar['met'] else 'NOT MET'} {bar['what']}: {bar['measured']} ({bar['bar']})"
        for bar in record["bars"]
    ]
    met = sum(bar["met"] for bar in record["bars"])
    lines += [f"{met} of {len(record['bars'])} bars met"]
    lines += [f"failed: {failure['what']}: {failure['error'][:300]}" for failure in record["failures"]]
    return "\n".join(lines)


def _cells(row: dict[str, Any], peers: Iterable[str]) -> list[str]:
    shape, us = row["shape"], row["us"]["median_us"]
    return [
        row["format"],
        f"{shape['n']} x {shape['k']}",
        str(shape["m"]),
        number(us),
        number(row["us"]["min_us"]),
        number(row["floor"]["us"]),
        number(row["floor_ratio"], 2),
        number(row.get("batch_invariant_us")),
        number(row.get("host_us")),
        number(row["tflops"], 0),
        *(number(row["peers"].get(name, {}).get("us")) for name in peers),
    ]


def markdown(record: dict[str, Any]) -> str:
    """A line for each layer and width of codes, microseconds for each number of rows, in brackets the best peer's."""
    rows = record["linear"]
    columns = sorted({row["shape"]["m"] for row in rows})
    head, lines = ["N x K", "weights", "floor", *(f"M = {m}" for m in columns)], []
    for (layer, form), group in _layers(rows):
        by_m = {row["shape"]["m"]: row for row in group}
        cells = [_with_best(by_m[m]) if m in by_m else "-" for m in columns]
        lines.append([layer, form, number(group[0]["floor"]["us"]), *cells])
    about = (
        f"us, median of {record.get('samples')} calls with a cold L2; groups of {FORMATS[0].group_size}; in brackets "
        "the fastest peer's."
    )
    return in_markdown(record, head, lines, about)


def _layers(rows: Iterable[dict[str, Any]]) -> Iterator[tuple[tuple[str, str], list[dict[str, Any]]]]:
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((f"{row['shape']['n']} x {row['shape']['k']}", row["format"]), []).append(row)
    yield from groups.items()


def _with_best(row: dict[str, Any]) -> str:
    times = [peer["us"] for peer in row["peers"].values() if peer["us"] is not None]
    best = f" ({number(min(times))})" if times else ""
    return f"**{number(row['us']['median_us'])}**{best}"
