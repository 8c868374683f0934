"""Latency per token and tokens per second of bare decode loops, beside BF16 with torch's attention and a floor.

`python -m bench e2e`: every case is a CUDA graph of a whole step (`bench.steps`), replayed. Each is recorded at once
and is skipped where the record has it. The floor is what reading the step's bytes takes at the rate of the fastest
read-only kernel of the run.
"""

from __future__ import annotations

import gc
import re
import statistics
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from bench import gpt_oss_steps, latent_steps, steps
from bench.kernels import make_ready, needed_by_cases
from bench.report import aligned, in_markdown, number
from bench.steps import BASELINE, Shape, Step, StepCase, StepModel, resident_bytes
from bench.suites import Bench
from bench.timing import capture
from cute_kernels.runtime import KernelSpec

MODELS = steps.MODELS | latent_steps.MODELS | gpt_oss_steps.MODELS
BATCHES = (1, 8, 32, 64, 256)
CONTEXT = 8192
OTHER_CONTEXTS = ((2048, 64), (65536, 8))  # with so many requests
REPLAYS = 7
FOUND_BY = 2  # layers, by which a step's kernels are found: one of each kind
MARK = "<!-- bench:e2e-steps -->"
FLOOR_BYTES = 4 << 30  # what the rate of reading is measured on
RESERVE = 6 << 30  # of the GPU's memory: activations, graphs, what torch keeps
KINDS = {
    "router": r"kernelsgemmexpertsrouter",
    "experts": r"kernelsgemmexperts|Grouped(?:Limb|Tile)Size|moe",
    "norm": r"^(?!.*kernelsgemm).*norm",  # products around a deferred norm are products
    "append": r"kv_cache|kernelsmla_?cache",
    "attention": r"attention|fmha|flash|sdpa|cudnn|kernelsmla",
    "products": r"linear|gemm|nvjet|cutlass|cublas|splitKreduce|gemv",
}  # kernels' names, the first that fits


@dataclass(frozen=True)
class Point:
    """One figure that is measured."""

    model: str
    case: StepCase
    shape: Shape

    @property
    def key(self) -> tuple[Any, ...]:
        return self.model, self.case.name, self.shape.batch, self.shape.context

    @property
    def name(self) -> str:
        return f"{self.model}: {self.case.name}, B={self.shape.batch}, {self.shape.context} tokens"


def points(
    models: Iterable[str], batches: Iterable[int], contexts: Iterable[int] | None, only: str = ""
) -> list[Point]:
    """Every case at every batch, in `CONTEXT` tokens and some others, or in those that are given.

    only: a regular expression that is found in the names of the cases.
    """
    batches = tuple(batches)
    shapes = [Shape(batch, context) for context in contexts or (CONTEXT,) for batch in batches]
    if contexts is None:
        shapes += [Shape(batch, context) for context, batch in OTHER_CONTEXTS]
    every = [Point(model, case, shape) for model in models for shape in shapes for case in MODELS[model].cases]
    return [point for point in every if re.search(only, point.case.name)]


def run(bench: Bench, chosen: Iterable[Point], seconds: float) -> None:
    """A row for each point under the record's "rows". After so many seconds the rest is left for another run."""
    chosen = [point for point in not_recorded(chosen, bench.recorder.data["rows"]) if not _does_not_fit(bench, point)]
    bench.attempt("kernels", lambda: make_ready(kernels_of(chosen), bench.say))
    bench.recorder.set("bytes_per_us", bytes_per_us(bench))
    measure_in_time(bench, chosen, seconds, lambda point: measure(bench, point))


def kernels_of(chosen: Iterable[Point], device: str = "cuda") -> list[KernelSpec]:
    """The kernels of all steps, found by two layers of each."""

    def steps_of(point: Point) -> list[Step]:
        torch.cuda.empty_cache()
        return [MODELS[point.model].step(point.case, point.shape, device, layers=FOUND_BY)]

    return needed_by_cases(partial(steps_of, point) for point in chosen)


def not_recorded(chosen: Iterable[Point], rows: Iterable[dict[str, Any]]) -> list[Point]:
    """Those that have no row yet."""
    recorded = {key_of(row) for row in rows}
    return [point for point in chosen if point.key not in recorded]


def measure_in_time(
    bench: Bench, chosen: Iterable[Point], seconds: float, row_of: Callable[[Point], dict[str, Any]]
) -> None:
    """Records the row of each point, and says how many are left after so many seconds."""

    def record(point: Point) -> None:
        row = row_of(point)
        bench.recorder.add_row(row)
        bench.say(told(row))

    left = 0
    for point in chosen:
        if bench.recorder.seconds() > seconds:
            left += 1
        else:
            bench.attempt(point.name, lambda p=point: record(p))
    if left:
        bench.say(f"{left} figures are left: the same command goes on with this record")


def told(row: dict[str, Any]) -> str:
    """A row in a line."""
    name = f"{row['model']}: {row['case']}, B={row['batch']}"
    parts = ", ".join(f"{kind} {us:.1f}" for kind, us in row["account_us"].items())
    name += "" if row.get("finite", True) else " (NOT FINITE)"
    return f"{name}: {row['ms']:.3f} ms, floor {row['floor_ms']:.3f}; us a layer: {parts}"


