"""The benchmark suites of decode attention: each measures, checks and records, one row at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from bench.entry import Entry
from bench.floor import StreamingFloor
from bench.kernels import told
from bench.ladder import measure_ladder
from bench.peers import PEERS, Peer, kernels_of, measure_peer, relative_error
from bench.record import Recorder
from bench.timing import ColdL2, Protocol, capture, time_cold, time_host
from bench.workloads import DecodeInputs, DecodeShape, cache_rows, make_inputs
from cute_kernels.attention.reference import decode_attention_reference

TOLERANCE = 4e-3  # relative error (norm) of a bf16 output against fp64
CHECKED_ROWS = 4
GRAPH_BATCH = 128  # requests up to which a graph is timed as well
MEMORY_RESERVE = 8 << 30


class WrongOutput(RuntimeError):
    """The kernel's output is not the reference's: its time would mean nothing."""


@dataclass
class Bench:
    """What the suites share: one GPU's flush buffer, floors, and the record they write to.

    Attributes:
        device: where inputs are made.
        flush: makes L2 cold. make_floor: of flush and protocol, what measures the floors.
        entry: what of attention is measured.
        free_bytes: memory that the device has left.
    """

    recorder: Recorder
    protocol: Protocol
    peers: tuple[Peer, ...] = PEERS
    quick: bool = False
    say: Callable[[str], None] = lambda line: None
    device: str = "cuda"
    flush: Callable[[], None] = field(default_factory=ColdL2)
    make_floor: Callable[..., StreamingFloor] = StreamingFloor
    entry: Entry = field(default_factory=Entry)
    free_bytes: Callable[[], int] = lambda: torch.cuda.mem_get_info()[0]

    def __post_init__(self) -> None:
        self.floor = self.make_floor(self.flush, self.protocol, quick=self.quick)

    def attempt(self, what: str, work: Callable[[], None]) -> None:
        """Runs one measurement; a failure is recorded and the run goes on. Says what a call has to compile."""
        begin = time.perf_counter()
        try:
            with told(self.say):
                work()
            self.say(f"{what}: {time.perf_counter() - begin:.1f} s")
        except Exception as error:
            self.say(f"{what}: FAILED: {self.recorder.add_failure(what, error)[:300]}")
        torch.cuda.empty_cache()


def run_rows(bench: Bench, suite: str, shapes: Iterable[DecodeShape], formats: Iterable[str], peers: bool) -> None:
    """One row per shape and format: check, time, floor, and peers if asked for."""
    formats = tuple(formats)
    for shape in shapes:
        for kv_format in formats:
            bench.attempt(
                f"{suite}: {kv_format} {shape.name}", lambda s=shape, f=kv_format: _run_row(bench, suite, s, f, peers)
            )


def _run_row(bench: Bench, suite: str, shape: DecodeShape, kv_format: str, with_peers: bool) -> None:
    num_bytes = shape.cache_bytes(kv_format)
    _require_memory(bench, num_bytes)
    inputs = make_inputs(shape, kv_format, device=bench.device)
    rows, want = reference_rows(inputs)
    row: dict[str, Any] = {
        "suite": suite,
        "name": shape.name,
        "shape": shape.as_dict(),
        "kv_format": kv_format,
        "cache_bytes": num_bytes,
    }
    failure: Exception | None = None
    try:
        row |= _measure_own(bench, inputs, rows, want)
    except Exception as error:  # peers and floor are worth having even so
        failure = error
        row["why_not"] = f"{type(error).__name__}: {error}"[:500]
    if with_peers:
        row["peers"] = {
            peer.name: asdict(measure_peer(peer, inputs, want, rows, bench.flush, bench.protocol))
            for peer in bench.peers
            if kv_format in peer.formats
        }
    del inputs
    torch.cuda.empty_cache()
    floor = bench.floor(num_bytes)
    row["floor"] = {"us": floor.us, "kernel": floor.kernel, "sweep_us": floor.sweep_us}
    if "us" in row:
        row["floor_ratio"] = row["us"]["median_us"] / floor.us
        row["gb_per_s"] = num_bytes / row["us"]["median_us"] * 1e-3
    bench.recorder.add_row(row)
    bench.say(told_row(row))
    if failure is not None:
        raise failure


def told_row(row: dict[str, Any]) -> str:
    """A row in a line."""
    times = {name: row[key]["median_us"] for name, key in (("us", "us"), ("in a graph", "graph_us")) if key in row}
    times |= {name: peer["us"] for name, peer in row.get("peers", {}).items() if peer["us"] is not None}
    told = ", ".join(f"{name} {us:.2f}" for name, us in times.items())
    return f"{row['suite']}: {row['kv_format']} {row['name']}: floor {row['floor']['us']:.2f}, {told}"


def _measure_own(bench: Bench, inputs: DecodeInputs, rows: torch.Tensor, want: torch.Tensor) -> dict[str, Any]:
    out = torch.full_like(inputs.q, torch.nan)  # poisoned: whatever is not written shows
    call = bench.entry.bind(inputs, out=out)
    call()
    error = _check(out, rows, want)
    timing = time_cold(call, bench.flush, bench.protocol)
    result: dict[str, Any] = {"us": timing.as_dict(), "error": error}
    if inputs.shape.batch <= GRAPH_BATCH:
        try:
            replay = _captured(call, inputs)
            out.fill_(torch.nan)
            replay()
            _check(out, rows, want)
            result["graph_us"] = time_cold(replay, bench.flush, bench.protocol).as_dict()
        except Exception as failure:  # the eager time stands
            bench.recorder.add_failure(f"graph of {inputs.kv_format} {inputs.shape.name}", failure)
    return result


def _captured(call: Callable[[], object], inputs: DecodeInputs) -> Callable[[], object]:
    """A graph of the call, captured while the device has other lengths than when it is replayed."""
    lengths = inputs.seq_lens.clone()
    inputs.seq_lens.fill_(inputs.shape.q_len)
    try:
        return capture(call)
    finally:
        inputs.seq_lens.copy_(lengths)


def _check(out: torch.Tensor, rows: torch.Tensor, want: torch.Tensor) -> float:
    """Relative error of the sampled requests; WrongOutput if that is too large or any output is not finite."""
    error = relative_error(out[rows], want)
    finite = bool(torch.isfinite(out).all())
    if not (error <= TOLERANCE and finite):
        raise WrongOutput(f"relative error {error:.2e} (at most {TOLERANCE:g}), NaN or inf: {not finite}")
    return error


def reference_rows(inputs: DecodeInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices of a few requests spread over the batch and their fp64 reference output."""
    rows, few = inputs.sample(CHECKED_ROWS)
    tensors = few.q, few.k_cache, few.v_cache, few.seq_lens
    want, _ = decode_attention_reference(
        *tensors, kv_format=inputs.kv_format, compute_dtype=torch.float64, **few.options
    )
    return rows, want


