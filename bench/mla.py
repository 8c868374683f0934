"""Benchmark of MLA decode: TFLOPS and gathered bytes beside FlashMLA and the streaming floor of the same run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from bench import mla_append
from bench.mla_peers import PEERS, MlaPeer, Prepared, Result
from bench.mla_workloads import SUITES, MlaInputs, MlaShape, make_inputs, shapes
from bench.report import OURS, aligned, closing, in_markdown, number
from bench.suites import Bench, WrongOutput
from bench.timing import time_cold_in_turn, time_graph_cold
from bench.why_not import short
from cute_kernels.mla.compile import MlaSpec, combine_specs
from cute_kernels.mla.schedule import choose
from cute_kernels.runtime import KernelSpec

# What FlashMLA's tests ask of an output against an fp32 one: per element, and (a - b)^2 / (a^2 + b^2) over all.
OUT_TOLERANCE = (1e-3, 2.01 / 128)  # absolute or relative
LSE_TOLERANCE = (1e-6, 8.01 / 65536)
DISTANCE = 5e-6
MUTUAL_DISTANCE = 4 * DISTANCE  # of two results that are both so close to a third: it is a square
FEW_ELEMENTS = 1e-5  # a share that may lie outside the tolerances without the time being worth nothing; a bar counts it
GRAPH_BATCHES = 2  # up to so many requests a launch's own cost shows: a graph is timed as well


def specs(suites: Iterable[str] = SUITES, quick: bool = False) -> list[KernelSpec]:
    """The kernels that the benchmark runs."""
    suites, found = tuple(suites), dict[KernelSpec, None]()
    for shape in shapes(suites, quick):
        config, _ = choose("sparse" if shape.topk else "paged", shape.kv_format, shape.head_dim, shape.work)
        found[MlaSpec(config)] = None
        found |= dict.fromkeys(combine_specs(config.layout.dtype))
    if "append" in suites:
        found |= dict.fromkeys(mla_append.specs())
    return list(found)


def run(bench: Bench, suites: Iterable[str] = SUITES, peers: Iterable[MlaPeer] = PEERS) -> None:
    """One row per shape under the record's key "mla", then the appends under "mla_append"."""
    suites = tuple(suites)
    run_shapes(bench, shapes(suites, bench.quick), peers)
    if "append" in suites:
        mla_append.run(bench)


def run_shapes(bench: Bench, chosen: Iterable[MlaShape], peers: Iterable[MlaPeer] = PEERS) -> None:
    """A row for each of some shapes under the record's key "mla"."""
    peers, rows = tuple(peers), list[dict[str, Any]]()
    for shape in chosen:
        bench.attempt(f"mla: {shape.name}", partial(_run_row, bench, rows, shape, peers))


def _run_row(bench: Bench, rows: list[dict[str, Any]], shape: MlaShape, peers: Iterable[MlaPeer]) -> None:
    row: dict[str, Any] = {
        "name": shape.name,
        "suite": shape.suite,
        "kv_format": shape.kv_format,
        "shape": shape.as_dict(),
        "flops": shape.flops,
        "gathered_bytes": shape.gathered_bytes,
        "peers": {},
    }
    failure = measure(bench, row, make_inputs(shape, bench.device), peers)
    rows.append(row)
    bench.recorder.set("mla", rows)
    if failure is not None:
        raise failure


