"""INT4 rows with a zero point: the bytes are those of vLLM's int4_per_token_head, the error is bounded."""

import math
import struct

import pytest
import torch

from layouts.kv import Int4Row, ZeroPointRow
from layouts.kv.format import adversarial_rows


def test_a_row_has_as_many_bytes_as_one_of_ours_with_one_group():
    assert [ZeroPointRow(d).row_bytes for d in (64, 128, 256)] == [Int4Row(d, 1).row_bytes for d in (64, 128, 256)]
    assert ZeroPointRow(128).row_bytes == 68


def test_bytes_of_a_hand_written_row():
    row = ZeroPointRow(4)
    packed = row.pack(
        torch.tensor([0, 15, 7, 3], dtype=torch.uint8), torch.tensor([0.5]), torch.tensor([5], dtype=torch.uint8)
    )
    assert packed.tolist() == [0xF0, 0x37, 0x05, 0x00, 0x00, 0x3F]
    assert row.dequantize(packed).tolist() == [-2.5, 5.0, 1.0, -1.0]


def test_the_scale_loses_its_low_bits_to_the_zero_point():
    row = ZeroPointRow(2)
    scale = torch.tensor([struct.unpack("<f", struct.pack("<I", 0x3F80001F))[0]])
    codes, stored, zero = row.unpack(
        row.pack(torch.tensor([1, 2], dtype=torch.uint8), scale, torch.tensor([9], dtype=torch.uint8))
    )
    assert stored.view(torch.int32).item() == 0x3F800010 and zero.item() == 9 and codes.tolist() == [1, 2]


def naive_row(x: torch.Tensor) -> list[int]:
    """The definition, one number at a time, in fp32."""
    low, high = x.min(), x.max()
    scale = torch.clamp((high - low) / 15, min=torch.tensor(1e-6))
    rounded = lambda v: min(15, max(0, math.trunc(float(v + 0.5) if v >= 0 else float(v - 0.5))))  # noqa: E731
    zero = rounded(-low / scale)
    inverse = 1.0 / scale
    codes = [rounded(value * inverse + zero) for value in x]
    word = (struct.unpack("<I", struct.pack("<f", float(scale)))[0] & ~15) | zero
    return [codes[2 * j] | codes[2 * j + 1] << 4 for j in range(len(codes) // 2)] + list(struct.pack("<I", word))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_vectorised_quantiser_is_the_definition(head_dim):
    x = torch.cat([adversarial_rows(head_dim)[::9], torch.randn(20, head_dim)])
    assert ZeroPointRow(head_dim).quantize(x).tolist() == [naive_row(line) for line in x]


@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_the_format_verifies_itself(head_dim):
    assert {proof.method for proof in ZeroPointRow(head_dim).verify()} == {"symbolic", "sampled"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_whatever_comes_rows_are_finite(dtype):
    x = torch.randn(8, 64).to(dtype)
    x[0, 3], x[1, 5], x[2, 7] = math.inf, -math.inf, math.nan
    row = ZeroPointRow(64)
    assert row.dequantize(row.quantize(x), torch.float64).isfinite().all()


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: ZeroPointRow(3), ValueError, "even"),
        (lambda: ZeroPointRow(0), ValueError, "head_dim is 0"),
        (lambda: ZeroPointRow(64).quantize(torch.zeros(2, 32)), ValueError, r"shape \(2, 32\)"),
        (lambda: ZeroPointRow(64).quantize(torch.zeros(2, 64), torch.ones(1)), ValueError, "scale is given"),
        (lambda: ZeroPointRow(64).dequantize(torch.zeros(2, 64, dtype=torch.uint8)), ValueError, "36"),
        (lambda: ZeroPointRow(2).pack(torch.zeros(2, dtype=torch.uint8)), ValueError, "1 parts"),
        (
            lambda: ZeroPointRow(2).pack(
                torch.zeros(2, dtype=torch.uint8), torch.ones(1), torch.full((1,), 16, dtype=torch.uint8)
            ),
            ValueError,
            "16",
        ),
    ],
)
def test_what_does_not_fit_is_named(call, error, words):
    with pytest.raises(error, match=words):
        call()
