"""What a decoding producer warp writes into a tile of shared memory, run by the simulator."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from cute_kernels.attention.problem import AttentionProblem
from cute_kernels.device.pages import Pages

pytest.importorskip("cutlass")

from cute_kernels.attention.extend_config import ExtendConfig
from cute_kernels.attention.extend_policies import SLAB_COLUMNS
from cute_kernels.attention.extend_schedule import choose
from cute_kernels.attention.loads import powers
from cute_kernels.attention.loads.memory import KEYS, VALUES, Source
from cute_kernels.attention.loads.rows import RowRuns, TileWriter
from cute_kernels.attention.mainloops.tile_softmax import Softmax, TileScale
from cute_kernels.device import wgmma_tiles
from cute_kernels.device.division import Divisor
from cute_kernels.formats.kv import format_pair
from cute_kernels.formats.scores.features import PLAIN, Features
from simulator import LANES, Float32, Int32, Int64, Uint32, running, stand_in
from tests.extend.cases import Call, make_call
from tests.extend.test_unpack import Machine, _bytes, _rows, wanted

HEAD = 1  # what is decoded
FIRST, STOP = 140, 250  # tokens that queries see, from the middle of the block that is decoded


class Writer(TileWriter):
    """One that keeps what it tells consumers."""

    def tell(self, word, address, lane) -> None:
        self.told = stand_in(word)


class Tiles:
    """The block of a call's K and V with token `FIRST`, as producer warps write it.

    Attributes:
        rows: K's and V's, float64 [tile_tokens, columns], as they lie in the tile, or in those of V's parts. words:
            what consumers are told, by warp.
    """

    def __init__(self, call: Call):
        keys, values = format_pair(call.kv_format)
        table, page_tokens = call.options.get("block_table"), call.caches[0].shape[1]
        features = Features(paged=True) if table is not None else PLAIN
        touching = 0 if table is None else page_tokens & -page_tokens
        self.config = choose(AttentionProblem.ragged(call.q.shape[2], keys, values, "bf16", touching, features))
        assert self.config.can_implement() is None and self.config.decodes
        pieces = [_bytes(call.k_cache), _bytes(call.v_cache), np.zeros(0, np.uint8) if table is None else _bytes(table)]
        at = np.cumsum([256, *(-(-len(piece) // 256) * 256 for piece in pieces)])
        memory = np.zeros(at[-1], np.uint8)
        for start, piece in zip(at, pieces, strict=False):
            memory[start : start + len(piece)] = piece
        self.block = FIRST // self.config.tile_tokens
        self.machine = Machine(np.zeros(max(self.config.tile_bytes), np.uint8), memory)
        self.rows: list[torch.Tensor] = []
        self.words: list[int] = []
        with running(self.machine):
            rows = [_rows(cache, at[i], False) for i, cache in enumerate((call.k_cache, call.v_cache))]
            pages = Pages(
                Int64(at[2]),
                Int32(0 if table is None else table.shape[1]),
                Int32(len(call.k_cache)),
                Divisor.of(Int32(page_tokens)),
            )
            source = stand_in(Source(rows[0], rows[1], pages, None, Int64(0)))
            for operand in (KEYS, VALUES):
                parts = []
                for part in range(self.config.value_parts if operand == VALUES else 1):
                    for warp in range(self.config.tile_warps):
                        self.write(source, operand, Int32(part), Int32(warp))
                    parts.append(in_rows(self.machine.shared_memory, self.config, operand))
                self.rows.append(torch.cat(parts, dim=1))

    def write(self, source, operand: int, part, warp) -> None:
        given = {"request": Int32(0), "head": Int32(HEAD), "value_part": part, "kv_stop": Int32(STOP)}
        work = stand_in(SimpleNamespace(**given))
        memory = SimpleNamespace(tiles=Int32(0), tile=lambda operand, stage: Int32(0), scales_of=lambda *_: Int32(0))
        writer, runs, lane = Writer(self.config, operand), RowRuns(self.config, self.config.warp_rows), Int32(LANES)
        held, places, value_scales = writer.rows.make(), runs.make(), [Uint32(0)] * 8
        runs.ask(places, source, work, Int32(self.block), warp)
        given = (places, source, work, Int32(FIRST), Int32(self.block), warp, lane)
        writer.rows.load(held, *given)
        if operand == KEYS and self.config.tile_scales[VALUES]:
            TileWriter(self.config, VALUES).rows.load_scales(value_scales, *given)
        writer.store(held, value_scales, work, memory, Int32(0), writer.place(warp, lane), warp, lane)
        if operand == KEYS and any(self.config.tile_scales):
            self.words.append(int(np.broadcast_to(writer.told, (32,))[0]))


def in_rows(tile: np.ndarray, config: ExtendConfig, operand: int) -> torch.Tensor:
    """A tile in the 128-byte swizzle, row by row."""
    row, column = np.arange(config.tile_tokens)[:, None], np.arange(config.operand_columns[operand])[None]
    piece = column % SLAB_COLUMNS // 8 ^ row % 8
    place = column // SLAB_COLUMNS * config.slab_bytes + row * wgmma_tiles.ROW_BYTES
    place = place + piece * wgmma_tiles.PIECE_BYTES + column % 8 * 2
    return torch.from_numpy(tile.view(np.float16)[place // 2].astype(np.float64))


def powers_of(words: list[int]) -> torch.Tensor:
    """K's and V's powers of 2, float64 [2, warps], from the halves of words."""
    halves = np.array([[word & 0xFFFF0000 for word in words], [word << 16 & 0xFFFF0000 for word in words]], np.uint32)
    keys, logs = torch.from_numpy(halves.view(np.float32)).double()
    return torch.stack([keys, logs.exp2()])


def check(call: Call) -> Tiles:
    found = Tiles(call)
    tokens = found.config.tile_tokens
    first, stop = FIRST - found.block * tokens, min(STOP - found.block * tokens, tokens)
    for operand, rows in enumerate(found.rows):
        own = torch.ones(tokens, 1, dtype=torch.float64)
        if any(found.config.tile_scales):
            told = powers_of(found.words)[operand]
            assert (told == told.log2().round().exp2()).all(), "powers of 2"
            own = told.repeat_interleave(found.config.warp_rows)[:, None]
        rows = rows * own
        want = wanted(call, operand, 0, STOP)[HEAD, found.block * tokens :][:tokens]
        seen = slice(max(first, 0), stop)
        # A scale and its product with a code are rounded, each to 11 bits; scales to multiples of 2**-24.
        tolerance = 2.0**-10 * want[seen].abs().amax(dim=-1, keepdim=True) + 448 * 2.0**-25 * own[seen]
        assert ((rows[seen, : want.shape[1]] - want[seen]).abs() <= tolerance).all()
        assert not rows[: seen.start].any() and not rows[stop:].any(), "rows that nobody sees are zeros"
        assert not rows[:, want.shape[1] :].any(), "columns that rows lack are zeros"
    return found


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "int8": ("int8_token_head", {}),
    "e4m3, pages of 16": ("e4m3_token_head", {"page_size": 16}),
    "e4m3, a scale a tensor": ("e4m3_tensor", {}),
    "e5m2, contiguous": ("e5m2", {"page_size": None}),
    "int4_g1": ("int4_g1", {}),
    "int4_g4": ("int4_g4", {"page_size": 16}),
    "a pair": (("int8_token_head", "int4_g4"), {}),
    "another pair": (("e4m3_tensor", "int8_token_head"), {}),
    "int8_g2": ("int8_g2", {}),
    "int8_g4, pages of 16": ("int8_g4", {"page_size": 16}),
    "int8_g8, contiguous": ("int8_g8", {"page_size": None}),
    "8 groups, head_dim 64": ("int8_g8", {"head_dim": 64}),
    "2 groups, head_dim 80": ("int8_g2", {"head_dim": 80}),
    "4 groups, head_dim 96": ("int8_g4", {"head_dim": 96}),
    "8 groups, head_dim 192": ("int8_g8", {"head_dim": 192}),
    "8 groups, head_dim 256": ("int8_g8", {"head_dim": 256}),
    "V in groups": (("int4_g4", "int8_g4"), {}),
    "K in groups": (("int8_g8", "e4m3_token_head"), {}),
    "head_dim 64": ("int8_token_head", {"head_dim": 64}),
    "head_dim 80": ("e4m3_token_head", {"head_dim": 80}),
    "head_dim 256": ("int8_token_head", {"head_dim": 256}),
    "head_dim 512": ("int8_token_head", {"head_dim": 512}),
    "head_dim 512, pages of 16": ("int4_g4", {"head_dim": 512, "page_size": 16}),
    "head_dim 512, a scale a tensor": ("e4m3_tensor", {"head_dim": 512, "page_size": None}),
    "head_dim 512, a pair": (("int8_g8", "int4_g1"), {"head_dim": 512}),
    "head_dim 512, V in groups": (("e4m3_tensor", "int8_g4"), {"head_dim": 512}),
}


@pytest.mark.parametrize("name", CASES)
def test_a_tile_is_what_the_cache_says(name):
    kv_format, options = CASES[name]
    check(make_call(kv_format, [4], [300], **options))


@pytest.mark.parametrize("kv_format, header", [("int8_token_head", 4), ("int8_g4", 16)])
@pytest.mark.parametrize("power", [-45, -20, 20, 38])
def test_rows_scales_may_be_of_any_size(power, kv_format, header):
    """And K's of another one than V's."""
    call = make_call(kv_format, [4], [300])
    for operand, cache in enumerate(call.caches):
        cache[..., :header].view(torch.float32).mul_(2.0 ** (power if operand else -power))
    check(call)


def test_warps_have_powers_of_their_own():
    call = make_call("int8_token_head", [4], [300], page_size=None)
    scales = call.caches[1][0, :, HEAD, :4].view(torch.float32)
    scales[128 + 32 :][:32] *= 2.0**7
    own = powers_of(check(call).words)[VALUES].log2()
    assert own[1] >= own[2] + 5 and len(own) == 4


@pytest.mark.parametrize("most", [9, 14])
def test_rows_of_a_tile_may_have_scales_of_all_sizes(most):
    call = make_call("e4m3_token_head", [4], [300])
    for cache in call.caches:
        scales = cache[..., :4].view(torch.float32)
        scales.mul_(torch.exp2(torch.randint(-most, most, scales.shape).float()))
    check(call)


def test_no_power_of_2_makes_masked_scores_numbers():
    """-inf times 0 is no number."""
    softmax = Softmax(choose(AttentionProblem.ragged(128, "int8_token_head", "int8_token_head", "bf16", 64, PLAIN)))
    with running(Machine(np.zeros(16, np.uint8), np.zeros(16, np.uint8))):
        rows = stand_in(SimpleNamespace(scales=[Float32(2.0**-118)] * 2))
        scale = TileScale(Float32(2.0**-45), Float32(0.0), Float32(1.0))
        factors = [float(np.asarray(softmax.factor(rows, scale, row)).max()) for row in range(2)]
    assert min(factors) > 0


@pytest.mark.parametrize("key", [-46, -1, 0, 34])
@pytest.mark.parametrize("value", [-46, -7, 0, 1, 34])
def test_consumers_read_what_producers_have_told(key, value):
    with running(Machine(np.zeros(16, np.uint8), np.zeros(16, np.uint8))):
        found = powers.powers_in(powers.word_of(Int32(key), Int32(value)))
    assert [float(np.asarray(number).max()) for number in found] == [2.0**key, value, 2.0**-value]
