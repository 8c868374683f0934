"""What attention that appends for itself does first, its own code lane by lane: the rows of an append, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from cute_kernels.attention.decode_schedule import make_schedule
from cute_kernels.attention.problem import AttentionProblem
from cute_kernels.formats.scores.features import Features
from cute_kernels.kv_cache import ops
from cute_kernels.kv_cache.arguments import TERMS
from cute_kernels.kv_cache.call import AppendCall
from cute_kernels.kv_cache.rope import Rope
from cute_kernels.kv_cache.step_config import StepConfig, step_config
from cute_kernels.runtime import native
from simulator import Float32, Gpu, Int32, Int64, running
from simulator.gpu import LANES
from tests.kv_cache.cases import ALL_FORMATS, Shape, clone_caches, make_call
from tests.kv_cache.simulate import simulate_append
from tests.kv_cache.transformed import make_transform, with_transform

pytestmark = pytest.mark.skipif(native.dsl_version() is None, reason="device code needs nvidia-cutlass-dsl")

LENGTHS = (1, 64, 257, 300, 0, 0, 0, 0)  # warps of the append have all a token or none
SMALL = Shape(
    "int4_g4", new=(1,) * len(LENGTHS), lengths=LENGTHS, num_q_heads=6, page_size=64, layout="HND", rope=Rope(128)
)
PARTS = 3


class SharedMemory(Gpu):
    """With shared memory of a CTA, and a count of the warps that say that rows are written."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.announced = np.full(1 << 16, 0xA5, np.uint8), 0

    def store_shared(self, address: Any, offset: int, values: Any) -> None:
        for i, word in enumerate(values):
            for lane in range(32):
                place = int(address[lane]) + offset + 4 * i
                assert place % (4 * len(values)) == (4 * i) % (4 * len(values)), "misaligned access"
                self.shared[place : place + 4] = np.asarray(word[lane : lane + 1], np.uint32).view(np.uint8)

    def meanings(self) -> Any:
        own = super().meanings()
        nothing = {name: lambda *_, **__: None for name in ("barrier", "fence_proxy", "griddepcontrol_wait")}
        return replace(own, arch={**own.arch, **nothing, "barrier_arrive": self.count})

    def count(self, **_: int) -> None:
        self.announced += 1


def config_of(call: AppendCall, shape: Shape) -> StepConfig:
    names = (call.k_format, call.v_format)
    problem = AttentionProblem(
        len(LENGTHS), 320, call.num_q_heads, call.num_kv_heads, shape.head_dim, shape.head_dim, *names, shape.dtype,
        page_tokens=64 if shape.place == "table" else 0,
        features=Features(paged=shape.place == "table", head_major=shape.layout == "HND"),
        after_append=True, appends=True,
    )  # fmt: skip
    config = step_config(make_schedule(problem).config, ops.config_of(call), call.position_ids is not None)
    assert config is not None
    return config


