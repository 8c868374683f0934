"""Benchmark of extend attention: chunks, verified drafts and mixed batches over pages in every format.

FlashAttention-3 in bf16 runs beside it. Every figure's output is compared with fp64 first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from bench import perplexity
from bench.kernels import make_ready, needed_by
from bench.peers import fa3_missing
from bench.report import aligned, in_markdown, number
from bench.suites import TOLERANCE, Bench, WrongOutput
from bench.timing import Timing, time_cold_in_turn
from bench.workloads import beside_rows, given_scale
from cute_kernels import decode_attention, extend_attention, mixed_attention
from cute_kernels.attention.reference import extend_attention_reference
from cute_kernels.formats.kv import format_of
from cute_kernels.runtime.captures import nothing_collected

FORMATS = ("bf16", "int8_token_head", "e4m3_token_head", "e4m3_tensor", "int4_g1", "int4_g4")
FP8_FORMAT, FP8_PRODUCTS = "e4m3_tensor", "e4m3_tensor, FP8 products"
FA3_FP8 = "FA3 in FP8"
HEAD_DIM, PAGE_SIZE = 128, 64
FP8_TOLERANCE = 6e-2  # queries and probabilities keep 4 bits
CHECKED_QUERIES = 64  # of the last request
PIECE_PAGES = 512  # that are quantised at a time


@dataclass(frozen=True)
class ExtendShape:
    """``batch`` requests with q_len new queries each over seq_len tokens."""

    batch: int
    q_len: int
    seq_len: int
    num_q_heads: int = 32
    num_kv_heads: int = 8

    @property
    def name(self) -> str:
        return f"{self.batch} x {self.q_len} over {self.seq_len}, {self.num_q_heads}/{self.num_kv_heads}"

    @property
    def flops(self) -> int:
        """Of both products for the keys that queries see."""
        seen = self.q_len * self.seq_len - self.q_len * (self.q_len - 1) // 2
        return 4 * HEAD_DIM * self.num_q_heads * self.batch * seen


PREFILLS = (ExtendShape(1, 16384, 16384), ExtendShape(1, 16384, 16384, 64), ExtendShape(4, 4096, 4096))
CHUNKS = tuple(ExtendShape(1, q_len, seq_len) for q_len in (512, 2048) for seq_len in (8192, 32768, 65536))
CHUNKS = (*CHUNKS, ExtendShape(1, 2048, 32768, 64))
DRAFTS = tuple(ExtendShape(32, q_len, 8192) for q_len in (17, 32, 64))
SHAPES = (*PREFILLS, *CHUNKS, *DRAFTS)
PLACES: dict[str, int | None] = {"pages of 16": 16, "contiguous": None}  # of bf16, beside pages of 64
MIXED_FORMATS = ("bf16", "int8_token_head", "int4_g4")
MIXED_DECODES, MIXED_CHUNK, MIXED_TOKENS = 63, 2048, 8192
FEW_QUERIES = (1, 4)  # that decode attention has for INT4
FEW_QUERIES_BATCHES = (1, 8, 32)
TITLES = {"1 queries": "1 query", "in turn": "one after the other", "side by side": "concurrently"}  # of records' names


@dataclass(frozen=True)
class Inputs:
    """One shape's tensors: bf16 pages in random order, and what finds them."""

    shape: ExtendShape
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    lengths: torch.Tensor
    ends: torch.Tensor
    table: torch.Tensor

    @staticmethod
    def of(shape: ExtendShape) -> Inputs:
        generator = torch.Generator("cuda").manual_seed(0)
        pages = -(-shape.seq_len // PAGE_SIZE)

        def random(*size: int) -> torch.Tensor:
            return torch.randn(size, generator=generator, device="cuda", dtype=torch.bfloat16)

        cache = (shape.batch * pages, PAGE_SIZE, shape.num_kv_heads, HEAD_DIM)
        order = torch.randperm(shape.batch * pages, generator=generator, device="cuda", dtype=torch.int32)
        return Inputs(
            shape,
            random(shape.batch * shape.q_len, shape.num_q_heads, HEAD_DIM),
            random(*cache),
            random(*cache),
            torch.full((shape.batch,), shape.seq_len, dtype=torch.int32, device="cuda"),
            torch.arange(shape.batch + 1, dtype=torch.int32, device="cuda") * shape.q_len,
            order.view(shape.batch, pages),
        )

    def call(
        self, kv_format: str, page_size: int | None = PAGE_SIZE, **options: Any
    ) -> tuple[Callable[[], Any], dict[str, Any]]:
        """(our call, its arguments) over caches in a format; page_size: None for contiguous ones."""
        form, scales = format_of(kv_format), {}
        caches, table = [self.k, self.v], self.table
        if page_size is None:
            caches = [cache[self.table.long()].flatten(1, 2) for cache in caches]
        elif page_size < PAGE_SIZE:
            parts = PAGE_SIZE // page_size
            caches = [cache.view(-1, page_size, *cache.shape[2:]) for cache in caches]
            table = (table[..., None] * parts + torch.arange(parts, device="cuda", dtype=torch.int32)).flatten(1)
        if form.is_coded:
            scale = given_scale(kv_format, self.shape.num_kv_heads, HEAD_DIM, "cuda")
            scales = {} if scale is None else {"k_scale": scale, "v_scale": scale}
            caches = [
                torch.cat(
                    [form.quantize(piece.float(), beside_rows(form, scale)) for piece in cache.split(PIECE_PAGES)]
                )
                for cache in caches
            ]
        arguments: dict[str, Any] = {
            "q": self.q,
            "k_cache": caches[0],
            "v_cache": caches[1],
            "seq_lens": self.lengths,
            "cu_seqlens_q": self.ends,
            "kv_format": kv_format,
            "block_table": None if page_size is None else table,
            **scales,
            **options,
        }
        out = torch.empty_like(self.q)
        return partial(extend_attention, **arguments, out=out), arguments

    def fa3(self) -> Iterator[tuple[str, Callable[[], Any]]]:
        """FlashAttention-3's calls over the same bf16 keys: in pages, and in a row; cut as it likes, and not cut."""
        values = self._fa3_values()
        places = {
            "": {"k": self.k, "v": self.v, "seqused_k": self.lengths, "page_table": self.table},
            ", contiguous": {**self._in_a_row(self.k, self.v), "cu_seqlens_k": self._key_ends()},
        }
        for place, keys in places.items():
            for cut, splits in (("", 0), (", one split", 1)):
                yield f"FA3{place}{cut}", _fa3_call(values | keys | {"num_splits": splits})

    def fa3_of_fp8(self, arguments: dict[str, Any]) -> Iterator[tuple[str, Callable[[], Any]]]:
        """FlashAttention-3's calls in FP8 over the codes of our call's ``arguments``, in a row: it takes no such pages.
        Queries are in E4M3 before it is called."""
        codes = [arguments[name].view(torch.uint8) for name in ("k_cache", "v_cache")]
        keys = {name: rows.view(torch.float8_e4m3fn) for name, rows in self._in_a_row(*codes).items()}
        scales = (self.shape.batch, self.shape.num_kv_heads)
        unit, scale = (torch.full(scales, value, device=self.q.device) for value in (1.0, float(arguments["k_scale"])))
        values = self._fa3_values() | keys | {"q": self.q.to(torch.float8_e4m3fn), "cu_seqlens_k": self._key_ends()}
        values |= {"q_descale": unit, "k_descale": scale, "v_descale": scale}
        for cut, splits in (("", 0), (", one split", 1)):
            yield f"{FA3_FP8}{cut}", _fa3_call(values | {"num_splits": splits})

    def _fa3_values(self) -> dict[str, Any]:
        """What all calls of FlashAttention-3 are given."""
        return {
            "q": self.q,
            "cu_seqlens_q": self.ends,
            "max_seqlen_q": self.shape.q_len,
            "max_seqlen_k": self.shape.seq_len,
            "softmax_scale": HEAD_DIM**-0.5,
            "is_causal": True,
            "window_size_left": -1,
            "window_size_right": -1,
            "softcap": 0.0,
            "is_rotary_interleaved": True,
            "sm_margin": 0,
            "cp_world_size": 1,
            "cp_rank": 0,
        }

    def _in_a_row(self, k: torch.Tensor, v: torch.Tensor) -> dict[str, torch.Tensor]:
        """Caches without pages: the rows of all requests one after the other."""
        shape, pages = self.shape, self.table.long()
        return {
            name: cache[pages].flatten(1, 2)[:, : shape.seq_len].flatten(0, 1).contiguous()
            for name, cache in (("k", k), ("v", v))
        }

    def _key_ends(self) -> torch.Tensor:
        return torch.arange(self.shape.batch + 1, dtype=torch.int32, device=self.q.device) * self.shape.seq_len


def _fa3_call(values: dict[str, Any]) -> Callable[[], Any]:
    op = torch.ops._vllm_fa3_C.fwd
    return partial(op, *[values.get(argument.name) for argument in op.default._schema.arguments])


def run(bench: Bench, shapes: Sequence[ExtendShape] = SHAPES, formats: Sequence[str] = FORMATS) -> None:
    """One row per shape under the record's key "extend"."""
    rows: list[dict[str, Any]] = []

    def work(shape: ExtendShape) -> None:
        rows.append(_measure(bench, Inputs.of(shape), formats))
        bench.recorder.set("extend", rows)

    for shape in shapes:
        bench.attempt(shape.name, partial(work, shape))
    mixed: list[dict[str, Any]] = []
    for name in formats:
        if name in MIXED_FORMATS:
            bench.attempt(f"mixed, {name}", lambda name=name: mixed.append(_measure_mixed(bench, name)))
            bench.recorder.set("extend_mixed", mixed)
    few: list[dict[str, Any]] = []
    for name in formats:
        if name.startswith("int4"):
            for batch in FEW_QUERIES_BATCHES:
                what = f"decode, {name}, batch {batch}"
                bench.attempt(what, lambda name=name, batch=batch: few.append(_measure_few(bench, name, batch)))
            bench.recorder.set("extend_few_queries", few)


def _measure_mixed(bench: Bench, kv_format: str) -> dict[str, Any]:
    """Requests that decode and one chunk: both calls in turn, and side by side."""
    inputs = Inputs.of(ExtendShape(MIXED_DECODES + 1, 1, MIXED_TOKENS))
    _, given = inputs.call(kv_format)
    count, chunk = MIXED_DECODES, torch.randn(MIXED_CHUNK, *inputs.q.shape[1:], device="cuda").bfloat16()
    q = torch.cat((inputs.q[:count], chunk))
    ends = torch.cat((torch.arange(count + 1), torch.tensor([len(q)]))).to(device="cuda", dtype=torch.int32)
    given |= {"q": q, "cu_seqlens_q": ends}
    out, apart = torch.empty_like(q), torch.empty_like(q)
    caches = {name: given[name] for name in ("k_cache", "v_cache", "kv_format")}
    first, rest = (
        {**caches, "block_table": given["block_table"][part], "seq_lens": given["seq_lens"][part], "out": apart[part]}
        for part in (slice(0, count), slice(count, None))
    )
    first["out"] = first["out"].unsqueeze(1)
    decode = partial(decode_attention, q[:count].unsqueeze(1), **first)
    extend = partial(extend_attention, chunk, cu_seqlens_q=ends[count:] - count, **rest)

    def in_turn() -> None:
        decode()
        extend()

    together = partial(mixed_attention, **given, num_decodes=count, out=out)
    in_turn()
    together()
    error = float((out - apart).float().norm() / apart.float().norm())  # splits may differ with the SMs
    if not error <= TOLERANCE:
        raise WrongOutput(f"side by side is {error:.2e} from what both calls are in turn, at most {TOLERANCE:g}")
    calls = {"decode": decode, "chunk": extend, "in turn": in_turn, "side by side": together}
    times = time_cold_in_turn({name: _captured(call) for name, call in calls.items()}, bench.flush, bench.protocol)
    name = f"{count} decode, {MIXED_CHUNK} new, over {MIXED_TOKENS}, {kv_format}"
    return {"name": name, "kv_format": kv_format, "us": _microseconds(times)}


def _measure_few(bench: Bench, kv_format: str, batch: int) -> dict[str, Any]:
    """Decode attention of a few queries a request."""
    inputs = Inputs.of(ExtendShape(batch, max(FEW_QUERIES), MIXED_TOKENS))
    _, given = inputs.call(kv_format)
    options = {name: given[name] for name in ("k_cache", "v_cache", "seq_lens", "kv_format", "block_table")}
    q = inputs.q.view(batch, max(FEW_QUERIES), *inputs.q.shape[1:])
    calls = {
        f"{count} queries": partial(decode_attention, q[:, :count].contiguous(), **options) for count in FEW_QUERIES
    }
    times = time_cold_in_turn(calls, bench.flush, bench.protocol)
    return {"name": f"{batch} x {MIXED_TOKENS}, {kv_format}", "kv_format": kv_format, "us": _microseconds(times)}


def _captured(call: Callable[[], object]) -> Callable[[], None]:
    """A replay of a graph: what the host does on two streams takes no part."""
    graph = torch.cuda.CUDAGraph()
    with nothing_collected(), torch.cuda.graph(graph):
        call()
    return graph.replay


def _microseconds(times: Mapping[str, Timing]) -> dict[str, dict[str, float]]:
    return {name: time.as_dict() for name, time in times.items()}


def _measure(bench: Bench, inputs: Inputs, formats: Sequence[str]) -> dict[str, Any]:
    calls: dict[str, Callable[[], Any]] = {}
    errors: dict[str, float] = {}
    ours: dict[str, dict[str, Any]] = {name: {"kv_format": name} for name in formats}
    if "bf16" in formats:
        ours |= {f"bf16, {place}": {"kv_format": "bf16", "page_size": size} for place, size in PLACES.items()}
    if FP8_FORMAT in formats:
        ours[FP8_PRODUCTS] = {"kv_format": FP8_FORMAT, "fp8_products": True}
    missing = fa3_missing()
    given = {name: inputs.call(**options) for name, options in ours.items()}
    make_ready(needed_by(call for call, _ in given.values()), bench.say)
    for name, (call, arguments) in given.items():
        calls[name], errors[name] = call, _error(call(), arguments)
        tolerance = FP8_TOLERANCE if name == FP8_PRODUCTS else TOLERANCE
        if not errors[name] <= tolerance:
            raise WrongOutput(f"{name}: relative error {errors[name]:.2e} to fp64, at most {tolerance:g}")
        if name == FP8_PRODUCTS and missing is None:
            others = dict(inputs.fa3_of_fp8(arguments))
            errors |= {other: _error(_first_of(call()), arguments) for other, call in others.items()}
            calls |= others
    if missing is None:
        calls |= dict(inputs.fa3())
    times = time_cold_in_turn(calls, bench.flush, bench.protocol)
    return {
        "name": inputs.shape.name,
        "shape": asdict(inputs.shape),
        "flops": inputs.shape.flops,
        "errors": errors,
        "us": _microseconds(times),
        "missing": {} if missing is None else {"FA3": missing},
    }


def _first_of(result: Any) -> torch.Tensor:
    """The output among a call's results."""
    return result[0] if isinstance(result, (tuple, list)) else result


def _error(out: torch.Tensor, arguments: dict[str, Any]) -> float:
    """Relative to fp64, of the last queries of the last request: those see most."""
    count = min(CHECKED_QUERIES, out.shape[0] // (arguments["cu_seqlens_q"].numel() - 1))
    part = {
        "q": arguments["q"][-count:],
        "seq_lens": arguments["seq_lens"][-1:],
        "cu_seqlens_q": torch.tensor([0, count], dtype=torch.int32, device=out.device),
    }
    if arguments["block_table"] is None:
        part |= {name: arguments[name][-1:] for name in ("k_cache", "v_cache")}
    else:
        part["block_table"] = arguments["block_table"][-1:]
    want, _ = extend_attention_reference(**(arguments | part), compute_dtype=torch.float64)
    return float((out[-count:].double() - want).norm() / want.norm())


def markdown(record: dict[str, Any]) -> str:
    """The record as Markdown tables. Raises ValueError if it has no row."""
    rows = record.get("extend", [])
    if not rows:
        raise ValueError("record: got no measured call of extend attention, want some")
    names = [name for name in dict.fromkeys(name for row in rows for name in row["us"]) if not name.startswith("FA3")]
    in_fp8 = [_fastest(row, FA3_FP8) for row in rows]
    has_fp8 = any(rate is not None for rate in in_fp8)
    head = ["queries, heads", "FlashAttention-3", *(["FlashAttention-3 in FP8"] if has_fp8 else []), *names]
    lines = []
    for row, fp8 in zip(rows, in_fp8, strict=True):
        peers = [_fastest(row, "FA3", but=FA3_FP8), *([fp8] if has_fp8 else [])]
        own = [_fastest(row, name, exactly=True) for name in names]
        lines.append([row["name"], *(number(rate, 0) for rate in (*peers, *own))])
    about = f"TFLOPS, median of {record.get('samples')} calls with a cold L2; FlashAttention-3: bf16, its fastest call."
    about = " ".join(filter(None, [about, perplexity.sentence(perplexity.caches_in(names), perplexity.models())]))
    parts = [in_markdown(record, head, lines, about)]
    for key, what in (("extend_mixed", "both kernels' calls in graphs"), ("extend_few_queries", "decode attention")):
        if record.get(key):
            head, *lines = _cells(record[key])
            parts.append(in_markdown(record, head, lines, what + "."))
    return "\n".join(parts)


def _fastest(row: dict[str, Any], start: str, but: str | None = None, exactly: bool = False) -> float | None:
    """The greatest rate of the calls whose names begin with ``start``, or are it, and do not begin with ``but``."""
    times = [
        time["median_us"]
        for name, time in row["us"].items()
        if (name == start if exactly else name.startswith(start)) and not (but and name.startswith(but))
    ]
    return row["flops"] * 1e-6 / min(times) if times else None


def text(data: dict[str, Any]) -> str:
    """The record as a table."""
    lines = table(data.get("extend", []))
    for key in ("extend_mixed", "extend_few_queries"):
        lines += _times(data.get(key, []))
    return "\n".join(lines)


def _times(rows: Sequence[dict[str, Any]]) -> list[str]:
    return ["", *aligned(_cells(rows))] if rows else []


def _cells(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Microseconds of each call, by row, and what the last takes of the one before, under their names."""
    names = list(rows[0]["us"])
    titles = [TITLES.get(name, name) for name in names]
    cells = [["us", *titles, f"{titles[-1]} / {titles[-2]}"]]
    for row in rows:
        medians = [row["us"][name]["median_us"] for name in names]
        cells.append([row["name"], *map(number, medians), f"{medians[-1] / medians[-2]:.2f}"])
    return cells


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """TFLOPS of each call, by shape, as aligned lines; none without rows."""
    if not rows:
        return []
    names = list(dict.fromkeys(name for row in rows for name in row["us"]))
    cells = [["TFLOPS", *names]]
    for row in rows:
        rates = [row["flops"] * 1e-6 / row["us"][name]["median_us"] if name in row["us"] else None for name in names]
        cells.append([row["name"], *(number(rate) for rate in rates)])
    return ["", *aligned(cells)]
