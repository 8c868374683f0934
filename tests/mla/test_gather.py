"""The producer warps, lane by lane in NumPy: addresses, decoding, tiles, and that nothing else is read."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

pytest.importorskip("cutlass")

from cute_kernels.device import division
from cute_kernels.mla.config import (
    BLOCK_TOKENS,
    FLAG_BYTES,
    GROUP_TOKENS,
    PRODUCER_WARPS,
    MlaConfig,
)
from cute_kernels.mla.kernel import make_load
from cute_kernels.mla.loads import dequantize, destination, entries, gather, locate
from cute_kernels.mla.policies import Copies, Crossover, Decode, SplitCrossover, SplitTiles, WholeTiles
from layouts import banks
from layouts.kv.mla import MlaFp8, MlaModel1
from simulator import LANES, Int32, Meanings, PlainThread, Uint32, Warp, running, stand_in
from simulator.registers import bf16_values
from tests.mla.test_tiles import place_of

FORM, MODEL1 = MlaFp8(), MlaModel1()
TILE_BYTES = MlaConfig().tile_bytes
NUM_TOKENS = 150
PAGE_SIZE, NUM_PAGES, PAGE_GAP = 5, 30, 48  # bytes at least between the end of a page and the next


def fp8_tokens(count: int, any_scale: bool, exponents: range = range(-14, 7), seed: int = 0) -> torch.Tensor:
    """uint8 [count, 656] with all codes but NaN, scales of any size or powers of 2, with these exponents."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 254, (count, 512), generator=generator, dtype=torch.int32)
    codes = (codes + (codes >= 127)).to(torch.uint8).view(torch.float8_e4m3fn)
    scales = 2.0 ** torch.randint(exponents.start, exponents.stop, (count, 4), generator=generator)
    if any_scale:
        scales = scales * (1 + torch.rand((count, 4), generator=generator))
    return FORM.pack(codes, scales.float(), torch.randn((count, 64), generator=generator).bfloat16())


def model1_tokens(count: int, exponents: range, seed: int = 0) -> torch.Tensor:
    """uint8 [count, 584] with all codes but NaN and these exponents of scales."""
    generator = torch.Generator().manual_seed(seed)
    codes = fp8_tokens(count, any_scale=False, seed=seed)[:, :448].contiguous().view(torch.float8_e4m3fn)
    scales = torch.randint(exponents.start + 127, exponents.stop + 127, (count, 8), generator=generator)
    return MODEL1.pack(codes, torch.randn((count, 64), generator=generator).bfloat16(), scales.to(torch.uint8))


def paged(tokens: torch.Tensor) -> tuple[np.ndarray, int]:
    """Pages of tokens, a gap of NaN codes behind each, as bytes; and the bytes from page to page."""
    if tokens.shape[1] == MODEL1.row_bytes:
        tokens = MODEL1.to_pages(tokens.view(NUM_PAGES, PAGE_SIZE, -1))
    pages = tokens.reshape(NUM_PAGES, -1)
    pages = torch.nn.functional.pad(pages, (0, PAGE_GAP + -pages.shape[1] % 16), value=255)
    return pages.flatten().numpy().copy(), pages.shape[1]


