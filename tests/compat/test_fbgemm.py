"""`compat.fbgemm.gqa_attn_splitk` has FBGEMM's signature and outputs."""

import inspect
import math

import pytest
import torch

from cute_kernels.compat.fbgemm import gqa_attn_splitk
from cute_kernels.formats.kv import format_of

HEAD_DIM = 128


Pair = tuple[torch.Tensor, torch.Tensor]


def make_case(kv_format, batch=3, max_t=33, num_q_heads=5, seed=0) -> tuple[torch.Tensor, Pair, Pair]:
    """FBGEMM's shapes: one KV head, D = 128; and the values that the cache stands for."""
    torch.manual_seed(seed)
    q = torch.randn(batch, 1, num_q_heads, HEAD_DIM, dtype=torch.bfloat16)
    k, v = torch.randn(2, batch, max_t, 1, HEAD_DIM)
    form = format_of(kv_format)
    if form.codes == "u4":
        row = form.row(HEAD_DIM)
        caches = row.quantize(k), row.quantize(v)
    else:
        caches = k.bfloat16(), v.bfloat16()
    keys, values = (form.dequantize(x, HEAD_DIM, torch.float64) for x in caches)
    return q, caches, (keys, values)


def attention(q, keys, values, length, scale):
    scores = q[0].double() @ keys[:length, 0].T * scale
    return scores.softmax(dim=-1) @ values[:length, 0]


def test_the_signature_is_fbgemms():
    parameters = inspect.signature(gqa_attn_splitk).parameters
    assert {name: p.default for name, p in parameters.items() if p.default is not inspect.Parameter.empty} == {
        "kv_cache_quant_num_groups": 1,
        "use_tensor_cores": True,
        "cache_logical_dtype_int": 0,
    }
    assert list(parameters)[:6] == ["XQ", "cache_K", "cache_V", "seq_positions", "qk_scale", "num_split_ks"]


@pytest.mark.parametrize("kv_format", ["bf16", "int4_g1", "int4_g2", "int4_g4", "int4_g8"])
@pytest.mark.parametrize("num_split_ks", [1, 2, 4, 8, 13, 16])
def test_output_is_attention_up_to_and_including_the_position(kv_format, num_split_ks):
    q, caches, (keys, values) = make_case(kv_format)
    positions = torch.tensor([0, 20, 32], dtype=torch.int32)
    groups = int(kv_format[6:]) if kv_format != "bf16" else 1
    out, _, _ = gqa_attn_splitk(q, *caches, positions, HEAD_DIM**-0.5, num_split_ks, groups)
    assert out.shape == q.shape and out.dtype == q.dtype
    for row, position in enumerate(positions.tolist()):
        want = attention(q[row], keys[row], values[row], position + 1, HEAD_DIM**-0.5)
        torch.testing.assert_close(out[row, 0].double(), want, atol=2e-3, rtol=1e-2)


def test_split_outputs_are_not_normalised_and_metadata_holds_max_and_sum():
    q, caches, (keys, values) = make_case("int4_g4")
    positions = torch.tensor([0, 20, 32], dtype=torch.int32)
    out, split_out, metadata = gqa_attn_splitk(q, *caches, positions, 0.1, 4, 4, True, 2)
    assert split_out.shape == (3, 4, 5, HEAD_DIM) and split_out.dtype == torch.float32
    assert metadata.shape == (3, 2, 4, 5) and metadata.dtype == torch.float32
    share = math.ceil(21 / 4)  # row 1, split 2 covers [12, 18)
    part = slice(2 * share, 3 * share)
    scores = q[1, 0].double() @ keys[1, part, 0].T * 0.1
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    torch.testing.assert_close(metadata[1, 0, 2].double(), scores.amax(-1), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(metadata[1, 1, 2].double(), weights.sum(-1), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(split_out[1, 2].double(), weights @ values[1, part, 0], atol=1e-4, rtol=1e-4)

    # FBGEMM's own reduction over the splits gives O.
    rescale = (metadata[:, 0] - metadata[:, 0].amax(dim=1, keepdim=True)).exp()
    total = (rescale * metadata[:, 1]).sum(dim=1)
    combined = (rescale.unsqueeze(-1) * split_out).sum(dim=1) / total.unsqueeze(-1)
    torch.testing.assert_close(combined, out[:, 0].float(), atol=1e-2, rtol=1e-2)


def test_a_split_without_tokens_is_defined():
    q, caches, _ = make_case("int4_g1")
    _, split_out, metadata = gqa_attn_splitk(q, *caches, torch.tensor([0, 0, 0], dtype=torch.int32), 0.1, 4)
    assert not split_out[:, 1:].any() and not metadata[:, 1, 1:].any()
    assert torch.all(metadata[:, 0, 1:] == -math.inf)


def test_without_tensor_cores_it_returns_probabilities_and_unscaled_scores():
    q, caches, (keys, _) = make_case("int4_g1")
    positions = torch.tensor([0, 20, 32], dtype=torch.int32)
    out, probabilities, scores = gqa_attn_splitk(q, *caches, positions, 0.1, 4, use_tensor_cores=False)
    want, _, _ = gqa_attn_splitk(q, *caches, positions, 0.1, 4)
    assert torch.equal(out, want)
    assert probabilities.shape == scores.shape == (3, 5, 33)
    raw = q[1, 0].double() @ keys[1, :21, 0].T
    torch.testing.assert_close(scores[1, :, :21].double(), raw, atol=1e-3, rtol=1e-4)
    torch.testing.assert_close(probabilities[1, :, :21].double(), (raw * 0.1).softmax(-1), atol=1e-5, rtol=1e-4)
    assert not probabilities[1, :, 21:].any() and not scores[1, :, 21:].any()


def test_an_empty_batch_has_the_same_shapes():
    q, (k, v), _ = make_case("int4_g1")
    out, split_out, metadata = gqa_attn_splitk(q[:0], k[:0], v[:0], torch.zeros(0, dtype=torch.int32), 0.1, 2)
    assert out.shape == (0, 1, 5, HEAD_DIM)
    assert split_out.shape == (0, 2, 5, HEAD_DIM) and metadata.shape == (0, 2, 2, 5)


def test_what_is_not_supported_is_named():
    q, (k, v), _ = make_case("int4_g1")
    positions = torch.zeros(3, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"cache_logical_dtype_int: got 1.*FP8"):
        gqa_attn_splitk(q, k, v, positions, 0.1, 1, cache_logical_dtype_int=1)
    with pytest.raises(ValueError, match="kv_cache_quant_num_groups: got 3"):
        gqa_attn_splitk(q, k, v, positions, 0.1, 1, 3)
    with pytest.raises(ValueError, match=r"cache_K: got torch\.int32"):
        gqa_attn_splitk(q, k.view(torch.int32), v.view(torch.int32), positions, 0.1, 1)
