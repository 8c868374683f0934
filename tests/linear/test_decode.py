"""Every code with every zero point, as the multiplying warps decode it: exact, in every width and dtype."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("cutlass")

from cute_kernels.linear import decode
from tests.attention.warp import elements
from tests.linear.warp import LinearWarp


@pytest.mark.parametrize("kind", [decode.Decoder, decode.PairDecoder])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("bits", [4, 8])
def test_every_code_less_every_zero_point_is_exact(kind, bits: int, dtype: str, monkeypatch):
    gpu = LinearWarp(np.zeros(16, np.uint8), np.zeros(0, np.uint8))
    gpu.install(monkeypatch, decode)
    subject = kind(bits, dtype)
    masks = subject.masks(decode.Uint32(0))
    words = subject.words_per_step
    generator = np.random.default_rng(bits)
    for zero in (None, *range(1 << bits)):
        points = [subject.symmetric_zero] * 2 if zero is None else [decode.Uint32(zero)] * 2
        offsets = subject.offsets(points)
        # Each lane's words hold different codes; a step's fragment is [row g, row g + 8] of two columns twice.
        codes = generator.permutation(np.arange(256) % (1 << bits)).reshape(32, 8)
        packed = np.zeros((32, words), np.uint64)
        for place in range(8):
            packed[:, place * bits // 32] |= codes[:, place].astype(np.uint64) << np.uint64(place * bits % 32)
        registers = subject.fragment([decode.Uint32(packed[:, i]) for i in range(words)], 0, offsets, masks)
        found = np.concatenate(
            [elements(register, {"bf16": "bf16", "fp16": "f16"}[dtype]) for register in registers], 1
        )
        middle = subject.symmetric_zero if zero is None else zero
        assert np.array_equal(np.sort(found, axis=1), np.sort(codes - float(middle), axis=1))
