"""Unpacking a cache, run by the simulator: rows that some query sees, rounded once, and zeros; nothing else is read."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from cute_kernels.device.pages import Pages

pytest.importorskip("cutlass")

from cute_kernels.attention.call import make_extend_call as check_call
from cute_kernels.attention.extend_policies import TILE_SCALE_BYTES, UNPACK_WARPS, UnpackConfig
from cute_kernels.attention.extend_schedule import choose, choose_fp8, choose_unpacked, room_of
from cute_kernels.attention.loads import rows as decode
from cute_kernels.attention.loads import unpack
from cute_kernels.attention.loads.memory import Rows, Source
from cute_kernels.attention.loads.unpack import TOPS_BYTES, UnpackKernel, UnpackSizes, UnpackTarget
from cute_kernels.attention.mainloops.fp8 import KEYS_IN_ORDER
from cute_kernels.attention.plan import problem_of
from cute_kernels.attention.work_tiles import Lengths
from cute_kernels.device.division import Divisor
from cute_kernels.formats.kv import format_of
from simulator import LANES, Altered, Int32, Int64, Lanes, Meanings, Scheduler, Warp, running
from simulator.registers import from_halves, halves
from tests.extend.cases import Call, make_call

POISON = 0xFF  # bytes that nobody has written: NaN in 16 and in 32 bits
NUM_CTAS = 5
Q_LENS, LENGTHS = [3, 0, 140, 1], [200, 90, 300, 0]


def half_values(word: Lanes) -> np.ndarray:
    return halves(word).view(np.float16)


class Machine(Warp):
    """A warp that also stores to global memory and multiplies pairs of fp16."""

    def meanings(self) -> Meanings:
        loads = {"load_word_below": self.load_word_below}
        modules: dict[Any, dict[str, Any]] = {
            decode: loads,
            unpack: loads | {"load_piece_below": self.load_piece_below},
        }
        modules[unpack]["store_below"] = self.store_below
        modules[UnpackKernel] = {"publish": lambda _, top, address, lane: self.store_shared(address, 0, [top])}
        return replace(super().meanings(), modules=modules)

    def load_piece_below(self, index: Lanes, limit: Lanes, address: Lanes, offset: int = 0, words: int = 4) -> Any:
        exists = (np.asarray(index) >= 0) & (np.asarray(index) < np.asarray(limit))
        return self.load_global_if(exists, address, offset, words)

    def load_word_below(
        self, index: Lanes, limit: Lanes, address: Lanes, offset: int = 0, *, around: bool = False
    ) -> Lanes:
        return self.load_piece_below(index, limit, address, offset, 1)[0]

    def store_below(self, index: Lanes, limit: Lanes, address: Lanes, values: list[Lanes], offset: int = 0) -> None:
        lanes = LANES[(np.asarray(index) >= 0) & (np.asarray(index) < np.asarray(limit))]
        places = np.broadcast_to(np.asarray(address) + offset, (32,))[lanes]
        assert not (places % (4 * len(values))).any(), "misaligned access"
        for i, value in enumerate(values):
            self.global_memory.view(np.uint32)[places // 4 + i] = np.asarray(value).view(np.uint32)[lanes]

    def store_global(self, address: Lanes, values: list[Lanes], *, offset: int = 0) -> None:
        self.store_below(Int32(0), Int32(1), address, values, offset)

    def mul_f16x2(self, a: Lanes, b: Lanes) -> Lanes:
        return from_halves((half_values(a) * half_values(b)).view(np.uint16))

    def fma_f16x2(self, a: Lanes, b: Lanes, c: Lanes) -> Lanes:
        exact = half_values(a).astype(np.float64) * half_values(b) + half_values(c)
        return from_halves(exact.astype(np.float16).view(np.uint16))


class Barrier:
    """What all warps of a CTA wait at for each other; they run one at a time, in an order drawn at random."""

    def __init__(self, count: int):
        self.count, self.met = count, [0] * count
        self.own = threading.local()

    def run(self, body: Callable[[int], None], seed: int) -> None:
        self.scheduler = Scheduler(seed)
        self.scheduler.run([partial(self._run, body, warp) for warp in range(self.count)])
        assert len(set(self.met)) == 1, "all warps meet as often"

    def _run(self, body: Callable[[int], None], warp: int) -> None:
        self.own.warp = warp
        body(warp)

    def meet(self) -> None:
        self.met[self.own.warp] += 1
        own = self.met[self.own.warp]
        self.scheduler.until(lambda: min(self.met) >= own, self.own.warp)


class Unpacked:
    """What the kernel makes of a call's cache.

    Attributes:
        rows: K's and V's, float64 [batch, kv_heads, room, head_dim], as attention takes them: times their tile's power
            of 2; none of FP8 products. raw: their bits.
        scales: fp32 [batch, kv_heads, tiles, 4].
    """

    def __init__(self, call: Call, prefix_only: bool = False):
        checked = check_call(*call.tensors, **call.keywords)
        base = checked
        chosen = choose_fp8 if checked.fp8_products else choose_unpacked
        self.config, _ = chosen(choose(problem_of(checked)))
        assert self.config.can_implement() is None
        self.room = room_of(base.max_seq_len, self.config.head_dim)
        shape = (checked.batch, base.num_kv_heads, self.room, self.config.head_dim)
        tiles = (*shape[:2], self.room // self.config.tile_tokens, 4)
        table = call.options.get("block_table")
        pieces = {
            "k": _bytes(call.k_cache),
            "v": _bytes(call.v_cache),
            "table": _bytes(table) if table is not None else np.zeros(0, np.uint8),
            "ends": _bytes(call.cu_seqlens_q),
            "lengths": _bytes(call.seq_lens),
            "k_rows": np.full(self.config.element_bytes * int(np.prod(shape)), POISON, np.uint8),
            "v_rows": np.full(self.config.element_bytes * int(np.prod(shape)), POISON, np.uint8),
            "scales": np.full(4 * int(np.prod(tiles)), POISON, np.uint8),
        }
        at, end = {}, 256
        for name, piece in pieces.items():
            at[name], end = end, -(-(end + len(piece)) // 256) * 256
        memory = np.full(end, POISON, np.uint8)
        for name, piece in pieces.items():
            memory[at[name] : at[name] + len(piece)] = piece
        self.machine = Machine(np.full(2 * TOPS_BYTES, POISON, np.uint8), memory)
        self._run(call, at, prefix_only)
        part = {name: memory[at[name] : at[name] + len(piece)] for name, piece in pieces.items()}
        self.scales = part["scales"].view(np.float32).reshape(tiles)
        kind = {1: np.uint8, 2: np.uint16}[self.config.element_bytes]
        self.raw = [part[name].view(kind).reshape(shape) for name in ("k_rows", "v_rows")]
        self.reads = self.machine.reads
        if self.config.dtype == "e4m3":
            return
        self.rows = [torch.from_numpy(raw.view(np.int16)).view(call_dtype(self.config)).double() for raw in self.raw]
        self.steps = [torch.zeros(()).expand_as(rows) for rows in self.rows]  # of the least numbers that rows can hold
        if any(self.config.tile_scales):
            scales = torch.from_numpy(self.scales).double().repeat_interleave(self.config.tile_tokens, 2)
            units = scales[..., 0:1], scales[..., 2:3].exp2()
            least = torch.finfo(call_dtype(self.config)).smallest_normal * torch.finfo(call_dtype(self.config)).eps
            self.rows = [rows * unit for rows, unit in zip(self.rows, units, strict=True)]
            self.steps = [(unit * least).expand_as(rows) for rows, unit in zip(self.rows, units, strict=True)]

    def _run(self, call: Call, at: dict[str, int], prefix_only: bool) -> None:
        head_major = call.options.get("cache_layout") == "HND"
        table, (batch,) = call.options.get("block_table"), call.seq_lens.shape
        blocks, page_size, kv_heads, _ = call.caches[0].shape
        barrier = Barrier(UNPACK_WARPS)
        with running(Altered(self.machine, arch={"barrier": barrier.meet})):
            places = [_rows(cache, at[name], head_major) for name, cache in (("k", call.k_cache), ("v", call.v_cache))]
            max_pages = 0 if table is None else table.shape[1]
            pages = Pages(Int64(at["table"]), Int32(max_pages), Int32(blocks), Divisor.of(Int32(page_size)))
            max_seq_len = page_size * (max_pages or 1)
            window = call.options.get("window_size") or 0
            heads = Divisor.of(Int32(kv_heads))
            sizes: Any = UnpackSizes(
                Int32(len(call.q)), Int32(batch), heads, Int32(max_seq_len), Int32(window), Int32(self.room)
            )
            target = UnpackTarget(*(Int64(at[name]) for name in ("k_rows", "v_rows", "scales")))
            lengths = Lengths(Int64(at["ends"]), Int64(at["lengths"]), None, Int32(prefix_only))
            kernel: Any = UnpackKernel(self.config)
            source: Any = Source(places[0], places[1], pages, None, Int64(0))
            for cta in range(NUM_CTAS):
                given = (sizes, source, target, lengths, Int32(0), Int32(cta), Int32(NUM_CTAS))
                barrier.run(lambda warp, given=given: kernel.unpack(*given, Int32(warp), Int32(LANES)), seed=cta)


def call_dtype(config: UnpackConfig) -> torch.dtype:
    return {"bf16": torch.bfloat16, "fp16": torch.float16}[config.dtype]


def _bytes(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().view(torch.uint8).numpy().reshape(-1)


def _rows(cache: torch.Tensor, at: int, head_major: bool) -> Rows:
    assert cache.is_contiguous()
    block, outer, inner = (stride * cache.element_size() for stride in cache.stride()[:3])
    token, head = (inner, outer) if head_major else (outer, inner)
    return Rows(Int64(at), Int64(block), Int32(token), Int64(head))


def wanted(call: Call, operand: int, request: int, stop: int) -> torch.Tensor:
    """fp64 [kv_heads, stop, head_dim] of a request's first tokens; scales that lie beside the cache are left out, and
    INT4 rows halved."""
    cache, table = call.caches[operand], call.options.get("block_table")
    at = torch.arange(stop)
    page_size = cache.shape[1]
    if table is None:
        rows = cache[request, :stop]
    else:
        pages = table[request].clamp(0, len(cache) - 1).long()
        rows = cache[pages[at // page_size], at % page_size]
    form = format_of(call.kv_format if isinstance(call.kv_format, str) else call.kv_format[operand])
    scale = torch.ones(()) if form.given_scale is not None else None
    values = form.dequantize(rows, call.q.shape[2], torch.float64, scale)
    unit = 1.0 if form.extend is None else form.extend.unit
    return values.transpose(0, 1) / unit


def check(call: Call, q_lens=Q_LENS, prefix_only: bool = False) -> Unpacked:
    found = Unpacked(call, prefix_only)
    tile, window = found.config.tile_tokens, call.options.get("window_size")
    for request, (q_len, length) in enumerate(zip(q_lens, call.seq_lens.tolist(), strict=True)):
        stop = (max(length - q_len, 0) if prefix_only else length) if q_len else 0
        first = max(0, length - q_len - window + 1) if window else 0
        first, stop = (first, stop) if first < stop else (0, 0)
        begin, end = first // tile * tile if stop else 0, -(-stop // tile) * tile
        for operand in range(2):
            rows = found.rows[operand][request]
            raw = found.raw[operand][request]
            untouched = np.concatenate((raw[:, :begin], raw[:, end:]), 1)
            assert (untouched == 0xFFFF).all(), "tiles that nobody sees are not written"
            assert not rows[:, begin:first].any() and not rows[:, stop:end].any(), "rows that nobody sees are zeros"
            want = wanted(call, operand, request, stop)[:, first:stop] if stop else rows[:, :0]
            # Of a row far below its tile's greatest, elements may be subnormal.
            tolerance = 2.0**-11 * want.abs().amax(dim=-1, keepdim=True) if stop else 0.0
            tolerance = tolerance + found.steps[operand][request][:, first:stop] / 2
            assert ((rows[:, first:stop] - want).abs() <= tolerance).all()
    return found


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "int8": ("int8_token_head", {}),
    "e4m3, pages of 16": ("e4m3_token_head", {"page_size": 16}),
    "e4m3, a scale a tensor, HND": ("e4m3_tensor", {"cache_layout": "HND"}),
    "e5m2, contiguous": ("e5m2", {"page_size": None}),
    "int4_g1": ("int4_g1", {}),
    "int4_g4, pages of 48": ("int4_g4", {"page_size": 48}),
    "a pair": (("int8_token_head", "int4_g4"), {}),
    "another pair": (("e4m3_tensor", "int8_token_head"), {}),
    "head_dim 64": ("int8_token_head", {"head_dim": 64}),
    "head_dim 80": ("e4m3_token_head", {"head_dim": 80}),
    "head_dim 192": ("int8_token_head", {"head_dim": 192}),
    "head_dim 256": ("int4_g4", {"head_dim": 256}),
    "head_dim 512": ("int8_token_head", {"head_dim": 512}),
    "head_dim 512, a pair": (("e4m3_tensor", "int4_g4"), {"head_dim": 512, "page_size": 16}),
    "window": ("int8_token_head", {"window_size": 40}),
}


@pytest.mark.parametrize("name", CASES)
def test_rows_are_what_the_cache_says(name):
    kv_format, options = CASES[name]
    check(make_call(kv_format, Q_LENS, LENGTHS, **options))


@pytest.mark.parametrize("kv_format", ["int8_token_head", "int4_g1"])
def test_the_queries_own_tokens_may_be_left_out(kv_format):
    q_lens, lengths = [3, 0, 140], [130, 90, 200]
    check(make_call(kv_format, q_lens, lengths, new=True), q_lens, prefix_only=True)


@pytest.mark.parametrize("kv_format", ["int8_token_head", "int4_g1"])
def test_the_last_cached_token_s_tile_is_zeros_where_no_query_sees_it(kv_format):
    """Of a window of 1 beside new tokens: attention loads it, and 0 times the NaN of old memory is NaN."""
    found = Unpacked(make_call(kv_format, [3], [132], new=True, window_size=1), prefix_only=True)
    for raw in found.raw:
        assert not raw[0, :, 128:256].any() and (raw[0, :, :128] == 0xFFFF).all()


@pytest.mark.parametrize("power", [-45, -20, 20, 38])
def test_rows_scales_may_be_of_any_size(power):
    """fp16 has 5 bits of exponent; a tile's power of 2 makes up for that."""
    call = make_call("int8_token_head", [4], [150])
    for cache in call.caches:
        cache[..., :4].view(torch.float32).mul_(2.0**power)
    check(call, [4])


