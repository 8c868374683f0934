"""The Hopper weight blob: a thread loads what wgmma wants, sharding commutes with packing, inverses are exact."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from layouts.algebra import offsets
from layouts.banks import report
from layouts.decode import CONVERSIONS
from layouts.fragments import wgmma_a
from layouts.proofs import ProofError
from layouts.transform import unpack
from layouts.weights import hopper
from layouts.weights.formats import WEIGHT_TILES, WeightTile

CASES = [(c.bits, name) for name, c in CONVERSIONS.items()]


def codes(n, k, bits, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (n, k * bits // 8), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize(("bits", "conversion"), CASES)
def test_a_thread_load_is_proved_to_be_its_fragments(bits, conversion):
    assert hopper.prove_thread_load(bits, conversion).method == "matrix"
    assert hopper.transform(64, hopper.tile_k(bits), bits, conversion).verify()


@pytest.mark.parametrize(("bits", "conversion"), CASES)
def test_simulated_kernel_reads_its_weights(bits, conversion):
    """Load 16 bytes per thread, run the conversion's instructions, compare with the fragment's (m, k)."""
    n, k = 128, 2 * hopper.tile_k(bits)
    q = codes(n, k, bits)
    values = CONVERSIONS[conversion].value(unpack(q, bits).numpy().astype(np.uint32))
    blob = hopper.pack(q, bits, conversion).numpy()
    fragment = wgmma_a(16).coordinates()
    for tile_n, tile_k in ((0, 0), (1, 1)):
        for thread in (0, 5, 37, 127):
            load = blob[tile_n, tile_k, 16 * thread : 16 * thread + 16].view(np.uint32)
            got = CONVERSIONS[conversion].values(load).reshape(hopper.steps_per_load(bits), -1)
            for step, row in enumerate(got):
                m, kk = fragment[thread].T
                wanted = values[tile_n * 64 + m, tile_k * hopper.tile_k(bits) + 16 * step + kk]
                known = ~np.isnan(wanted)
                assert np.array_equal(row[known], wanted[known])


def test_tiles():
    assert [hopper.tile_k(4), hopper.tile_k(8)] == [64, 32]
    assert hopper.pack(codes(128, 128, 4), 4).shape == (2, 2, 2048)
    assert hopper.pack(codes(128, 128, 8).view(torch.int8), 8).dtype == torch.int8


def test_the_load_takes_no_bank_conflict():
    found = report(lambda lane: 16 * lane, 16, "ld")
    assert (found.wavefronts, found.conflicts) == (4, 0)


@pytest.mark.parametrize("bits", [4, 8])
def test_matrices_beyond_the_cache_move_as_the_layout_says(bits):
    q = codes(512, 4096, bits)
    whole = hopper.transform(512, 4096, bits)
    wanted = unpack(q.flatten(), bits)[torch.from_numpy(offsets(whole.source))]
    assert torch.equal(unpack(whole(q).flatten(), bits), wanted)
    assert torch.equal(whole.inverse()(whole(q)), q)


@settings(max_examples=40)
@given(st.sampled_from([4, 8]), st.integers(1, 4), st.integers(1, 5), st.integers(0, 2**31))
def test_restore_inverts_pack(bits, tiles_n, tiles_k, seed):
    q = codes(64 * tiles_n, hopper.tile_k(bits) * tiles_k, bits, seed)
    assert torch.equal(hopper.restore(hopper.pack(q, bits), bits), q)


@settings(max_examples=40)
@given(st.sampled_from([4, 8]), st.sampled_from([1, 2, 3]), st.integers(1, 2), st.integers(1, 2), st.data())
def test_sharding_commutes_with_packing(bits, world_size, tiles_n, tiles_k, data):
    n, k = 64 * tiles_n * world_size, hopper.tile_k(bits) * tiles_k * world_size
    rank = data.draw(st.integers(0, world_size - 1))
    q = codes(n, k, bits)
    blob = hopper.pack(q, bits)
    rows = q[rank * n // world_size : (rank + 1) * n // world_size]
    assert torch.equal(hopper.shard_n(blob, rank, world_size), hopper.pack(rows, bits))
    width = q.shape[1] // world_size
    columns = q[:, rank * width : (rank + 1) * width]
    assert torch.equal(hopper.shard_k(blob, rank, world_size), hopper.pack(columns, bits))


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: hopper.pack(codes(96, 64, 4), 4), ValueError, "N is 96; want a positive multiple of 64"),
        (lambda: hopper.pack(codes(64, 96, 4), 4), ValueError, "K is 96; want a positive multiple of 64"),
        (lambda: hopper.pack(codes(64, 48, 8), 8), ValueError, "K is 48; want a positive multiple of 32"),
        (lambda: hopper.pack(codes(64, 64, 8), 2), ValueError, "bits is 2"),
        (lambda: hopper.pack(codes(64, 64, 8), 8, "u4_f16"), ValueError, "conversion is 'u4_f16'"),
        (lambda: hopper.pack(codes(64, 64, 8).float(), 8), TypeError, "float32"),
        (lambda: hopper.pack(codes(64, 64, 8)[None], 8), ValueError, r"\[N, K\]"),
        (lambda: hopper.restore(codes(64, 64, 8), 8), ValueError, "blob has shape"),
        (lambda: hopper.shard_n(hopper.pack(codes(192, 64, 4), 4), 0, 2), ValueError, "divisor of the 3 tiles along N"),
        (lambda: hopper.shard_k(hopper.pack(codes(64, 128, 4), 4), 2, 2), ValueError, "rank is 2"),
    ],
)
def test_bad_input_is_named(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_tiles_of_weight_formats_are_those_of_the_formats():
    from cute_kernels.formats.weights import weight_format

    for tile in WEIGHT_TILES:
        form = weight_format(tile.name)
        own = form.bits, form.group_size, form.scale_bytes, form.more_groups * form.scale_bytes
        assert own == (tile.bits, tile.group_size, tile.scale_bytes, tile.second_bytes), tile.name


def test_a_tile_whose_scales_lie_apart_is_not_proved():
    """Rows of 96 bytes would leave holes; scales of one bank for all features would conflict."""

    class Apart(WeightTile):
        def scale_place(self, feature: int, group: int) -> int:
            return 128 * feature + group

    with pytest.raises(ProofError, match="each once"):
        Apart("w4_g128", 4, "u4_bf16", 128, 1).verify()
    with pytest.raises(ProofError, match="without conflicts"):
        Apart("w4_g128", 4, "u4_bf16", 128, 1)._prove_banks()
    with pytest.raises(ProofError, match="in the order of every format"):
        WeightTile("w8_g128", 8, "e5m2_f16", 128, 2)._prove_order()