def read_words(shared: np.ndarray) -> np.ndarray:
    """uint16 [64, columns] of a tile."""
    rows, columns = np.indices((BLOCK_TOKENS, shared.size // BLOCK_TOKENS // 2))
    places = np.vectorize(place_of)(rows, columns)
    return shared.view(np.uint16)[places // 2]


def read_tile(shared: np.ndarray) -> np.ndarray:
    """fp32 [64, columns] of a tile of bf16."""
    return bf16_values(read_words(shared))


def divisor_of(value: int) -> division.Divisor:
    """As the host finds it."""
    shift = (value - 1).bit_length()
    return division.Divisor(*map(stand_in, (value, np.uint32(-(-(2 ** (31 + shift)) // value)), np.uint32(shift))))


def pages_of(base: int, page_stride: int, token_stride: int, page_size: int) -> locate.Pages:
    return locate.Pages(stand_in(base), stand_in(page_stride), stand_in(token_stride), divisor_of(page_size))


def sparse_source(pages, num_tokens: int) -> locate.SparseSource:
    chosen = SimpleNamespace(pages=pages, num_tokens=num_tokens)
    nothing = SimpleNamespace(pages=pages_of(0, 0, 0, 1), num_tokens=0)
    return locate.SparseSource(stand_in(chosen), stand_in(nothing))


def fill_tile(config: MlaConfig, machine: Warp, pages, indices: np.ndarray) -> None:
    """What all producer warps do for one block whose indices are given; the last loads ask for nothing."""
    load: Any = make_load(config)
    source = sparse_source(pages, NUM_PAGES * PAGE_SIZE)
    work, locator = SimpleNamespace(main_blocks=1), locate.SparseLocator()
    for warp in range(config.producer_warps):
        place = gather.LanePlaces.of(warp * config.warp_groups * GROUP_TOKENS, LANES)
        for group in range(config.warp_groups):
            entry = Int32(indices[place.row + group * GROUP_TOKENS])
            token = locator.locate(work, source, entry, Int32(0), place.row)
            tile = Int32(group * GROUP_TOKENS * 128)
            if config.copies:
                load.copy_group(token, tile, place)
            else:
                write_all(load, token, tile, place)


def write_all(load, token, tile, place) -> None:
    """One group of one block, whole tokens; what would be asked for next is nothing."""
    decoder = load.decoder
    words, scales = decoder.registers()
    for i in range(decoder.num_loads):
        decoder.load_piece(words, token, place, i)
    decoder.load_scales(scales, token)
    nothing = locate.Token(token.address, Int32(0), token.behind)
    decoder.write_group(words, scales, nothing, tile, place)


def some_indices(seed: int) -> np.ndarray:
    """64 indices: most exist, some twice, some not."""
    generator = np.random.default_rng(seed)
    indices = generator.integers(0, NUM_PAGES * PAGE_SIZE, BLOCK_TOKENS)
    indices[[3, 17, 40, 63]] = -1, NUM_PAGES * PAGE_SIZE, 2**31 - 1, -(2**31)
    return indices


@pytest.mark.parametrize("producer_warps", PRODUCER_WARPS)
@pytest.mark.parametrize(
    ("scales", "exponents"), [("fp32", range(-14, 7)), ("fp32", range(-30, 100)), ("power_of_2", range(-14, 7))]
)
def test_fp8_tile(run_on, scales, exponents, producer_warps):
    tokens = fp8_tokens(NUM_PAGES * PAGE_SIZE, any_scale=scales == "fp32", exponents=exponents)
    memory, stride = paged(tokens)
    machine = Warp(np.full(TILE_BYTES, 0xFF, np.uint8), memory)
    run_on(machine)
    indices = some_indices(1)
    config = MlaConfig(tiles=WholeTiles(Decode(scales, warps=producer_warps)))
    fill_tile(config, machine, pages_of(0, stride, 656, PAGE_SIZE), indices)
    exists = (indices >= 0) & (indices < len(tokens))
    exact = FORM.dequantize(tokens[np.where(exists, indices, 0)], torch.float64).numpy() * exists[:, None]
    found = read_tile(machine.shared_memory).astype(np.float64)
    if scales == "power_of_2":
        assert np.array_equal(found, exact)
    else:
        # Rounded once, but for 2**-16 of the value: half a unit of bf16's last place is at most 2**-8 of it.
        assert (np.abs(found - exact) <= np.abs(exact) * (2.0**-8 + 2.0**-16)).all()
        nearest = torch.from_numpy(exact).bfloat16().double().numpy()
        assert (found != nearest).mean() < 0.01
    for store in (access for access in machine.accesses if access.kind == "st"):
        assert banks.wavefronts(store.addresses, store.width, store.kind) == 4
    assert all(place % stride + size <= PAGE_SIZE * 656 for place, size in machine.reads)


@pytest.mark.parametrize("producer_warps", PRODUCER_WARPS)
@pytest.mark.parametrize(("scales", "exponents"), [("ue8m0", range(-126, 119)), ("power_of_2", range(-14, 8))])
def test_model1_tile(run_on, scales, exponents, producer_warps):
    """Latent columns, then RoPE columns, which are part of the value; scales from behind the data of a page."""
    tokens = model1_tokens(NUM_TOKENS, exponents)
    memory, stride = paged(tokens)
    config = MlaConfig("sparse", "mla_model1", 512, WholeTiles(Decode(scales, warps=producer_warps)))
    machine = Warp(np.full(config.tile_bytes, 0xFF, np.uint8), memory)
    run_on(machine)
    indices = some_indices(4)
    fill_tile(config, machine, pages_of(0, stride, MODEL1.DATA_BYTES, PAGE_SIZE), indices)
    exists = (indices >= 0) & (indices < len(tokens))
    exact = MODEL1.dequantize(tokens[np.where(exists, indices, 0)], torch.float64).numpy() * exists[:, None]
    # Products among bf16's subnormals are rounded, as bf16 rounds them.
    wanted = torch.from_numpy(exact).bfloat16().double().numpy()
    assert np.array_equal(read_tile(machine.shared_memory).astype(np.float64), wanted)
    assert (wanted == exact)[np.abs(exact) >= 2.0**-126].all()
    for store in (access for access in machine.accesses if access.kind == "st"):
        assert banks.wavefronts(store.addresses, store.width, store.kind) == 4
    for place, size in machine.reads:
        offset = place % stride
        assert offset + size <= PAGE_SIZE * (MODEL1.DATA_BYTES if size == 16 else MODEL1.row_bytes)
        assert size == 16 or (size == 8 and offset % 8 == 0 and offset >= PAGE_SIZE * MODEL1.DATA_BYTES)


@pytest.mark.parametrize("form", ["mla_fp8", "mla_model1"])
@pytest.mark.parametrize("order", ["stepped", "delayed_pv"])
def test_each_of_two_ctas_decodes_half_of_both_tiles(run_on, form, order):
    width, scales = {"mla_fp8": (576, "fp32"), "mla_model1": (512, "ue8m0")}[form]
    whole = WholeTiles(Crossover(scales), "stepped")
    config = MlaConfig("sparse", form, width, whole if order == "stepped" else SplitTiles(SplitCrossover(scales)))
    assert config.can_implement() is None
    split = form == "mla_model1"
    exponents = range(-5, 20)  # of scales that contain 2**120 and of such that do not
    quantiser, tokens = (
        (MODEL1, model1_tokens(NUM_TOKENS, exponents)) if split else (FORM, fp8_tokens(NUM_TOKENS, False, exponents))
    )
    memory, stride = paged(tokens)
    machine = Warp(np.full(2 * config.tile_bytes, 0xFF, np.uint8), memory)
    run_on(machine)
    load: Any = make_load(config)
    token_stride = MODEL1.DATA_BYTES if split else quantiser.row_bytes
    source = sparse_source(pages_of(0, stride, token_stride, PAGE_SIZE), NUM_PAGES * PAGE_SIZE)
    indices = some_indices(3)
    for rank in range(2):
        machine.rank = rank
        for warp in range(PRODUCER_WARPS[0]):
            place = gather.LanePlaces.of(load.tiles.first_row(warp), LANES)
            token = locate.SparseLocator().locate(
                SimpleNamespace(main_blocks=1), source, Int32(indices[place.row]), Int32(0), place.row
            )
            start, rows = rank * config.tile_bytes, load.tiles.first_row(warp) * 128
            distance = (1 - 2 * rank) * config.tile_bytes
            tiles = [
                destination.SharedTile(Int32(start), start + rows, Int32(distance), stand_in((1 - rank, part)))
                for part in range(config.tile_parts)
            ]
            if order == "delayed_pv":
                write_in_parts(load, token, tiles, place)
            else:
                write_all(load, token, tiles[0], place)
    exists = (indices >= 0) & (indices < len(tokens))
    wanted = quantiser.dequantize(tokens[np.where(exists, indices, 0)], torch.float32).numpy() * exists[:, None]
    for rank in range(2):
        found = read_tile(machine.shared_memory[rank * config.tile_bytes :][: config.tile_bytes])
        assert np.array_equal(found, wanted)
        for part in range(config.tile_parts):
            flags = FLAG_BYTES // 2 if part == 0 else 0  # the other CTA's half of them, which come by themselves
            assert machine.sent[rank, part] == config.sent_bytes(part) - flags


def write_in_parts(load, token, tiles, place) -> None:
    """As :func:`write_all`, a part at a time; between them a lane asks for its next token, which is nothing."""
    words, scales = load.decoder.registers()
    load.load_token(words, scales, token, place)
    factors, codes = load.decoder.factors(scales), load.taken(words)
    for part, tile in enumerate(tiles):
        load.write_part(codes, factors, tile, place, part)
        load.tiles.send(tile, part)
        load.load_token(words, scales, locate.Token(token.address, Int32(0), token.behind), place)


@pytest.mark.parametrize(
    "config",
    [
        MlaConfig(form="mla_bf16", tiles=WholeTiles(Copies())),
        MlaConfig(form="mla_fp16", tiles=WholeTiles(Copies())),
        MlaConfig("sparse", "mla_bf16", 512, WholeTiles(Copies())),
    ],
    ids=lambda config: config.name,
)
def test_tile_of_copies(run_on, config):
    width = config.head_dim
    tokens = torch.randint(0, 2**15, (NUM_TOKENS, width), generator=torch.Generator().manual_seed(0)).to(torch.int16)
    memory, stride = paged(tokens.view(torch.uint8))
    machine = Warp(np.full(config.tile_bytes, 0xFF, np.uint8), memory)
    run_on(machine)
    indices = some_indices(2)
    fill_tile(config, machine, pages_of(0, stride, 2 * width, PAGE_SIZE), indices)
    exists = (indices >= 0) & (indices < len(tokens))
    wanted = tokens[np.where(exists, indices, 0)].numpy() * exists[:, None]
    assert np.array_equal(read_words(machine.shared_memory), wanted)


@pytest.mark.parametrize(("scales", "exponents"), [("fp32", range(-120, 110)), ("power_of_2", range(-14, 8))])
def test_every_code_times_every_scale(run_on, scales, exponents):
    """All codes, subnormal ones included, with powers of 2; those from 2**7 on do not contain 2**120."""
    machine = Warp(np.zeros(16, np.uint8), np.zeros(16, np.uint8))
    run_on(machine)
    codes = np.array([code for code in range(256) if code & 0x7F != 0x7F] + [0, 0], np.uint8)
    wanted = torch.from_numpy(codes).view(torch.float8_e4m3fn).double().numpy().reshape(-1, 4)
    dequantizer = dequantize.Dequantizer(scales, 4)
    for exponent in exponents:
        words = [Uint32(np.full(32, np.float32(scale).view(np.uint32))) for scale in (1, 2.0**exponent, 2, 2.0**119)]
        factors = dequantizer.factors(stand_in(words), 4)
        assert scales == "power_of_2" or (factors.large[0] == 8 + 2 * (exponent >= 7)).all()
        for first in range(0, 64, 32):
            products: Any = dequantizer.word(Uint32(codes.view(np.uint32)[first : first + 32]), factors.scales[1])
            if dequantizer.any_scale:
                products = dequantizer.raised(products, factors, 1)
            found = bf16_values(np.ascontiguousarray(np.stack(products, axis=1)).view(np.uint16).reshape(32, 4))
            assert np.array_equal(found, wanted[first : first + 32] * 2.0**exponent)


@given(st.integers(1, 2**31 - 1), st.integers(0, 2**31 - 1))
@example(1, 2**31 - 1)
@example(2**31 - 1, 2**31 - 1)
@example(2**31 - 1, 2**31 - 2)
@example(641, 2**31 - 1)
def test_division_by_a_multiplication_is_exact(value, number):
    """What the host finds, with Python's integers in the place of the compiler's, held to 32 and 64 bits."""
    with running(Integers()):
        divisor = division.Divisor.of(value)
        assert divisor == divisor_of(value)
        for near in {number, number - number % value, max(number - number % value - 1, 0)}:
            assert (2 * near) < 2**32 and divisor.divide(near) == divmod(near, value)


class Integers(PlainThread):
    """Integers that must fit their types."""

    def meanings(self) -> Meanings:
        limits = {"Uint32": 2**32, "Int32": 2**31, "Int64": 2**63}
        scalars = {name: bounded(limit) for name, limit in limits.items()}
        return replace(super().meanings(), scalars=scalars)


def bounded(limit: int):
    """An integer type: what it is given must fit."""

    def check(value: int) -> int:
        assert 0 <= value < limit
        return value

    return check


@pytest.mark.parametrize(("form", "head_dim"), [("mla_fp8", 576), ("mla_model1", 512)])
@pytest.mark.parametrize("start", range(0, 128, 16))
@pytest.mark.parametrize("producer_warps", PRODUCER_WARPS)
def test_every_line_of_a_token_is_prefetched(run_on, form, head_dim, start, producer_warps):
    config = MlaConfig("sparse", form, head_dim, WholeTiles(Decode(prefetch=4, warps=producer_warps)))
    prefetcher = entries.Entries.of(config)
    run_on(PlainThread())
    offsets = [offset for sharer in range(32 // prefetcher.rows) for offset in prefetcher.lines(sharer)]
    assert {(start + offset) // 128 for offset in offsets} == {
        (start + byte) // 128 for byte in range(prefetcher.token_bytes)
    }
