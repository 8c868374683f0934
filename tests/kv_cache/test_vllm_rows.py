"""vLLM's rotation as a transform: q . k and V are unchanged, and rows are as vLLM writes them."""

import pytest
import torch

from cute_kernels.formats.kv.transforms import rotated
from cute_kernels.kv_cache.vllm_rows import vllm_transform
from layouts.kv import ZeroPointRow


def hadamard_of_vllm(x: torch.Tensor) -> torch.Tensor:
    """H s x, not normalised; the signs are vLLM's of 128 columns, as its generator gives them."""
    columns = x.shape[-1]
    generator = torch.Generator().manual_seed(0x9E3779B9)
    signs = 2.0 * torch.bernoulli(torch.full((columns,), 0.5), generator=generator) - 1.0
    matrix = torch.tensor([[(-1.0) ** bin(i & j).count("1") for j in range(columns)] for i in range(columns)])
    return (x * signs.to(x.dtype)) @ matrix.to(x.dtype)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_keys_and_values_are_rotated_as_vllm_does(head_dim):
    transform = vllm_transform(2, head_dim)
    k, v = torch.randn(2, 5, 2, head_dim, dtype=torch.float64)
    # fp32 factors: sqrt(128) is no fp32 number
    torch.testing.assert_close(transform.keys(k), hadamard_of_vllm(k), rtol=0, atol=1e-5)
    torch.testing.assert_close(transform.values(v), hadamard_of_vllm(v), rtol=0, atol=1e-5)


def test_scores_and_values_are_those_before_the_rotation():
    transform = vllm_transform(2, 128, v_head_dim=64)
    q, k = torch.randn(5, 8, 128, dtype=torch.float64), torch.randn(5, 2, 128, dtype=torch.float64)
    v = torch.randn(5, 2, 64, dtype=torch.float64)
    scores = torch.einsum("thd,thd->th", transform.queries(q), transform.keys(k).repeat_interleave(4, 1))
    torch.testing.assert_close(scores, torch.einsum("thd,thd->th", q, k.repeat_interleave(4, 1)), rtol=0, atol=1e-5)
    torch.testing.assert_close(transform.restore(transform.values(v)), v, rtol=0, atol=1e-6)
    assert transform.shift(q) is None


def test_rows_of_vllms_bytes_are_read_by_row_and_transform():
    transform, row = vllm_transform(2, 128), ZeroPointRow(128)
    k = torch.randn(20, 2, 128)
    k[..., 7] *= 50
    read = transform.original_keys(row.dequantize(row.quantize(hadamard_of_vllm(k)), torch.float64))
    plain = row.dequantize(row.quantize(k), torch.float64)
    quiet = [i for i in range(128) if i != 7]
    rotated_error, plain_error = ((x - k)[..., quiet].norm() for x in (read, plain))
    assert rotated_error < 0.7 * plain_error  # the loud channel takes the whole range of plain rows


def test_all_heads_have_the_same_signs_and_the_kernels_rotate_whole_heads():
    transform = vllm_transform(3, 128)
    assert transform.k_factor is not None and (transform.k_factor == transform.k_factor[:1]).all()
    assert transform.k_rotation == transform.v_rotation == 128 and transform.k_center is None
    assert torch.equal(rotated(rotated(torch.eye(128), 128), 128).round(), torch.eye(128))


@pytest.mark.parametrize(
    ("sizes", "words"), [((2, 96), "head_dim: got 96"), ((2, 128, 80), "v_head_dim: got 80"), ((0, 64), "num_kv_heads")]
)
def test_sizes_that_have_no_such_transform_are_named(sizes, words):
    with pytest.raises(ValueError, match=words):
        vllm_transform(*sizes)