@pytest.mark.parametrize("seed", [0, 21])  # 21: a row 2**28 below its tile's greatest, whose elements are subnormal
def test_rows_of_a_tile_may_have_scales_of_all_sizes(seed: int):
    call, generator = make_call("e4m3_token_head", [4], [150]), torch.Generator().manual_seed(seed)
    for cache in call.caches:
        scales = cache[..., :4].view(torch.float32)
        scales.mul_(torch.exp2(torch.randint(-14, 14, scales.shape, generator=generator).float()))
    check(call, [4])


def test_scales_too_great_are_loud():
    call = make_call("int8_token_head", [4], [100])
    call.caches[1][..., :4].view(torch.float32).mul_(2.0**60)
    with np.errstate(over="ignore"):
        found = Unpacked(call)
    assert found.rows[1][0, :, :100].isinf().any()


def test_codes_without_scales_are_exact():
    """Also those of INT4 are what a decoding producer makes of them, so that both ways give the same bits."""
    found = check(make_call("e4m3_tensor", Q_LENS, LENGTHS))
    assert not (found.scales == found.scales).any(), "there are no scales to be written"


@pytest.mark.parametrize(
    "options",
    [{}, {"page_size": 16}, {"cache_layout": "HND"}, {"page_size": None}, {"window_size": 40}],
    ids=["pages of 64", "pages of 16", "HND", "contiguous", "window"],
)
def test_fp8_products_get_the_cache_s_codes_and_values_transposed(options):
    call = make_call("e4m3_tensor", Q_LENS, LENGTHS, fp8_products=True, **options)
    found, window = Unpacked(call), options.get("window_size")
    tile = found.config.tile_tokens
    keys = np.array([first + key for first in range(0, tile, len(KEYS_IN_ORDER)) for key in KEYS_IN_ORDER])
    for request, (q_len, length) in enumerate(zip(Q_LENS, LENGTHS, strict=True)):
        stop = length if q_len else 0
        first = max(0, length - q_len - window + 1) if window and stop else 0
        begin, end = first // tile * tile, -(-stop // tile) * tile
        for operand in range(2):
            raw = found.raw[operand][request]
            assert (np.concatenate((raw[:, :begin], raw[:, end:]), 1) == POISON).all(), "tiles that nobody sees"
            rows = raw[:, begin:end].copy()
            if operand == 1:
                tiles = rows.reshape(len(rows), -1, found.config.head_dim, tile)
                rows = np.empty_like(tiles).swapaxes(2, 3)
                rows[:, :, keys] = tiles.swapaxes(2, 3)
                rows = rows.reshape(len(raw), end - begin, found.config.head_dim)
            want = np.zeros_like(rows)
            codes = wanted(call, operand, request, stop)[:, first:stop].to(torch.float8_e4m3fn)
            want[:, first - begin : stop - begin] = codes.view(torch.uint8).numpy()
            assert (rows == want).all(), "codes, and zeros where no query sees one"


def test_numbers_on_the_device_that_cannot_be_do_no_harm():
    call = make_call("int8_token_head", [3, 5], [100, 40])
    call.seq_lens[0], call.cu_seqlens_q[2] = 2**30, -7
    call.options["block_table"][0] = -1
    Unpacked(call)  # which refuses accesses out of bounds


def test_a_tile_s_scale_has_its_place():
    found = Unpacked(make_call("int8_token_head", [4], [300]))
    assert found.scales[0, 0, 0].nbytes == TILE_SCALE_BYTES
    written = found.scales[0, :, :3]
    assert (written[..., 0] == np.exp2(np.log2(written[..., 0]).round())).all(), "powers of 2"
    assert (written[..., 1] == 0).all() and (np.exp2(written[..., 2]) * written[..., 3] == 1).all()