def measure(bench: Bench, row: dict[str, Any], inputs: MlaInputs, peers: Iterable[MlaPeer]) -> Exception | None:
    """Checks ours and the peers, times them in turn, and completes the row; returns what ours failed with."""
    shape = inputs.shape
    chosen, few = inputs.sample()
    want = few.reference()
    out = torch.full((*inputs.q.shape[:3], 512), torch.nan, dtype=inputs.q.dtype, device=inputs.q.device)
    calls: dict[str, Callable[[], object]] = {}
    failure = None
    try:
        _, lse = inputs.run(out=out, return_lse=True)
        row["error"] = check((out, lse), want, chosen).as_dict()
        calls[OURS] = partial(inputs.run, out=out)
    except Exception as error:  # peers and floor are worth having even so
        failure, row["why_not"] = error, short(error)
    for peer in peers:
        row["peers"][peer.name] = found = {"us": None, "why_not": peer.missing() or peer.refuses(shape)}
        if found["why_not"] is None:
            calls |= _prepared(peer, inputs, out if OURS in calls else None, want, chosen, found)
    times = time_cold_in_turn(calls, bench.flush, bench.protocol)
    for name, timing in times.items():
        found = row if name == OURS else row["peers"][name]
        found["us"] = timing.as_dict() if name == OURS else timing.median_us
        found["tflops"], found["tb_per_s"] = rates(row, timing.median_us)
    if OURS in calls and shape.batch <= GRAPH_BATCHES:
        row["graph_us"] = time_graph_cold(calls[OURS], bench.flush, bench.protocol).as_dict()
    row["read_bytes"] = inputs.read_bytes()
    floor = bench.floor(row["read_bytes"])
    row["floor"] = {"us": floor.us, "kernel": floor.kernel}
    if OURS in times:
        row["floor_ratio"] = times[OURS].median_us / floor.us
    return failure


def rates(row: dict[str, Any], us: float) -> tuple[float, float]:
    """(TFLOPS, TB/s of tokens gathered)."""
    return row["flops"] / us * 1e-6, row["gathered_bytes"] / us * 1e-6


# -- outputs ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Closeness:
    """How far outputs are from wanted ones: ``distance`` as (a - b)^2 / (a^2 + b^2), ``outside`` elements of out and
    lse outside of the tolerances, of ``compared`` ones."""

    distance: float
    outside: int
    compared: int

    @staticmethod
    def of(found: Result, want: Result) -> Closeness:
        tolerances = (OUT_TOLERANCE, LSE_TOLERANCE)
        outside = sum(_outside(a, b, *t) for a, b, t in zip(found, want, tolerances, strict=True))
        return Closeness(distance(found[0], want[0]), outside, sum(x.numel() for x in want))

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


def check(found: Result, want: Result, chosen: torch.Tensor) -> Closeness:
    """Closeness of the requests ``chosen``; WrongOutput if they are far off or any output at all is not finite.

    found: (out, lse) of all requests, want: of the chosen ones.
    """
    close = Closeness.of((found[0][chosen], found[1][chosen]), want)
    finite = all(bool(torch.isfinite(x).all()) for x in found)
    if not (close.distance <= DISTANCE and close.outside <= FEW_ELEMENTS * close.compared and finite):
        raise WrongOutput(
            f"distance {close.distance:.2e} (at most {DISTANCE:g}), {close.outside} of {close.compared} elements "
            f"outside the tolerances, NaN or inf: {not finite}"
        )
    return close


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """(a - b)^2 / (a^2 + b^2): 1 - their cosine, if they are equally long. FlashMLA's cos_diff."""
    a, b = a.double(), b.double()
    return float((a - b).square().sum() / (a.square().sum() + b.square().sum()))


def _outside(found: torch.Tensor, want: torch.Tensor, absolute: float, relative: float) -> int:
    error = (found.double() - want.double()).abs()
    return int((~((error <= absolute) | (error <= relative * want.abs().double()))).sum())  # NaN is outside


def _prepared(
    peer: MlaPeer,
    inputs: MlaInputs,
    ours: torch.Tensor | None,
    want: Result,
    chosen: torch.Tensor,
    found: dict[str, Any],
) -> dict[str, Callable[[], object]]:
    """The peer's call by its name if what it gives is right and near ours; else ``found`` says why not."""
    try:
        prepared: Prepared = peer.prepare(inputs)
        result = prepared.result(prepared.call())
        found["error"] = check(result, want, chosen).as_dict()
        found["label"] = prepared.label
        if ours is not None:
            found["distance_from_ours"] = distance(result[0], ours)
            if not found["distance_from_ours"] <= MUTUAL_DISTANCE:
                raise WrongOutput(f"distance {found['distance_from_ours']:.2e} from ours, at most {MUTUAL_DISTANCE:g}")
    except Exception as error:  # one peer's failure must not lose the others' results
        found["why_not"] = short(error)
        return {}
    return {peer.name: prepared.call}