def run_cache(bench: Bench) -> None:
    """What a whole KV cache asks for: `workloads.cache_rows`."""
    for shape, kv_format in cache_rows():
        run_rows(bench, "cache", [shape], [kv_format], peers=False)


def run_host_cost(bench: Bench) -> None:
    """Host cost of the public call, on a shape whose GPU time is small."""

    def work() -> None:
        inputs = make_inputs(DecodeShape(1, seq_len=256), "int4_g1", device=bench.device)
        out = torch.empty_like(inputs.q)
        eager = time_host(bench.entry.bind(inputs)).median_us
        given = time_host(bench.entry.bind(inputs, out=out)).median_us
        bench.recorder.set("host_us", {"eager": round(eager, 3), "eager with out=": round(given, 3)})

    bench.attempt("host cost", work)


def run_ladder(
    bench: Bench,
    batches: Iterable[int] = (32, 512),
    formats: Iterable[str] = ("int4_g1", "int4_g4"),
    shape_of: Callable[[int], DecodeShape] = DecodeShape,
) -> None:
    """The optimisation ladder at each batch of the main table's shape (or ``shape_of`` it) and in each format."""
    ladders: list[dict[str, Any]] = []

    def work(batch: int, kv_format: str) -> None:
        shape = shape_of(batch)
        inputs = make_inputs(shape, kv_format, device=bench.device)
        rows, want = reference_rows(inputs)
        rungs = measure_ladder(inputs, bench.entry, bench.flush, bench.protocol, lambda out: _check(out, rows, want))
        ladders.append({"name": shape.name, "shape": shape.as_dict(), "kv_format": kv_format, "rungs": rungs})
        bench.recorder.set("ladder", ladders)

    for batch in batches:
        for kv_format in formats:
            bench.attempt(f"ladder: {kv_format} B={batch}", lambda b=batch, f=kv_format: work(b, f))


def run_evidence(bench: Bench) -> None:
    """Which GPU kernels each peer launched. Last: a profiler may slow later launches."""

    def work() -> None:
        kernels: dict[str, dict[str, dict[str, list[str]]]] = {}
        for kv_format in ("bf16", "int4_g1"):
            inputs = make_inputs(DecodeShape(16), kv_format, device=bench.device)
            found = {peer.name: kernels_of(peer, inputs) for peer in bench.peers if kv_format in peer.formats}
            kernels[kv_format] = {name: names for name, names in found.items() if names}
        bench.recorder.set("peer_kernels", kernels)

    bench.attempt("peers' kernels", work)


def _require_memory(bench: Bench, num_bytes: int) -> None:
    """The cache, as much again for the floor's buffer, and room for temporaries."""
    free = bench.free_bytes()
    needed = 2 * num_bytes + MEMORY_RESERVE
    if free < needed:
        raise MemoryError(f"this shape wants {needed >> 30} GiB of GPU memory, {free >> 30} GiB are free")
