"""Benchmark of norms with and without a residual, beside torch's operators, the streaming floor and an empty launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from bench.floor import GRANULE_BYTES
from bench.report import OURS, aligned, in_markdown, number
from bench.suites import Bench, WrongOutput
from bench.timing import empty_launch, time_cold, time_cold_in_turn, time_graph_cold
from cute_kernels import rms_norm

COLUMNS = (4096, 8192)
ROWS = (1, 32, 64, 256, 4096)
GRAPH_ROWS = 256  # up to which a graph is timed as well
TOLERANCE = 4e-3  # relative error (norm) of a bf16 result
EPS = 1e-5


@dataclass(frozen=True)
class NormShape:
    """One RMSNorm in bf16."""

    rows: int
    n: int
    residual: bool

    @property
    def num_bytes(self) -> int:
        """What must be read and written: a row in and a row out, each twice with a residual, and the weight."""
        return 2 * self.n * (self.rows * (4 if self.residual else 2) + 1)

    @property
    def name(self) -> str:
        return f"rms_norm {self.rows} x {self.n}{' + residual' if self.residual else ''}"


SHAPES = tuple(NormShape(rows, n, residual) for residual in (False, True) for n in COLUMNS for rows in ROWS)


def run(bench: Bench) -> None:
    """One row per shape under the record's key "norm"."""
    rows: list[dict[str, Any]] = []
    empty = time_cold(empty_launch, bench.flush, bench.protocol).median_us

    def work(shape: NormShape) -> None:
        rows.append(_measure(bench, shape, empty))
        bench.recorder.set("norm", rows)

    for shape in SHAPES:
        bench.attempt(shape.name, partial(work, shape))


def _calls(shape: NormShape) -> dict[str, Callable[[], Any]]:
    generator = torch.Generator("cuda").manual_seed(0)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, device="cuda", dtype=torch.bfloat16)

    x, weight, residual = random(shape.rows, shape.n), random(shape.n), random(shape.rows, shape.n)
    if not shape.residual:
        return {
            "ours": lambda: rms_norm(x, weight, eps=EPS),
            "torch": lambda: torch.nn.functional.rms_norm(x, (shape.n,), weight, EPS),
        }

    def separate() -> tuple[torch.Tensor, torch.Tensor]:
        total = x + residual
        return torch.nn.functional.rms_norm(total, (shape.n,), weight, EPS), total

    return {"ours": lambda: rms_norm(x, weight, residual=residual, eps=EPS), "torch": separate}


def _measure(bench: Bench, shape: NormShape, empty: float) -> dict[str, Any]:
    calls = _calls(shape)
    got, want = (call() for call in calls.values())
    got, want = (result[0] if shape.residual else result for result in (got, want))
    error = float((got.double() - want.double()).norm() / want.double().norm())
    if not error <= TOLERANCE:
        raise WrongOutput(f"relative error {error:.2e} to torch's, at most {TOLERANCE:g}")
    row: dict[str, Any] = {
        "name": shape.name,
        "shape": asdict(shape),
        "bytes": shape.num_bytes,
        "error": error,
        "us": {name: t.as_dict() for name, t in time_cold_in_turn(calls, bench.flush, bench.protocol).items()},
        "floor_us": bench.floor(-(-shape.num_bytes // GRANULE_BYTES) * GRANULE_BYTES).us,
        "empty_launch_us": empty,
    }
    if shape.rows <= GRAPH_ROWS:
        row["graph_us"] = {
            name: time_graph_cold(call, bench.flush, bench.protocol).as_dict() for name, call in calls.items()
        }
    return row


def text(data: dict[str, Any]) -> str:
    """The record as a table."""
    return "\n".join(table(data.get("norm", [])))


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The rows as aligned lines; none without rows."""
    if not rows:
        return []
    cells = [["shape", "MB", "us", "torch", "graph", "torch graph", "floor", "empty", "- floor"]]
    for row in rows:
        us, graph = row["us"], row.get("graph_us", {})
        cells.append([
            row["name"],
            number(row["bytes"] * 1e-6, 2),
            *(number(us[name]["median_us"]) for name in ("ours", "torch")),
            *(number(graph.get(name, {}).get("median_us")) for name in ("ours", "torch")),
            number(row["floor_us"]),
            number(row["empty_launch_us"]),
            number(us["ours"]["median_us"] - row["floor_us"], 2),
        ])  # fmt: skip
    return ["", *aligned(cells)]


def markdown(record: dict[str, Any]) -> str:
    """The record as a Markdown table. Raises ValueError if it has no norms."""
    rows = record.get("norm", [])
    if not rows:
        raise ValueError("record: got no measured norm, want some")
    head = ["rows x columns", "residual", "MB", "floor, us", f"{OURS}, us", "torch, us", "times as long"]
    lines = []
    for row in rows:
        shape, us = row["shape"], {name: time["median_us"] for name, time in row["us"].items()}
        cells = [
            f"{shape['rows']} x {shape['n']}",
            "added" if shape["residual"] else "",
            number(row["bytes"] * 1e-6, 2),
        ]
        cells += [number(row["floor_us"]), f"**{number(us['ours'])}**", number(us["torch"])]
        lines.append([*cells, number(us["torch"] / us["ours"], 2)])
    empty = f"an empty launch takes {number(rows[0]['empty_launch_us'])} us"
    return in_markdown(record, head, lines, f"median of {record.get('samples')} calls with a cold L2; {empty}.")
