"""FBGEMM's decode attention, `torch.ops.fbgemm.gqa_attn_splitk`, on this package's kernels.

Names, order, defaults and outputs are FBGEMM's (fbgemm_gpu.experimental.gen_ai, `gqa_attn_splitk`), so replacing

    torch.ops.fbgemm.gqa_attn_splitk(...)   by   cute_kernels.compat.fbgemm.gqa_attn_splitk(...)

is all that a caller changes. The arguments and results correspond as follows:

| FBGEMM | here |
|---|---|
| seq_positions, position of the newest token | seq_lens = seq_positions + 1 |
| uint8 cache, kv_cache_quant_num_groups groups | kv_format "int4_g1", "int4_g2", "int4_g4" or "int4_g8" |
| bf16 cache | kv_format "bf16" |
| second output: per split, sum over its tokens of exp(score - max) * v | split_out * split_sum: not normalised |
| third output: [:, 0] largest scaled score, [:, 1] sum of exp(score - max), both per split | split_max, split_sum |

So, as with FBGEMM, O = sum_s w_s out_s / sum_s w_s sum_s with w_s = exp(max_s - max over splits).

This module supports more than FBGEMM: any number of KV heads and of tokens, all groups that `decode_attention`
supports, and CPU tensors (through the reference). Splits without tokens, which FBGEMM leaves uninitialised, have out 0,
max -inf and sum 0.

On a GPU the second and third output differ from FBGEMM's; O and the combination above are the same:

* Tiles of tokens are assigned to the splits round-robin. FBGEMM's splits have ceil(length / num_split_ks) consecutive
  tokens each. So split s covers other tokens than FBGEMM's split s. CPU tensors are split as by FBGEMM.
* `max` is the number that was subtracted from the split's scores before exp, not always the largest scaled score: it
  may be a few units less, and with INT4 rows it includes the logarithm of V's scales. `sum` and the split's output
  are relative to it.
"""

from __future__ import annotations

import torch

from cute_kernels.arguments import check_positive, check_tensors
from cute_kernels.attention import decode_attention_splits
from cute_kernels.compat.names import renamed
from cute_kernels.formats.kv import format_of
from cute_kernels.names import KvFormatName

LOGICAL_BF16, LOGICAL_FP8, LOGICAL_INT4 = 0, 1, 2
INT4_FORMATS: dict[int, KvFormatName] = {1: "int4_g1", 2: "int4_g2", 4: "int4_g4", 8: "int4_g8"}  # by groups of a row
NAMES = {
    "q": "XQ",
    "k_cache": "cache_K",
    "v_cache": "cache_V",
    "seq_lens": "seq_positions",
    "softmax_scale": "qk_scale",
    "num_splits": "num_split_ks",
}


def gqa_attn_splitk(
    XQ: torch.Tensor,
    cache_K: torch.Tensor,
    cache_V: torch.Tensor,
    seq_positions: torch.Tensor,
    qk_scale: float,
    num_split_ks: int,
    kv_cache_quant_num_groups: int = 1,
    use_tensor_cores: bool = True,
    cache_logical_dtype_int: int = LOGICAL_BF16,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Decodes with grouped-query attention, split along the cache.

    XQ: bf16 [B, 1, HQ, D]. cache_K, cache_V: bf16 [B, MAX_T, HKV, D] or uint8 INT4 rows [B, MAX_T, HKV,
    4 * kv_cache_quant_num_groups + D / 2]. seq_positions: int32 [B], position of the newest token (length - 1).
    qk_scale multiplies the scores. cache_logical_dtype_int: 0 (bf16, or INT4 if the cache is uint8, as in FBGEMM) or
    2 (INT4); FP8 (1) is not supported.

    use_tensor_cores=True returns O [B, 1, HQ, D] in XQ's dtype, per-split outputs fp32 [B, num_split_ks, HQ, D] and
    metadata fp32 [B, 2, num_split_ks, HQ]. The module's docstring explains the last two.

    use_tensor_cores=False returns, as FBGEMM does, O, the probabilities fp32 [B, HQ, MAX_T] and the unscaled scores
    q . k fp32 [B, HQ, MAX_T], both 0 beyond the length. PyTorch computes these whole matrices: they are for study, not
    for speed.

    Raises TypeError or ValueError for a format that is not supported and for arguments that do not fit; the message
    names the argument, what came and what is wanted.
    """
    check_positive("qk_scale", qk_scale)
    check_tensors(XQ=XQ, cache_K=cache_K, cache_V=cache_V, seq_positions=seq_positions)
    kv_format = _kv_format(cache_K, kv_cache_quant_num_groups, cache_logical_dtype_int)
    seq_lens = seq_positions + 1
    try:
        out, split_out, split_max, split_sum = decode_attention_splits(
            XQ, cache_K, cache_V, seq_lens, kv_format=kv_format, softmax_scale=qk_scale, num_splits=num_split_ks
        )
    except (TypeError, ValueError) as error:
        raise renamed(error, NAMES) from error
    if not use_tensor_cores:
        return out, *_score_matrices(XQ, cache_K, seq_lens, kv_format, qk_scale)
    return out, split_out * split_sum.unsqueeze(-1), torch.stack((split_max, split_sum), dim=1)


def _kv_format(cache: torch.Tensor, num_groups: int, logical_dtype: int) -> KvFormatName:
    if cache.dtype == torch.bfloat16:
        return "bf16"
    if cache.dtype != torch.uint8:
        raise ValueError(f"cache_K: got {cache.dtype}, want torch.bfloat16, or torch.uint8 holding INT4 rows")
    if logical_dtype not in (LOGICAL_BF16, LOGICAL_INT4):
        raise ValueError(
            f"cache_logical_dtype_int: got {logical_dtype}, want {LOGICAL_INT4} (INT4) or {LOGICAL_BF16} "
            f"(the cache's own dtype) for a uint8 cache; {LOGICAL_FP8} (FP8) is not supported"
        )
    if num_groups not in tuple(INT4_FORMATS) or isinstance(num_groups, bool):
        raise ValueError(f"kv_cache_quant_num_groups: got {num_groups}, want 1, 2, 4 or 8")
    return INT4_FORMATS[num_groups]


def _score_matrices(
    q: torch.Tensor, k_cache: torch.Tensor, seq_lens: torch.Tensor, kv_format: str, softmax_scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (probabilities, unscaled scores), both fp32 [batch, num_q_heads, max_seq_len], 0 beyond the length."""
    batch, _, num_q_heads, head_dim = q.shape
    max_seq_len, num_kv_heads = k_cache.shape[1:3]
    keys = format_of(kv_format).dequantize(k_cache, head_dim, torch.float32)
    heads = q.float().view(batch, num_kv_heads, num_q_heads // num_kv_heads, head_dim)
    scores = torch.einsum("bkgd,btkd->bkgt", heads, keys).flatten(1, 2)
    beyond = (torch.arange(max_seq_len, device=q.device) >= seq_lens[:, None]).unsqueeze(1)
    probabilities = (scores * softmax_scale).masked_fill(beyond, -torch.inf).softmax(dim=-1)
    return probabilities.masked_fill(beyond, 0), scores.masked_fill(beyond, 0)