# -- report -----------------------------------------------------------------------------------------------------------


def text(record: dict[str, Any]) -> str:
    """The run as aligned tables."""
    rows = record.get("mla", [])
    names = list(dict.fromkeys(name for row in rows for name in row["peers"]))
    head = ["shape", "us", "min", "graph", "TFLOPS", "TB/s", "MB read", "floor", "/ floor"]
    cells = [[*head, *(title for name in names for title in (name, "TFLOPS", "x"))]]
    cells += [_cells(row, names) for row in rows]
    lines = [str(record["environment"]["gpu"])]
    lines += ["", *aligned(cells)] if rows else []
    reasons = {f"{row['name']}: {row['why_not']}": None for row in rows if row.get("why_not")}
    for row in rows:
        for name, peer in row["peers"].items():
            said = peer.get("why_not") or peer.get("label")
            reasons |= {f"{name} ({row['suite']} {row['kv_format']}): {said}": None} if said else {}
    lines += ["", *reasons] if reasons else []
    lines += mla_append.table(record.get("mla_append", []))
    return "\n".join([*lines, *closing(record)])


def _cells(row: dict[str, Any], peers: Iterable[str]) -> list[str]:
    us = row.get("us") or {}
    cells = [
        row["name"],
        number(us.get("median_us")),
        number(us.get("min_us")),
        number(row.get("graph_us", {}).get("median_us")),
        number(row.get("tflops"), 0),
        number(row.get("tb_per_s"), 2),
        number(row["read_bytes"] * 1e-6, 0),
        number(row["floor"]["us"]),
        number(row.get("floor_ratio"), 2),
    ]
    for name in peers:
        peer = row["peers"].get(name, {})
        faster = peer["us"] / us["median_us"] if peer.get("us") and us else None
        cells += [number(peer.get("us")), number(peer.get("tflops"), 0), number(faster, 2)]
    return cells


def markdown(record: dict[str, Any]) -> str:
    """A line for each shape: microseconds, rates, the floor's and the peers' times."""
    rows = [row for row in record.get("mla", []) if row.get("us")]
    if not rows:
        raise ValueError("record: got no measured row of MLA decode, want some")
    names = list(dict.fromkeys(name for row in rows for name, peer in row["peers"].items() if peer.get("us")))
    head = ["tokens", "batch", "heads", "queries", "attended", "floor, us", f"{OURS}, us", "TFLOPS", "TB/s"]
    head, lines = [*head, *(f"{name}, us (TFLOPS)" for name in names)], []
    for row in rows:
        shape = row["shape"]
        seen = f"{shape['topk']} of {shape['seq_len']}" if shape["topk"] else str(shape["seq_len"])
        seen += " shared" if shape.get("shared") else ""
        cells = [row["kv_format"], str(shape["batch"]), str(shape["num_heads"]), str(shape["q_len"]), seen]
        cells += [number(row["floor"]["us"]), f"**{number(row['us']['median_us'])}**"]
        cells += [number(row["tflops"], 0), number(row["tb_per_s"], 2)]
        lines.append([*cells, *(_peer_cell(row["peers"].get(name, {})) for name in names)])
    about = f"median of {record.get('samples')} calls, cold L2, ours and others alternating."
    return in_markdown(record, head, lines, about)


def _peer_cell(peer: dict[str, Any]) -> str:
    return f"{number(peer['us'])} ({number(peer['tflops'], 0)})" if peer.get("us") else "-"