def simulate_rows(call: AppendCall, config: StepConfig) -> torch.Tensor:
    """Every CTA's rows; writes the caches, returns the queries as they lie in shared memory, [batch, heads, d]."""
    from cute_kernels.attention import cta as place
    from cute_kernels.device.division import Divisor
    from cute_kernels.device.pages import Pages
    from cute_kernels.kv_cache import operands, step_rows

    attention = config.attention
    assert call.q is not None and call.seq_lens is not None
    gpu, queries = SharedMemory(), torch.zeros(call.q.shape, dtype=call.q.dtype)
    names = ("q", "k", "v", "k_cache", "v_cache", "seq_lens", "block_table", "k_scale", "v_scale", "position_ids")
    names += TERMS
    put = {name: gpu.put(getattr(call, name)) for name in names}
    at = {name: Int64(address) for name, address in put.items()}
    steps = Int64(0 if call.rope is None else gpu.put(call.rope.phase_steps()))
    group, max_pages = (
        call.num_q_heads // call.num_kv_heads,
        0 if call.block_table is None else call.block_table.shape[1],
    )
    stride = 0 if call.block_table is None else call.block_table.stride(0)
    max_seq_len = max_pages * call.page_size if max_pages else call.page_size

    def strides(cache: torch.Tensor) -> Any:
        block, outer, inner = (Int64(stride * cache.element_size()) for stride in cache.stride()[:3])
        return (block, inner, outer) if attention.features.head_major else (block, outer, inner)

    constants = None
    if call.transform is not None:
        of = call.transform
        arrays = (of.k_center, of.k_factor, of.q_factor, of.v_factor)
        constants = operands.Constants(*(Int64(gpu.put(x)) for x in arrays))
    terms = positions = None
    if config.has_terms:
        terms = operands.Terms(**{name: at[name] for name in TERMS}, norm_eps=Float32(call.norm_eps))
    if call.position_ids is not None:
        positions = at["position_ids"], Int64(call.position_ids.element_size())

    with running(gpu):
        rows: Any = step_rows.NewRows(attention, config.append, config.positions)
        new = step_rows.NewRowOperands(
            at["k"], at["v"], Int64(call.k.stride(0) * 2), Int64(call.v.stride(0) * 2), at["k_cache"], at["v_cache"],
            strides(call.k_cache), strides(call.v_cache), Int32(call.num_pages), at["seq_lens"], steps,
            Float32(1.0 if call.rope is None else call.rope.attention_factor), constants, terms, positions,
        )  # fmt: skip
        numbers = (call.batch, 1, call.num_q_heads, call.num_kv_heads, group, -(-(1 << 20) // group), 1, 1 << 20)
        head_blocks = call.num_kv_heads // attention.mainloop.num_heads
        sizes = place.DecodeSizes(*map(Int32, (*numbers, head_blocks, max_seq_len)))
        pages = Pages(at["block_table"], Int32(stride), Int32(call.num_pages), Divisor.of(Int32(call.page_size)))
        given = SimpleNamespace(k_scale=at["k_scale"], v_scale=at["v_scale"])
        q = place.QueryRows(at["q"], Int64(call.q.stride(0) * 2), Int64(0))
        for request, told in enumerate(call.seq_lens.tolist()):
            length = min(max(told, 0), max_seq_len)
            tiles = max(1, -(-length // attention.tile_tokens))
            for head in range(0, call.num_kv_heads, attention.mainloop.num_heads):
                gpu.announced = 0
                for part in range(min(PARTS, tiles)):
                    of = place.Place(sizes, Int32(head), Int32(0))
                    parts, tile = min(PARTS, tiles), attention.tile_tokens
                    span = part * tile, length, parts * tile  # begin, stop, stride: tiles in turn
                    if request % 2:  # a part's tiles one after the other, as where lengths differ
                        size = -(-tiles // parts) * tile
                        span = part * size, min(part * size + size, length), tile
                    work = place.Work(of, *map(Int32, (request, part, parts, 0, length, *span)))
                    for warp in range(attention.num_warps):
                        block = warp // attention.mainloop.num_heads % attention.mainloop.num_query_blocks
                        roles = place.Roles(
                            Int32(warp % attention.mainloop.num_heads), Int32(block * attention.warp_queries), Int32(0)
                        )
                        cta = SimpleNamespace(
                            lane=Int32(LANES), warp=warp, new=(new, Int32(0)), given=given, roles=roles,
                            tiles=SimpleNamespace(pages=pages),
                        )  # fmt: skip
                        check_addresses(config, rows.make(cta, work, q), roles, group)
                    for own in range(attention.mainloop.num_heads):
                        begin, first = own * attention.head_queries * rows.pitch, (head + own) * group
                        take_queries(queries, gpu.shared[begin:], rows.pitch, request, first, group)
                assert gpu.announced == (attention.num_warps if told > 0 else 0), "one CTA of the request's writes"
    gpu.get(put["k_cache"], call.k_cache)
    gpu.get(put["v_cache"], call.v_cache)
    return queries


def check_addresses(config: StepConfig, addresses: Any, roles: Any, group: int) -> None:
    """Lane (g, t) takes query g of its block, or the last one."""
    for block, address in enumerate(addresses):
        want = np.minimum(int(roles.first_row[0]) + 8 * block + LANES // 4, group - 1)
        want += int(roles.head[0]) * config.attention.head_queries
        assert (np.asarray(address) == want * (2 * config.attention.head_dim + 16)).all()


def take_queries(queries: torch.Tensor, shared: np.ndarray, pitch: int, request: int, first: int, count: int) -> None:
    for row in range(count):
        words = shared[row * pitch : row * pitch + 2 * queries.shape[2]]
        queries[request, first + row] = torch.from_numpy(words.copy()).view(queries.dtype)


def check(shape: Shape, columns: int | None = None, **of_transform: Any) -> None:
    """The caches and the queries are what an append makes of them, to the bit; ``columns``: of the block table."""
    call = make_call(shape)
    if of_transform:
        transform = make_transform(shape.num_kv_heads, shape.head_dim, shape.v_head_dim, **of_transform)
        call = with_transform(call, transform, shift=False)
    check_call(call, shape, columns)


def check_call(call: AppendCall, shape: Shape, columns: int | None = None) -> None:
    if columns is not None:
        assert call.block_table is not None
        call = call._replace(block_table=call.block_table[:, :columns])
    config = config_of(call, shape)
    one, two = clone_caches(call), clone_caches(call)
    queries = simulate_rows(one, config)
    want = simulate_append(two, decode=not config.positions, lane_columns=config.append.lane_columns)
    assert want is not None and torch.equal(queries.view(torch.int16), want.view(torch.int16))
    for name in ("k_cache", "v_cache"):
        got, other = getattr(one, name).view(torch.uint8), getattr(two, name).view(torch.uint8)
        assert torch.equal(got, other) and not torch.equal(got, getattr(call, name).view(torch.uint8)), name


@pytest.mark.parametrize("kv_format", ALL_FORMATS)
def test_rows_of_every_format_are_an_appends(kv_format):
    check(SMALL.with_(kv_format=kv_format, dtype="fp16" if kv_format == "fp16" else "bf16"))


@pytest.mark.parametrize(
    "changes",
    [
        {"rope": None},
        {"rope": Rope(128, interleaved=True)},
        {"rope": Rope(64)},
        {"head_dim": 64, "rope": Rope(64)},
        {"num_q_heads": 48},
        {"num_q_heads": 2},
        {"place": "contiguous", "page_size": 320},
    ],
    ids=["no RoPE", "interleaved", "half a row", "rows of 64", "blocks of queries", "a query a head", "contiguous"],
)  # fmt: skip
def test_rows_of_every_shape_are_an_appends(changes):
    check(SMALL.with_(**changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"bias": True},
        {"norm": True},
        {"positions": "int32"},
        {"bias": True, "norm": True, "positions": "int64"},
        {"bias": True, "norm": True, "rope": Rope(128, interleaved=True), "num_q_heads": 48},
        {"bias": True, "norm": True, "layout": "NHD", "num_q_heads": 24, "num_kv_heads": 8},
        {"bias": True, "norm": True, "head_dim": 64, "rope": Rope(64), "kv_format": ("int4_g4", "bf16")},
    ],
    ids=["bias", "norms", "positions", "all", "blocks of queries", "heads of a CTA", "rows of 64"],
)
def test_rows_with_biases_norms_and_positions_are_an_appends(changes):
    check(SMALL.with_(**changes))
    check(SMALL.with_(**changes), k_rotation=32)


@pytest.mark.parametrize("given", TERMS)
def test_any_bias_or_norm_may_be_alone(given):
    shape = SMALL.with_(bias=True, norm=True)
    call = make_call(shape)
    check_call(call._replace(**{name: None for name in TERMS if name != given}), shape)


HEADS_OF_A_CTA = SMALL.with_(layout="NHD", num_q_heads=32, num_kv_heads=8)
"""Caches whose tiles have all KV heads: more rows than a warp of each kind has teams."""


@pytest.mark.parametrize("changes", [{}, {"num_q_heads": 72}, {"head_dim": 64, "rope": Rope(64)}, {"num_kv_heads": 4}])
def test_rows_of_all_heads_of_a_cta_are_an_appends(changes):
    shape = HEADS_OF_A_CTA.with_(**changes)
    assert config_of(make_call(shape), shape).attention.mainloop.num_heads == shape.num_kv_heads
    check(shape)


TRANSFORMS = {
    "centred": {"parts": "center"},
    "scaled": {"parts": "factor v_factor"},
    "V's factors": {"parts": "v_factor"},
    "rotated": {"parts": "", "k_rotation": 128},
    "V rotated": {"parts": "", "v_rotation": 16},
    "all": {"k_rotation": 32, "v_rotation": 64},
}


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("shape", [SMALL, HEADS_OF_A_CTA], ids=["a head", "heads of a CTA"])
def test_transformed_rows_are_an_appends(shape, name):
    check(shape, **TRANSFORMS[name])


@pytest.mark.parametrize(
    "changes",
    [
        {"rope": None},
        {"rope": Rope(128, interleaved=True)},
        {"head_dim": 64, "rope": Rope(64)},
        {"num_q_heads": 48},
        {"kv_format": ("int4_g4", "int8_token_head")},
        {"kv_format": "int8_channel", "place": "contiguous", "page_size": 320},
    ],
    ids=["no RoPE", "interleaved", "rows of 64", "blocks of queries", "a pair of formats", "contiguous"],
)
def test_transformed_rows_of_every_shape_are_an_appends(changes):
    check(SMALL.with_(**changes), k_rotation=64, v_rotation=32)


def test_tokens_beyond_the_block_table_are_not_written():
    check(SMALL.with_(lengths=(1, 64, 100, 128, 300, 129, 257, 300)), columns=2)
