"""Keys times queries: what producers bring and consumers make of it, run by the simulator."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from cute_kernels.attention.problem import AttentionProblem
from cute_kernels.device.pages import Pages
from cute_kernels.device.pipeline import PipelineState

pytest.importorskip("cutlass")

from cute_kernels.attention.extend_policies import GROUP_TOKENS, SLAB_COLUMNS
from cute_kernels.attention.extend_schedule import choose, key_rows_of
from cute_kernels.attention.loads.memory import KEYS, VALUES, Source
from cute_kernels.attention.mainloops.key_rows import codes, multiply
from cute_kernels.attention.mainloops.key_rows.codes import rows_of
from cute_kernels.attention.mainloops.key_rows.copies import RawRowProducer
from cute_kernels.attention.mainloops.key_rows.multiply import KeyRowsConsumer
from cute_kernels.attention.mainloops.key_rows.queries import QueryWriter
from cute_kernels.attention.mainloops.key_rows.results import sum_index
from cute_kernels.device import ptx, wgmma
from cute_kernels.device.division import Divisor
from cute_kernels.formats.kv import format_pair
from cute_kernels.formats.scores.features import Features
from simulator import LANES, Altered, Float32, Int32, Int64, Uint32, running, stand_in
from simulator.registers import from_halves, halves
from tests.extend.cases import Call, make_call
from tests.extend.test_unpack import Machine, _bytes, _rows, wanted

HEAD, BLOCK = 1, 1
FIRST, STOP = 140, 250  # tokens that queries see, in the middle of that block
G, T = np.arange(32) // 4, np.arange(32) % 4
MAGIC = (Uint32(0x60006000), Uint32(0x50005000), Uint32(np.where(G % 2, 0x7632, 0x5410)))


def store_matrix_x2(address, offset: int, words) -> None:
    """By the instruction for four: those of the lower lanes twice."""
    own = stand_in(Int32(np.asarray(address)[LANES % 16]))
    ptx.store_matrix_x4(own, offset, [*words, *words], transpose=True)


OWN = {
    multiply: {"store_matrix_x2": store_matrix_x2},
    codes: {
        "of_lanes": lambda word, index: word[4 * index + T],
        "twice": lambda word, half: ptx.prmt(word, Uint32(0), Uint32((0x1010, 0x3232)[half])),
    },
}
"""Instructions that this room has of its own, by those that the simulator has."""


class CopyingMachine(Machine):
    """One with copies of words."""

    def async_copy_word(self, destination, source) -> None:
        self.copy_word_async_or(1, destination, source, 0)

    def copy_word_async_or(self, condition, destination, source, otherwise) -> None:
        conditions = np.broadcast_to(np.asarray(condition), (32,))
        targets, sources = (np.broadcast_to(np.asarray(x), (32,)) for x in (destination, source))
        words = self.shared_memory.view(np.uint32)
        assert not (targets % 4).any()
        for there, target, place in zip(conditions, targets, sources, strict=True):
            if there:
                assert place % 4 == 0 and 0 <= place < self.global_memory.size
                self.reads.append((int(place), 4))
            words[target // 4] = self.global_memory.view(np.uint32)[place // 4] if there else np.max(otherwise)

    def max_f16x2(self, a, b):
        pairs = [halves(x).view(np.float16) for x in (a, b)]
        return from_halves(np.fmax(*pairs).view(np.uint16))


class Block:
    """The block of a call's K and V from token 128 on in shared memory, and the parts of a consumer that read it.

    mapped: as rows lie that tensor maps bring. heads: of a work tile.
    """

    def __init__(self, call: Call, mapped: bool = False, heads: int = 1):
        keys, values = format_pair(call.kv_format)
        table, page_tokens = call.options.get("block_table"), call.caches[0].shape[1]
        features = Features(paged=table is not None, causal=True)
        touching = 0 if table is None else page_tokens & -page_tokens
        config = key_rows_of(
            choose(AttentionProblem.ragged(128, keys, values, "bf16", touching, features)), 72, mapped, heads
        )
        assert config is not None and config.can_implement() is None and config.key_rows is not None
        self.config, self.shape, self.heads = config, config.key_rows, config.tile_heads
        block = Int32(BLOCK * self.heads)
        pieces = [_bytes(call.k_cache), _bytes(call.v_cache), np.zeros(0, np.uint8) if table is None else _bytes(table)]
        at = np.cumsum([256, *(-(-len(piece) // 256) * 256 for piece in pieces)])
        memory = np.zeros(at[-1], np.uint8)
        for start, piece in zip(at, pieces, strict=False):
            memory[start : start + len(piece)] = piece
        sizes = self.shape.tile_bytes
        self.queries = sum(sizes)
        self.probabilities = self.queries + self.heads * self.shape.query_bytes
        self.headers = self.probabilities + 4 * self.shape.probability_bytes
        self.shared = np.full(self.headers + sum(self.shape.header_bytes) + 16, 0xFF, np.uint8)
        self.machine = CopyingMachine(self.shared, memory)
        self.memory: Any = stand_in(
            SimpleNamespace(
                tile=lambda operand, stage: Int32(operand * sizes[0]),
                header=lambda operand, stage: Int32(self.headers + operand * self.shape.header_bytes[0]),
                queries=Int32(self.queries),
                probabilities=Int32(self.probabilities),
            )
        )
        with running(Altered(self.machine, modules=OWN)):
            rows = [_rows(cache, at[i], False) for i, cache in enumerate((call.k_cache, call.v_cache))]
            pages = Pages(
                Int64(at[2]),
                Int32(0 if table is None else table.shape[1]),
                Int32(len(call.k_cache)),
                Divisor.of(Int32(page_tokens)),
            )
            source: Any = stand_in(Source(rows[0], rows[1], pages, None, Int64(0)))
            work: Any = stand_in(SimpleNamespace(request=Int32(0), head=Int32(HEAD), kv_stop=Int32(STOP)))
            self.source = source
            producer, first = RawRowProducer(config), PipelineState(Int32(0), Int32(1))
            for warp in range(config.pipeline.producer_warps):
                places = producer.runs.make()
                producer.runs.ask(places, source, work, block, Int32(warp % producer.of_head))
                for tile in producer.tiles:
                    tile.by_tma = False  # tensor maps bring the same bytes: tests/gpu/test_key_rows.py
                    tile.copy(source, work, self.memory, Int32(FIRST), places, block, first, Int32(warp), Int32(LANES))

    def head(self, group: int) -> int:
        """A warpgroup's."""
        return HEAD if self.heads == 1 else HEAD * self.heads + group

    def work_of(self, group: int) -> Any:
        return stand_in(SimpleNamespace(request=Int32(0), head=Int32(self.head(group)), kv_stop=Int32(STOP)))

    def operand(self, start: int, columns: int) -> torch.Tensor:
        """A B operand [tile_rows, columns] in the 128-byte swizzle."""
        row, column = np.arange(self.config.tile_rows)[:, None], np.arange(columns)[None]
        slab = column // SLAB_COLUMNS * (self.config.tile_rows * wgmma.ROW_BYTES)
        place = start + slab + row * wgmma.ROW_BYTES + (column % 64 // 8 ^ row % 8) * 16 + column % 8 * 2
        return torch.from_numpy(self.shared.view(np.float16)[place // 2].astype(np.float64))

    def a_operand(self, steps) -> np.ndarray:
        """16 rows of A, by steps of 16 columns, of a warp's registers."""
        found = np.zeros((16, 16 * len(steps)))
        for step, registers in enumerate(steps):
            for index, word in enumerate(registers):
                pair = halves(np.broadcast_to(np.asarray(word), (32,))).view(np.float16)
                for half in range(2):
                    found[G + index % 2 * 8, 16 * step + 2 * T + half + index // 2 * 8] = pair[:, half]
        return found


def scales_of(block: Block, operand: int, group: int) -> np.ndarray:
    """Of a warpgroup's rows, where they meet scores and probabilities, as the lanes of the score warps load them."""
    if not block.config.tile_scales[operand]:
        return np.ones(GROUP_TOKENS)
    found = np.zeros(GROUP_TOKENS)
    consumer = KeyRowsConsumer(block.config)
    with running(Altered(block.machine, modules=OWN)):
        start = consumer.place_of(Int32(group), Int32(0), Int32(LANES), MAGIC)
        place = consumer.shifted(start, block.source, block.work_of(group))
        for first in range(0, GROUP_TOKENS, 16):
            pair = consumer.load_scales(block.memory, place, operand, Int32(0), Int32(first + G))
            for half, scale in enumerate(pair):
                found[first + G + 8 * half] = np.asarray(scale)
    return found


FORMATS = [
    "int8_token_head", "e4m3_token_head", "e4m3_tensor", "e5m2", "int4_g1", "int4_g2", "int4_g4",
    ("int8_token_head", "int4_g4"), ("int4_g1", "e4m3_tensor"),
]  # fmt: skip


@pytest.mark.parametrize("page_size", [16, 64, None])
@pytest.mark.parametrize("kv_format", FORMATS, ids=str)
def test_operands_are_what_the_cache_says(kv_format, page_size):
    """Keys by queries' columns, values by the outputs' columns."""
    check_operands(make_call(kv_format, [4], [300], page_size=page_size))


@pytest.mark.parametrize("num_kv_heads", [2, 3, 5])
@pytest.mark.parametrize(
    "kv_format", ["int8_token_head", ("e4m3_token_head", "int4_g4"), ("e5m2", "e4m3_token_head")], ids=str
)
def test_rows_behind_a_scale_begin_anywhere(kv_format, num_kv_heads):
    """Neighbouring tokens' rows are shifted differently unless there are 4 heads."""
    check_operands(make_call(kv_format, [4], [300], page_size=16, num_kv_heads=num_kv_heads))


@pytest.mark.parametrize("page_size", [16, 64, None])
@pytest.mark.parametrize("num_kv_heads", [4, 8])
@pytest.mark.parametrize(
    "kv_format",
    ["int8_token_head", ("e4m3_token_head", "int8_token_head"), "int4_g1", ("int4_g1", "e4m3_token_head")],
    ids=str,
)
def test_rows_of_two_heads_lie_one_behind_the_other(kv_format, num_kv_heads, page_size):
    """Each is a warpgroup's."""
    call = make_call(kv_format, [4], [300], page_size=page_size, num_kv_heads=num_kv_heads)
    check_operands(call, mapped=True, heads=2)


@pytest.mark.parametrize("page_size", [16, 64, None])
@pytest.mark.parametrize("kv_format", FORMATS, ids=str)
def test_each_warpgroup_has_a_head(kv_format, page_size):
    check_operands(make_call(kv_format, [4], [300], page_size=page_size, num_kv_heads=6), heads=2)


def check_operands(call: Call, mapped: bool = False, heads: int = 1) -> None:
    block = Block(call, mapped, heads)
    q = torch.randn(block.config.tile_rows, 128, generator=torch.Generator().manual_seed(3)).half()
    with running(Altered(block.machine, modules=OWN)):
        writer = QueryWriter(block.config)
        column, distance = writer.rows.query_columns(LANES)
        for warp in range(writer.warps):
            own = [
                [
                    Float32(q[warp + writer.warps * i].float().numpy()[column + distance * (k // 2) + k % 2])
                    for k in range(4)
                ]
                for i in range(writer.count)
            ]
            writer.store(own, Int32(block.queries), Int32(warp), Int32(LANES))
    queries = block.operand(block.queries, 128)
    for group in range(2):
        check_warpgroup(call, block, group, q, queries)


def check_warpgroup(call: Call, block: Block, group: int, q: torch.Tensor, queries: torch.Tensor) -> None:
    """The 64 rows of K and of V that a warpgroup makes operands of."""
    first = 128 if block.heads > 1 else 128 + GROUP_TOKENS * group
    work = block.work_of(group)
    seen = slice(max(FIRST - first, 0), min(STOP - first, GROUP_TOKENS))
    keys, values = (rows_of(form, block.config.paired) for form in block.config.formats)
    wanted_k, wanted_v = (
        wanted(call, operand, 0, first + GROUP_TOKENS)[block.head(group), first:] for operand in (KEYS, VALUES)
    )
    got_scores, got_values = np.zeros((GROUP_TOKENS, len(q))), np.zeros((GROUP_TOKENS, 128))
    with running(Altered(block.machine, modules=OWN)):
        for warp in range(4):
            shift, _, _ = keys.shifts(block.source.keys, work.head, Int32(LANES))
            place = keys.key_place(Int32(warp), Int32(LANES)) + keys.group_place(group)
            words = keys.load_keys(place + block.memory.tile(KEYS, 0) + shift)
            address = keys.header_start(block.memory, KEYS, 0) + shift
            place = keys.key_header_place(group, Int32(warp), Int32(LANES))
            headers = keys.load_key_headers(address + place)
            scores = block.a_operand(keys.key_operands(words, headers, MAGIC)) @ queries.numpy().T
            got_scores[16 * warp : 16 * warp + 16] = scores
            _, shift, odd = values.shifts(block.source.values, work.head, Int32(LANES))
            place = values.value_place(Int32(warp), Int32(LANES)) + values.group_place(group)
            odd = odd + values.row_bytes
            words = values.load_values(place + block.memory.tile(VALUES, 0) + shift, odd, GROUP_TOKENS)
            address = values.header_start(block.memory, VALUES, 0) + shift
            place = values.value_header_place(group, Int32(warp), Int32(LANES))
            headers = values.load_value_headers(address + place, GROUP_TOKENS)
            steps = [values.value_operands(words, headers, step, MAGIC) for step in range(4)]
            for mma in range(2):
                a = block.a_operand([step[mma] for step in steps])
                columns = np.asarray(values.column(warp, np.arange(32), mma))
                for half in range(2):
                    got_values[:, columns[4 * np.arange(8)] + half] = a[8 * half :][:8].T
    for found, want, operand in ((got_scores, wanted_k @ q.double().T, KEYS), (got_values, wanted_v, VALUES)):
        got = torch.from_numpy(found * scales_of(block, operand, group)[:, None])
        assert (got[seen] - want[seen]).abs().max() <= 2e-3 * want[seen].abs().max()
        assert not got[: seen.start].any() and not got[seen.stop :].any(), "rows that nobody sees are zeros"


@pytest.mark.parametrize("name", ["int8_token_head", "int4_g4"])
def test_probabilities_lie_as_products_read_them(name):
    block = Block(make_call(name, [4], [300]))
    consumer = KeyRowsConsumer(block.config)
    columns, scaled = consumer.columns, block.config.tile_scales[VALUES]
    logits = np.random.default_rng(0).uniform(-6, 4, (64, 8 * consumer.blocks)).astype(np.float32)
    factors = np.random.default_rng(1).uniform(0.5, 2, 64).astype(np.float32)
    with running(Altered(block.machine, modules=OWN)):
        sums: Any = stand_in(SimpleNamespace(softmax=SimpleNamespace(references=[Float32(0.0)] * columns)))
        for warp in range(4):
            place = consumer.place_of(Int32(0), Int32(warp), Int32(LANES), MAGIC)
            rows = [16 * warp + G + 8 * j for j in range(2)]
            s = [None] * (2 * columns)
            for column in range(columns):
                for j in range(2):
                    index = column // 2 * 4 + 2 * j + column % 2
                    s[index] = Float32(logits[rows[j], 8 * (column // 2) + 2 * T + column % 2])
            totals = [None] * columns
            scales = [Float32(factors[row]) for row in rows] if scaled else []
            exceeds = consumer.write_probabilities(
                sums, totals, Int32(block.probabilities) + place.probabilities, s, [Float32(1.0)] * 2, scales
            )
            assert not np.any(exceeds)
    found = block.operand(block.probabilities, 64)
    want = torch.from_numpy(np.exp2(logits.astype(np.float64)) * (factors if scaled else np.ones(64))[:, None]).T
    assert (found - want).abs().max() <= 2.0**-11 * want.max()
    assert ((found - want).abs() <= 2.0**-10 * want + 2.0**-24).all()


@pytest.mark.parametrize("name", ["int8_token_head", "int4_g4"])
def test_no_logit_exceeds_a_raised_reference(name):
    """fp32 has logits of 2^30 in steps of 64, so those that are rounded once exceed the greatest that is rounded twice:
    a kernel that raised the reference until nothing exceeds it never ended."""
    block = Block(make_call(name, [4], [300]))
    consumer, generator = KeyRowsConsumer(block.config), np.random.default_rng(0)
    dots = generator.uniform(1, 2, (64, 8 * consumer.blocks)).astype(np.float32) * np.float32(2.0**30)
    factors = np.exp2(generator.uniform(-90, 20, 64)).astype(np.float32)
    lines, warps = [Float32(np.float32(1.1))] * 2, range(4)
    rows = [[16 * warp + G + 8 * j for j in range(2)] for warp in warps]
    indices = [(column, j) for column in range(consumer.columns) for j in range(2)]

    def dots_of(warp: int) -> list[Any]:
        own: list[Any] = [None] * (2 * consumer.columns)
        for column, j in indices:
            own[sum_index(column, j)] = Float32(dots[rows[warp][j], 8 * (column // 2) + 2 * T + column % 2])
        return own

    with running(Altered(block.machine, modules=OWN)):
        s = [dots_of(warp) for warp in warps]
        scales = [[Float32(factors[row]) for row in rows[warp]] if consumer.value_scale else [] for warp in warps]
        bounds = [consumer.bounds_of(own) for own in scales]
        highest = np.full((consumer.columns, 4), -np.inf, np.float32)
        for warp in warps:
            for column, j in indices:
                own = consumer.logit(None, s[warp], lines, column, j, start=bounds[warp][j])
                highest[column] = np.maximum(highest[column], np.asarray(own).reshape(8, 4).max(0))
        sums: Any = stand_in(SimpleNamespace(softmax=SimpleNamespace(references=[Float32(own[T]) for own in highest])))
        exceeding = []
        for limits in ([None] * 4, bounds):
            for warp in warps:
                place, totals = (
                    consumer.place_of(Int32(0), Int32(warp), Int32(LANES), MAGIC),
                    [None] * consumer.columns,
                )
                target = Int32(block.probabilities) + place.probabilities
                given = sums, totals, target, s[warp], lines, scales[warp], limits[warp]
                exceeding.append(np.any(consumer.write_probabilities(*given)))
    assert any(exceeding[:4]) and not any(exceeding[4:])
    assert block.operand(block.probabilities, 64).max() <= 1.001


def test_an_infinite_query_says_nothing_of_the_power_of_2_that_all_have():
    block = Block(make_call("e4m3_tensor", [4], [300]))
    values = np.array([1.5, -3.0, np.inf, -np.inf] * 8, np.float32)
    with running(Altered(block.machine, modules=OWN)):
        found = QueryWriter(block.config).size_of(Float32(values))
    np.testing.assert_array_equal(np.asarray(found)[:4], [1.5, 3.0, 0.0, 0.0])
