"""Benchmark of append_mla: one token to a prefill's, beside an empty launch and a copy of the same bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from bench.append import copy_us
from bench.mla_workloads import PAGE_SIZE
from bench.report import aligned, number
from bench.suites import Bench, WrongOutput
from bench.timing import empty_launch, time_cold, time_graph_cold
from cute_kernels.kv_cache.rope import Rope
from cute_kernels.mla.cache import append_mla
from cute_kernels.mla.cache.call import AppendMlaCall
from cute_kernels.mla.cache.compile import WriteSpec
from cute_kernels.mla.cache.config import WriteConfig
from cute_kernels.mla.cache.reference import tokens_of
from cute_kernels.mla.formats import format_of
from layouts.kv.mla import ROPE_DIM

FORMATS = {"mla_fp8": 576, "mla_model1": 512, "mla_bf16": 576}  # and the columns of their tokens
TOKENS = (1, 128, 4096, 65536)
ROPE = Rope(ROPE_DIM, interleaved=True)
SPARE_SLOTS = 4  # times as many slots as tokens: appends land all over a cache
GRAPH_TOKENS = 128  # up to which a graph is timed as well
CHECKED_TOKENS = 4096
ROTATION_TOLERANCE = 4e-3  # relative error (norm) of the rotated columns, in bf16


@dataclass(frozen=True)
class MlaAppendShape:
    """One append of bf16 numbers with RoPE, each token to a slot of its own."""

    kv_format: str
    tokens: int

    @property
    def head_dim(self) -> int:
        return FORMATS[self.kv_format]

    @property
    def num_bytes(self) -> int:
        """What must be read and written: numbers in bf16, slot and position in int64, and the token."""
        return self.tokens * (2 * self.head_dim + 8 + 8 + format_of(self.kv_format).row_bytes(self.head_dim))

    @property
    def name(self) -> str:
        return f"append {self.kv_format} {self.tokens} token{'s' * (self.tokens > 1)}"


SHAPES = tuple(MlaAppendShape(kv_format, tokens) for kv_format in FORMATS for tokens in TOKENS)


def specs() -> list[WriteSpec]:
    """The kernels that the appends run: numbers of tokens do not matter."""
    return [WriteSpec(WriteConfig(name, head_dim, "bf16", "interleaved")) for name, head_dim in FORMATS.items()]


def make_call(shape: MlaAppendShape, device: torch.device | str = "cuda") -> AppendMlaCall:
    """Views of one projection, slots and positions at random."""
    generator = torch.Generator(device).manual_seed(0)
    form, tokens = format_of(shape.kv_format), shape.tokens
    x = torch.randn((tokens, shape.head_dim), generator=generator, dtype=torch.bfloat16, device=device)
    pages = -(-SPARE_SLOTS * tokens // PAGE_SIZE)
    size = (pages, PAGE_SIZE, form.row_elements(shape.head_dim))
    return AppendMlaCall(
        latent=x[:, :-ROPE_DIM],
        k_rope=x[:, -ROPE_DIM:],
        cache=torch.zeros(size, dtype=form.cache_dtypes[0], device=device),
        slot_mapping=torch.randperm(pages * PAGE_SIZE, generator=generator, device=device)[:tokens],
        kv_format=shape.kv_format,
        rope=ROPE,
        position_ids=torch.randint(0, 1 << 15, (tokens,), generator=generator, device=device),
    )


def bind(call: AppendMlaCall) -> partial[None]:
    """The public call, with nothing left to pass."""
    given: dict[str, Any] = call._asdict()
    return partial(append_mla, **given)


def check(call: AppendMlaCall, append: Callable[[], None] | None = None) -> float:
    """Relative error of the rotated columns; WrongOutput if it is large or a latent column is not the quantiser's.

    append: what writes the call's tokens, if not the public call.
    """
    call.cache.view(torch.uint8).fill_(0xFF)  # NaN: what is not written shows
    (append or bind(call))()
    steps, device = min(call.num_tokens, CHECKED_TOKENS), call.slot_mapping.device
    rows = torch.linspace(0, call.num_tokens - 1, steps, device=device).long()
    assert call.position_ids is not None
    few = call._replace(latent=call.latent[rows], k_rope=call.k_rope[rows], position_ids=call.position_ids[rows])
    want = torch.zeros((len(rows), 1, call.cache.shape[2]), dtype=call.cache.dtype, device=call.cache.device)
    places = torch.arange(len(rows), device=rows.device)
    call.form.scatter(want, places, call.form.quantize(tokens_of(few)))
    got, wanted = (
        call.form.fetch(cache, slots, call.head_dim, torch.float64)
        for cache, slots in ((call.cache, call.slot_mapping[rows]), (want, places))
    )
    latent, turned = slice(0, -ROPE_DIM), slice(-ROPE_DIM, None)
    wrong = int((got[:, latent] != wanted[:, latent]).sum())
    error = float((got[:, turned] - wanted[:, turned]).norm() / wanted[:, turned].norm())
    if wrong or not error <= ROTATION_TOLERANCE:
        raise WrongOutput(
            f"{wrong} latent columns of {len(rows)} tokens are not the quantiser's; relative error of the rotated "
            f"columns {error:.2e}, at most {ROTATION_TOLERANCE:g}"
        )
    return error


def run(bench: Bench, shapes: Sequence[MlaAppendShape] = SHAPES) -> None:
    """One row per shape under the record's key "mla_append"."""
    rows: list[dict[str, Any]] = []
    empty = time_cold(empty_launch, bench.flush, bench.protocol).median_us

    def work(shape: MlaAppendShape) -> None:
        rows.append(_measure(bench, shape, empty))
        bench.recorder.set("mla_append", rows)

    for shape in shapes:
        bench.attempt(f"mla: {shape.name}", partial(work, shape))


def _measure(bench: Bench, shape: MlaAppendShape, empty: float) -> dict[str, Any]:
    call = make_call(shape, bench.device)
    error, work = check(call), bind(call)
    row: dict[str, Any] = {
        "name": shape.name,
        "shape": asdict(shape),
        "bytes": shape.num_bytes,
        "error": error,
        "us": time_cold(work, bench.flush, bench.protocol).as_dict(),
        "copy_us": copy_us(bench, shape.num_bytes),
        "empty_launch_us": empty,
    }
    if shape.tokens <= GRAPH_TOKENS:
        row["graph_us"] = time_graph_cold(work, bench.flush, bench.protocol).as_dict()
    return row


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The rows as aligned lines; none without rows."""
    if not rows:
        return []
    cells = [["shape", "MB", "us", "min", "graph", "empty", "copy", "/ copy"]]
    for row in rows:
        us = row["us"]["median_us"]
        cells.append([
            row["name"],
            number(row["bytes"] * 1e-6, 2),
            number(us),
            number(row["us"]["min_us"]),
            number(row.get("graph_us", {}).get("median_us")),
            number(row["empty_launch_us"]),
            number(row["copy_us"]),
            number(us / row["copy_us"], 2),
        ])  # fmt: skip
    return ["", *aligned(cells)]