def key_of(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["model"], row["case"], row["batch"], row["context"]


def _does_not_fit(bench: Bench, point: Point) -> bool:
    memory = torch.cuda.get_device_properties(0).total_memory - RESERVE
    if resident_bytes(MODELS[point.model], point.case, point.shape) <= memory:
        return False
    bench.say(f"{point.name}: does not fit")
    return True


def largest_batch(model: StepModel, case: StepCase, context: int, memory: float) -> int:
    """Requests whose cache fits beside the model's weights; 0 if the weights alone do not."""
    weights = resident_bytes(model, case, Shape(0, context))
    each = resident_bytes(model, case, Shape(1, context)) - weights
    return max(0, int((memory - weights) // each))


def bytes_per_us(bench: Bench) -> float:
    """The fastest that memory is read here."""
    rate = FLOOR_BYTES / bench.floor(FLOOR_BYTES).us
    bench.floor.release()
    return rate


def measure(bench: Bench, point: Point) -> dict[str, Any]:
    """Median of `REPLAYS` of the step's graph, and what its kernels take each."""
    model = MODELS[point.model]
    step = model.step(point.case, point.shape)
    try:
        replay = capture(step)
        ms = statistics.median(_replay_ms(replay) for _ in range(REPLAYS + 1))
        floor_ms = step.bytes / bench.recorder.data["bytes_per_us"] * 1e-3
        memory = torch.cuda.get_device_properties(0).total_memory - RESERVE
        return {
            "model": point.model,
            "case": point.case.name,
            "batch": point.shape.batch,
            "context": point.shape.context,
            "ms": ms,
            "tokens_per_s": point.shape.batch / ms * 1e3,
            "bytes": step.bytes,
            "floor_ms": floor_ms,
            "floor_ratio": ms / floor_ms,
            "account_us": account(replay, step.layers),
            "largest_batch": largest_batch(model, point.case, point.shape.context, memory),
            "how": asdict(point.case),
            "one_launch": step.one_launch,
            "finite": bool(step().isfinite().all()),
        }
    finally:
        del step
        gc.collect()
        torch.cuda.empty_cache()


def _replay_ms(replay: Callable[[], object]) -> float:
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    replay()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop)


def account(replay: Callable[[], object], layers: int) -> dict[str, float]:
    """Microseconds of each kind of kernel a layer, as `shares` has them; empty where profiling is not allowed."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        replay()
        torch.cuda.synchronize()
    kernels = [event for event in profiler.events() or [] if event.device_type == DeviceType.CUDA]
    found = shares([(event.name, event.time_range.start, event.time_range.end) for event in kernels])
    return {kind: round(us / layers, 3) for kind, us in sorted(found.items())}


def shares(kernels: Iterable[tuple[str, float, float]]) -> dict[str, float]:
    """Of each kind, how much later a chain of kernels, (name, start, end), ends because of it.

    Kernels overlap: one that has begun may wait for the one before. It counts from where that one has ended, so that
    all kinds together are the step.
    """
    found: dict[str, float] = {}
    last = None
    for name, start, end in sorted(kernels, key=lambda kernel: kernel[2]):
        before = start if last is None else last
        found[kind_of(name)] = found.get(kind_of(name), 0.0) + end - before
        last = end
    return found


def kind_of(kernel: str) -> str:
    """Of `KINDS`, by a kernel's name."""
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, kernel, re.IGNORECASE)), "other")


# -- report -----------------------------------------------------------------------------------------------------------


def baselines(rows: Iterable[dict[str, Any]]) -> dict[tuple[Any, ...], float]:
    """Milliseconds of BF16 with torch's attention, by model, batch and context."""
    return {(row["model"], row["batch"], row["context"]): row["ms"] for row in rows if row["case"] == BASELINE.name}


def text(record: dict[str, Any]) -> str:
    """The run as aligned tables."""
    cells = [
        ["model", "weights, KV", "B", "tokens", "ms", "/ floor", "tokens/s", "times BF16", "largest B", "a layer, us"]
    ]
    base = baselines(record["rows"])
    for row in record["rows"]:
        dense = base.get((row["model"], row["batch"], row["context"]))
        cells.append([
            row["model"],
            row["case"],
            str(row["batch"]),
            str(row["context"]),
            number(row["ms"], 3),
            number(row["floor_ratio"], 2),
            number(row["tokens_per_s"], 0),
            number(dense / row["ms"] if dense else None, 2),
            str(row["largest_batch"]),
            ", ".join(f"{kind} {us:.1f}" for kind, us in row["account_us"].items()),
        ])  # fmt: skip
    rate = record.get("bytes_per_us", 0) * 1e-3
    failed = [f"failed: {failure['what']}: {failure['error'][:300]}" for failure in record["failures"]]
    return "\n".join([f"{record['environment']['gpu']}: reads {rate:.0f} GB/s", "", *aligned(cells), *failed])


def markdown(record: dict[str, Any]) -> str:
    """The figures as a Markdown table. Raises ValueError if there are none."""
    if not record["rows"]:
        raise ValueError("record: got no measured step, want some")
    base = baselines(record["rows"])
    lines = []
    for row in record["rows"]:
        model = MODELS[row["model"]]
        dense = base.get((row["model"], row["batch"], row["context"]))
        name = f"{model.name} ({model.about})" if model.about else model.name
        gain = number(dense / row["ms"], 2) if dense else ""
        cells = [name, row["case"], str(row["batch"]), str(row["context"]), f"**{number(row['ms'], 2)}**"]
        cells += [number(row["floor_ratio"], 2), number(row["tokens_per_s"], 0), gain, str(row["largest_batch"])]
        lines.append(cells)
    head = ["model", "weights, KV", "requests", "tokens each", "ms", "/ floor", "tokens/s", "times BF16", "fit"]
    about = "CUDA graphs of bare loops, random weights, no LM head unless a line says so. "
    about += "BF16 is cuBLAS and torch's attention. "
    about += "Fit: requests that have room beside the weights."
    # A case's name is no pair of formats of K and V.
    caches = [{"kv": row["case"].partition(", ")[2]} for row in record["rows"]]
    return in_markdown({**record, "rows": caches}, head, lines, about)
