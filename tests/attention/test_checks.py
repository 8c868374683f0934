"""Bad input: the error names the argument, what came and what is wanted."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cute_kernels import decode_attention
from cute_kernels.attention import decode_attention_splits
from cute_kernels.attention.call import make_call
from cute_kernels.attention.checks import MAX_BATCH, MAX_Q_LEN, MAX_SPLITS, MAX_TOKENS, check_heads
from cute_kernels.attention.decode_config import RECIPROCAL_BITS
from cute_kernels.attention.device_values import check_device_values


def arguments(kv_format: Any = "int4_g4", **changes: Any) -> dict[str, Any]:
    """A call that is right, but for ``changes``: 3 requests, 12 tokens, 8 query heads on 2 KV heads of 128."""
    row, dtype = (128, torch.bfloat16) if kv_format == "bf16" else (80, torch.uint8)
    good = {
        "q": torch.zeros(3, 1, 8, 128, dtype=torch.bfloat16),
        "k_cache": torch.zeros(3, 12, 2, row, dtype=dtype),
        "v_cache": torch.zeros(3, 12, 2, row, dtype=dtype),
        "seq_lens": torch.tensor([0, 5, 12], dtype=torch.int32),
        "kv_format": kv_format,
    }
    return good | changes


def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def rows(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.uint8)


def shape_only(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Stands for a tensor too large to make."""
    return torch.empty(shape, dtype=dtype, device="meta")


BAD: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    # dtypes
    ("q-fp32", {"q": zeros(3, 1, 8, 128, dtype=torch.float32)}, TypeError,
     r"q: got dtype torch\.float32, want torch\.bfloat16 or torch\.float16"),
    ("k-int8", {"k_cache": zeros(3, 12, 2, 80, dtype=torch.int8)}, TypeError,
     r"k_cache: got dtype torch\.int8, want torch\.uint8 for int4_g4"),
    ("v-bf16", {"v_cache": zeros(3, 12, 2, 80)}, TypeError,
     r"v_cache: got dtype torch\.bfloat16, want torch\.uint8 for int4_g4"),
    ("lens-int64", {"seq_lens": torch.tensor([0, 5, 12])}, TypeError,
     r"seq_lens: got dtype torch\.int64, want torch\.int32"),
    ("out-fp16", {"out": zeros(3, 1, 8, 128, dtype=torch.float16)}, TypeError,
     r"out: got dtype torch\.float16, want torch\.bfloat16, that of q"),
    # ranks
    ("q-3d", {"q": zeros(3, 8, 128)}, ValueError, r"q: got 3 dimensions, want 4: \[batch, q_len, num_q_heads"),
    ("k-3d", {"k_cache": rows(3, 12, 80)}, ValueError, r"k_cache: got 3 dimensions, want 4: \[batch, max_seq_len"),
    ("lens-2d", {"seq_lens": zeros(3, 1, dtype=torch.int32)}, ValueError, r"seq_lens: got shape \[3, 1\], want \[3\]"),
    # shapes
    ("q-len", {"q": zeros(3, 17, 8, 128)}, ValueError, "q: got q_len 17, want 1 to 16"),
    ("no-queries", {"q": zeros(3, 0, 8, 128)}, ValueError, "q: got q_len 0, want 1 to 16"),
    ("head-dim", {"q": zeros(3, 1, 8, 100)}, ValueError, "q: got head_dim 100, want one of 64, 80, 96, 128, 192, 256"),
    ("head-dim-of-a-part", {"q": zeros(3, 1, 8, 128)[..., :100]}, ValueError, "q: got head_dim 100, want one of 64"),
    ("row-width", {"k_cache": rows(3, 12, 2, 68)}, ValueError,
     "k_cache: got rows of 68 elements, want 80 for int4_g4 at head_dim 128"),
    ("v-row-width", {"v_cache": rows(3, 12, 2, 81)}, ValueError,
     "v_cache: got rows of 81 elements, want one of 48, 56, 64, 80, 112, 144, 272 for int4_g4 at head_dim 64, "),
    ("k-batch", {"k_cache": rows(2, 12, 2, 80)}, ValueError, "k_cache: got a batch of 2, want 3, that of q"),
    ("v-batch", {"v_cache": rows(4, 12, 2, 80)}, ValueError, "v_cache: got a batch of 4, want 3, that of q"),
    ("v-tokens", {"v_cache": rows(3, 11, 2, 80)}, ValueError,
     r"v_cache: got shape \[3, 11, 2, 80\], want that of k_cache, \[3, 12, 2, 80\], in all but the last"),
    ("head-ratio", {"q": zeros(3, 1, 7, 128)}, ValueError,
     "q: got 7 query heads, want a multiple of the cache's 2 KV heads"),
    ("no-q-heads", {"q": zeros(3, 1, 0, 128)}, ValueError, "q: got no query heads, want at least one per KV head"),
    ("no-kv-heads", {"k_cache": rows(3, 12, 0, 80)}, ValueError, "k_cache: got no KV heads, want at least 1"),
    ("lens-batch", {"seq_lens": zeros(2, dtype=torch.int32)}, ValueError,
     r"seq_lens: got shape \[2\], want \[3\], the batch of q"),
    ("out-shape", {"out": zeros(3, 8, 128)}, ValueError, r"out: got shape \[3, 8, 128\], want \[3, 1, 8, 128\]"),
    # strides
    ("q-strided", {"q": zeros(3, 1, 128, 8).transpose(2, 3)}, ValueError,
     r"q: got strides .* for shape \[3, 1, 8, 128\], want the last two dimensions contiguous"),
    ("q-heads-apart", {"q": zeros(3, 1, 16, 128)[:, :, ::2]}, ValueError,
     r"q: got strides \(2048, 2048, 256, 1\) for shape \[3, 1, 8, 128\], want the last two dimensions contiguous"),
    ("q-off-vectors", {"q": zeros(3, 1028)[:, None, :1024].unflatten(2, (8, 128))}, ValueError,
     r"q: got strides \(1028, .*\) for shape \[3, 1, 8, 128\], want requests and queries on multiples of 16 bytes"),
    ("k-rows-apart", {"k_cache": rows(3, 12, 2, 160)[..., ::2]}, ValueError,
     r"k_cache: got strides \(3840, 320, 160, 2\) for shape \[3, 12, 2, 80\] \[batch, max_seq_len, num_kv_heads, "
     r"row\], want rows contiguous: a last stride of 1"),
    ("v-off-words", {"v_cache": rows(3, 12, 2, 82)[..., :80]}, ValueError,
     r"v_cache: got strides .*, want rows of int4_g4 on multiples of 4 bytes"),
    ("v-off-vectors", {"kv_format": "bf16", "k_cache": zeros(3, 12, 2, 128),
     "v_cache": zeros(3, 12, 2, 132)[..., :128]}, ValueError,
     r"v_cache: got strides .*, want rows of bf16 on multiples of 16 bytes"),
    ("k-overlaps", {"k_cache": rows(1, 12, 2, 80).expand(3, 12, 2, 80)}, ValueError,
     r"k_cache: got strides \(0, 160, 80, 1\) .*, want rows that do not overlap"),
    ("lens-strided", {"seq_lens": zeros(6, dtype=torch.int32)[::2]}, ValueError, "seq_lens: got strides"),
    ("out-strided", {"out": zeros(3, 1, 128, 8).transpose(2, 3)}, ValueError, "out: got strides"),
    # kinds of things
    ("q-list", {"q": [1.0]}, TypeError, r"q: got list, want a torch\.Tensor"),
    ("k-none", {"k_cache": None}, TypeError, r"k_cache: got NoneType, want a torch\.Tensor"),
    ("lens-list", {"seq_lens": [0, 5, 12]}, TypeError, r"seq_lens: got list, want a torch\.Tensor"),
    ("out-list", {"out": [0]}, TypeError, r"out: got list, want a torch\.Tensor"),
    ("format-number", {"kv_format": 4}, TypeError, "kv_format: got 4, want the name of a format or a pair of names"),
    ("format-three", {"kv_format": ["bf16"] * 3}, TypeError, r"kv_format: got \[.*\], want the name of a format"),
    ("format-in-pair", {"kv_format": ("int4_g4", "int5")}, ValueError, "kv_format: got 'int5', want one of bf16"),
    ("format", {"kv_format": "int5"}, ValueError, "kv_format: got 'int5', want one of bf16, fp16, int4_g1, int4_g2"),
    ("splits-zero", {"num_splits": 0}, ValueError, f"num_splits: got 0, want None or an int from 1 to {MAX_SPLITS}"),
    ("splits-many", {"num_splits": MAX_SPLITS + 1}, ValueError, f"num_splits: got {MAX_SPLITS + 1}, want None"),
    ("splits-float", {"num_splits": 2.0}, ValueError, r"num_splits: got 2\.0, want None or an int"),
    ("splits-bool", {"num_splits": True}, ValueError, "num_splits: got True, want None or an int"),
    ("scale-zero", {"softmax_scale": 0.0}, ValueError,
     r"softmax_scale: got 0\.0, want None or a positive finite number"),
    ("scale-negative", {"softmax_scale": -0.1}, ValueError, r"softmax_scale: got -0\.1"),
    ("scale-nan", {"softmax_scale": float("nan")}, ValueError, "softmax_scale: got nan"),
    ("scale-inf", {"softmax_scale": float("inf")}, ValueError, "softmax_scale: got inf"),
    ("scale-bool", {"softmax_scale": True}, TypeError, "softmax_scale: got bool, want None or a number"),
    ("scale-huge", {"softmax_scale": 10**400}, ValueError, "softmax_scale: got 10+, want None or a positive finite"),
    ("scale-of-64-bits", {"softmax_scale": 1e39}, ValueError, r"softmax_scale: got 1e\+39, want None .*, from 2"),
    ("scale-subnormal", {"softmax_scale": 1e-39}, ValueError, "softmax_scale: got 1e-39, want None"),
    ("scale-str", {"softmax_scale": "0.1"}, TypeError, "softmax_scale: got str, want None or a number"),
    # devices
    ("k-elsewhere", {"k_cache": rows(3, 12, 2, 80).to("meta")}, ValueError,
     "k_cache: got a tensor on meta, want it on cpu, where q is"),
    ("lens-elsewhere", {"seq_lens": zeros(3, dtype=torch.int32).to("meta")}, ValueError,
     "seq_lens: got a tensor on meta, want it on cpu"),
    ("out-elsewhere", {"out": zeros(3, 1, 8, 128).to("meta")}, ValueError, "out: got a tensor on meta, want it on cpu"),
    # lengths
    ("too-long", {"seq_lens": torch.tensor([0, 13, 5], dtype=torch.int32)}, ValueError,
     "seq_lens: got 13 for request 1, want 0 to 12, the cache's tokens"),
    ("negative", {"seq_lens": torch.tensor([-1, 3, 5], dtype=torch.int32)}, ValueError,
     "seq_lens: got -1 for request 0, want 0 to 12"),
]  # fmt: skip


PAGES: dict[str, Any] = {
    "k_cache": rows(9, 16, 2, 80),
    "v_cache": rows(9, 16, 2, 80),
    "block_table": torch.arange(6, dtype=torch.int32).reshape(3, 2),
}
TABLE: torch.Tensor = PAGES["block_table"]
BY_HEAD = torch.ones(2)

BAD_OPTIONS: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    # pages and layouts
    ("table-int64", PAGES | {"block_table": TABLE.long()}, TypeError,
     r"block_table: got dtype torch\.int64, want torch\.int32"),
    ("table-1d", PAGES | {"block_table": TABLE[0]}, ValueError,
     r"block_table: got shape \[2\], want \[3, max_pages\], a row for each request of q"),
    ("table-batch", PAGES | {"block_table": TABLE[:2]}, ValueError,
     r"block_table: got shape \[2, 2\], want \[3, max_pages\]"),
    ("table-strided", PAGES | {"block_table": TABLE.reshape(2, 3).T}, ValueError,
     r"block_table: got strides \(1, 3\), want columns side by side"),
    ("table-list", PAGES | {"block_table": TABLE.tolist()}, TypeError, r"block_table: got list, want a torch\.Tensor"),
    ("table-elsewhere", PAGES | {"block_table": TABLE.to("meta")}, ValueError,
     "block_table: got a tensor on meta, want it on cpu, where q is"),
    ("page-size", PAGES | {"k_cache": rows(9, 24, 2, 80), "v_cache": rows(9, 24, 2, 80)}, ValueError,
     "k_cache: got pages of 24 tokens, want a multiple of 16 from 16 to 256"),
    ("page-too-large", PAGES | {"k_cache": rows(9, 272, 2, 80), "v_cache": rows(9, 272, 2, 80)}, ValueError,
     "k_cache: got pages of 272 tokens, want a multiple of 16 from 16 to 256"),
    ("page-3d", PAGES | {"k_cache": rows(9, 16, 160)}, ValueError,
     r"k_cache: got 3 dimensions, want 4: \[num_pages, page_size, num_kv_heads, row\]"),
    ("page-3d-hnd", PAGES | {"k_cache": rows(9, 16, 160), "cache_layout": "HND"}, ValueError,
     r"k_cache: got 3 dimensions, want 4: \[num_pages, num_kv_heads, page_size, row\]"),
    ("no-pages", PAGES | {"k_cache": rows(0, 16, 2, 80), "v_cache": rows(0, 16, 2, 80)}, ValueError,
     "k_cache: got no pages, want at least one"),
    ("page-count", PAGES | {"v_cache": rows(8, 16, 2, 80)}, ValueError,
     r"v_cache: got shape \[8, 16, 2, 80\], want that of k_cache"),
    ("layout", {"cache_layout": "NDH"}, ValueError, "cache_layout: got 'NDH', want 'NHD' or 'HND'"),
    ("layout-wrong", {"cache_layout": "HND", "q": zeros(3, 1, 8, 128)}, ValueError,
     "q: got 8 query heads, want a multiple of the cache's 12 KV heads"),
    ("too-long-for-pages", PAGES | {"seq_lens": torch.tensor([0, 5, 33], dtype=torch.int32)}, ValueError,
     "seq_lens: got 33 for request 2, want 0 to 32, the tokens of a row of block_table"),
    ("unmapped", PAGES | {"block_table": torch.tensor([[0, 1], [-1, 3], [4, 5]], dtype=torch.int32)}, ValueError,
     "block_table: got page -1 for request 1 at position 0, want 0 to 8, the cache's pages"),
    ("beyond", PAGES | {"block_table": torch.tensor([[9, 9], [2, 3], [9, 5]], dtype=torch.int32)}, ValueError,
     "block_table: got page 9 for request 2 at position 0, want 0 to 8, the cache's pages"),
    # scales beside the cache
    ("scale-not-wanted", {"k_scale": torch.ones(2)}, ValueError,
     r"k_scale: got a tensor of shape \[2\], want None: int4_g4 has no such scale"),
    ("scale-missing", {"k_cache": rows(3, 12, 2, 128), "kv_format": ("int8_tensor", "int4_g4")}, ValueError,
     r"k_scale: got None, want torch\.float32 \[\] or \[1\] for int8_tensor"),
    ("scale-of-v-missing", {"v_cache": rows(3, 12, 2, 128), "kv_format": ("int4_g4", "e4m3_head")}, ValueError,
     r"v_scale: got None, want torch\.float32 \[2\] or \[2, 1\] for e4m3_head"),
    ("scale-shape", {"v_cache": rows(3, 12, 2, 128), "kv_format": ("int4_g4", "int8_head"), "v_scale": torch.ones(3)},
     ValueError, r"v_scale: got shape \[3\], want \[2\] or \[2, 1\] for int8_head"),
    ("scale-channels", {"v_cache": rows(3, 12, 2, 64), "kv_format": ("int4_g4", "int8_channel"),
     "v_scale": torch.ones(2, 128)}, ValueError, r"v_scale: got shape \[2, 128\], want \[2, 64\] for int8_channel"),
    ("scale-bf16", {"k_cache": rows(3, 12, 2, 128), "kv_format": ("int8_head", "int4_g4"), "k_scale": BY_HEAD.half()},
     TypeError, r"k_scale: got dtype torch\.float16, want torch\.float32"),
    ("scale-number", {"k_cache": rows(3, 12, 2, 128), "kv_format": ("int8_tensor", "int4_g4"), "k_scale": 0.1},
     TypeError, r"k_scale: got float, want a torch\.Tensor"),
    ("scale-elsewhere", {"k_cache": rows(3, 12, 2, 128), "kv_format": ("int8_head", "int4_g4"),
     "k_scale": BY_HEAD.to("meta")}, ValueError, "k_scale: got a tensor on meta, want it on cpu"),
    # scores
    ("causal", {"causal": 1}, TypeError, "causal: got 1, want True or False"),
    ("window-zero", {"window_size": 0}, ValueError, "window_size: got 0, want None or an int of at least 1"),
    ("window-float", {"window_size": 2.5}, ValueError, r"window_size: got 2\.5, want None or an int"),
    ("window-bool", {"window_size": True}, ValueError, "window_size: got True, want None or an int"),
    ("cap-zero", {"softcap": 0.0}, ValueError, r"softcap: got 0\.0, want None or a positive finite number"),
    ("cap-negative", {"softcap": -1}, ValueError, "softcap: got -1, want None"),
    ("cap-nan", {"softcap": float("nan")}, ValueError, "softcap: got nan"),
    ("cap-of-64-bits", {"softcap": 1e39}, ValueError, r"softcap: got 1e\+39, want None"),
    ("cap-far-above-scores", {"softcap": 1e5}, ValueError, r"softcap: got 100000\.0, want None .* to 32768"),
    ("cap-str", {"softcap": "30"}, TypeError, "softcap: got str, want None or a number"),
    ("sinks-bf16", {"sinks": zeros(8)}, TypeError, r"sinks: got dtype torch\.bfloat16, want torch\.float32"),
    ("sinks-kv-heads", {"sinks": torch.zeros(2)}, ValueError,
     r"sinks: got shape \[2\], want \[8\], one for each query head"),
    ("sinks-strided", {"sinks": torch.zeros(16)[::2]}, ValueError, "sinks: got strides"),
    ("sinks-list", {"sinks": [0.0] * 8}, TypeError, r"sinks: got list, want a torch\.Tensor"),
    ("sinks-elsewhere", {"sinks": torch.zeros(8, device="meta")}, ValueError, "sinks: got a tensor on meta"),
    ("slopes-fp64", {"alibi_slopes": torch.zeros(8).double()}, TypeError, r"alibi_slopes: got dtype torch\.float64"),
    ("slopes-shape", {"alibi_slopes": torch.zeros(8, 1)}, ValueError,
     r"alibi_slopes: got shape \[8, 1\], want \[8\], one for each query head"),
    ("bias-fp16", {"attn_bias": torch.zeros(12).half()}, TypeError,
     r"attn_bias: got dtype torch\.float16, want torch\.float32 or torch\.bfloat16"),
    ("bias-keys", {"attn_bias": torch.zeros(13)}, ValueError,
     r"attn_bias: got shape \[13\], want one that broadcasts to .*max_seq_len\], here \[3, 1, 8, 12\]"),
    ("bias-5d", {"attn_bias": torch.zeros(1, 1, 1, 1, 12)}, ValueError,
     r"attn_bias: got shape \[1, 1, 1, 1, 12\], want"),
    ("bias-of-pages", PAGES | {"attn_bias": torch.zeros(16)}, ValueError,
     r"attn_bias: got shape \[16\], want one that broadcasts to .*, here \[3, 1, 8, 32\]"),
    ("bias-bool", {"attn_bias": torch.ones(12, dtype=torch.bool)}, TypeError, r"attn_bias: got dtype torch\.bool"),
    ("out-of-k", {"v_cache": rows(3, 12, 2, 48), "out": zeros(3, 1, 8, 128)}, ValueError,
     r"out: got shape \[3, 1, 8, 128\], want \[3, 1, 8, 64\]: q's, with the head_dim of V"),
]  # fmt: skip
ALL_BAD = BAD + BAD_OPTIONS
OF_SPLITS = [case for case in BAD if "out" not in case[1] and "num_splits" not in case[1]]


@pytest.mark.parametrize(("changes", "error", "message"), [case[1:] for case in ALL_BAD], ids=[c[0] for c in ALL_BAD])
def test_a_bad_argument_is_named_with_what_came_and_what_is_wanted(changes, error, message):
    with pytest.raises(error, match=f"^{message}"):
        decode_attention(**arguments(**changes))


@pytest.mark.parametrize(
    ("changes", "error", "message"), [case[1:] for case in OF_SPLITS], ids=[c[0] for c in OF_SPLITS]
)
def test_the_call_that_shows_its_splits_checks_the_same(changes, error, message):
    with pytest.raises(error, match=message):
        decode_attention_splits(**arguments(**changes), num_splits=2)


def test_the_calls_that_the_cases_above_spoil_are_right():
    decode_attention(**arguments())
    decode_attention(**arguments(**PAGES))
    decode_attention(**arguments(k_cache=rows(3, 12, 2, 128), kv_format=("int8_head", "int4_g4"), k_scale=BY_HEAD))


def test_what_is_wrong_is_said_before_anything_is_written():
    out = torch.full((3, 1, 8, 128), torch.nan, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="seq_lens"):
        decode_attention(**arguments(seq_lens=torch.tensor([0, 13, 5], dtype=torch.int32), out=out))
    assert out.isnan().all()


def test_blocks_and_tokens_lie_where_kernels_can_reach_them():
    for strides in ((2**40, 160, 80, 1), (2**40 - 16, 2**31, 80, 1)):
        given: dict[str, Any] = {name: x.to("meta") for name, x in arguments().items() if isinstance(x, torch.Tensor)}
        given["k_cache"] = torch.empty_strided((3, 12, 2, 80), strides, dtype=torch.uint8, device="meta")
        with pytest.raises(ValueError, match=r"k_cache: got .* blocks less than 2\*\*40 bytes apart, .* than 2\*\*31"):
            make_call(**given, kv_format="int4_g4")


def test_16_bit_caches_have_the_dtype_of_the_queries():
    half = zeros(3, 1, 8, 128, dtype=torch.float16)
    for kv_format in ("bf16", ("bf16", "int4_g4"), ("int4_g4", "bf16")):
        with pytest.raises(TypeError, match=r"q: got dtype torch\.float16, want torch\.bfloat16, that of a bf16 cache"):
            spoilt: dict[str, Any] = arguments("bf16", q=half) | {"kv_format": kv_format}
            decode_attention(**spoilt)
    with pytest.raises(TypeError, match=r"k_cache: got dtype torch\.float16, want torch\.bfloat16 for bf16"):
        decode_attention(**arguments("bf16", k_cache=zeros(3, 12, 2, 128, dtype=torch.float16)))


def test_bare_codes_may_come_in_their_own_dtype():
    codes = torch.zeros(3, 12, 2, 128, dtype=torch.int8)
    good = {"k_cache": codes, "v_cache": codes, "k_scale": torch.ones(()), "v_scale": torch.ones(1)}
    decode_attention(**arguments("int8_tensor", **good))
    with pytest.raises(
        TypeError, match=r"v_cache: got dtype torch\.int8, want torch\.uint8 or torch\.float8_e5m2 for e5m2"
    ):
        decode_attention(**arguments(("int8_tensor", "e5m2"), **good))


def test_sizes_that_no_launch_can_index_are_refused():
    def huge(**changes: Any) -> None:
        batch, tokens = changes.get("batch", 3), changes.get("tokens", 12)
        cache = shape_only(batch, tokens, changes.get("heads", 2), 80, dtype=torch.uint8)
        q = shape_only(batch, 1, 2 * changes.get("heads", 2), 128, dtype=torch.bfloat16)
        make_call(q, cache, cache, shape_only(batch, dtype=torch.int32), kv_format="int4_g4")

    huge()
    with pytest.raises(ValueError, match=f"q: got a batch of {MAX_BATCH + 1}, want at most {MAX_BATCH}"):
        huge(batch=MAX_BATCH + 1)
    with pytest.raises(ValueError, match=f"k_cache: got {MAX_TOKENS + 1} tokens a request, want at most {MAX_TOKENS}"):
        huge(tokens=MAX_TOKENS + 1)
    with pytest.raises(ValueError, match=r"k_cache: got \[3, 16777216, 1024, 80\], want less than 2\*\*40 bytes"):
        huge(tokens=1 << 24, heads=1024)
    pages = shape_only(4, 256, 2, 80, dtype=torch.uint8)
    table = shape_only(1, MAX_TOKENS // 256 + 1, dtype=torch.int32)
    with pytest.raises(ValueError, match=f"block_table: got {MAX_TOKENS + 256} tokens a request, want at most"):
        make_call(
            shape_only(1, 1, 4, 128, dtype=torch.bfloat16),
            pages,
            pages,
            shape_only(1, dtype=torch.int32),
            kv_format="int4_g4",
            block_table=table,
        )


def divides(last: int, number: int) -> bool:
    """Whether the kernel finds last // number: it multiplies int32 and shifts. ``last`` is the greatest it divides."""
    product = last * -(-(1 << RECIPROCAL_BITS) // number)
    return product < 1 << 31 and product >> RECIPROCAL_BITS == last // number


def test_heads_that_decode_attention_cannot_number_are_refused():
    """Rows of queries, heads and CTAs are divided by multiplying. Of all numbers below a multiple of n the last goes
    wrong first, so the greatest that a call has decides. The bound also refuses some calls that would be right."""
    assert not divides(16 * 266 - 1, 266) and all(divides(16 * group - 1, group) for group in range(1, 266))
    with pytest.raises(ValueError, match=r"q: got q_len 16, 266 query heads, 1 KV heads, want q_len \*"):
        check_heads(16, 266, 1)
    with pytest.raises(ValueError, match="at most 2048 KV heads"):
        check_heads(1, 2049, 2049)
    check_heads(16, 256, 1)
    check_heads(1, 2048, 2048)
    for q_len in range(1, MAX_Q_LEN + 1):
        for num_kv_heads in (1, 2, 3, 5, 8, 24, 64, 100, 128, 777, 1023, 2047, 2048):
            most = int(((1 << RECIPROCAL_BITS) / (q_len * num_kv_heads)) ** 0.5)
            for group in range(1, most + 1):
                check_heads(q_len, num_kv_heads * group, num_kv_heads)
                assert divides(q_len * group - 1, group) and divides(num_kv_heads * group - 1, group)
                for rows in (8, 16, 32, 64):
                    ctas = -(-q_len * group // rows)
                    assert divides(num_kv_heads * ctas - 1, ctas), (q_len, num_kv_heads, group, rows)


def test_lengths_from_zero_to_the_caches_tokens_are_right():
    for lengths in ([0, 5, 12], [12, 12, 12], [0, 0, 0]):
        check_device_values(make_call(**arguments(seq_lens=torch.tensor(lengths, dtype=torch.int32))))
    none = torch.zeros(0, dtype=torch.int32)
    caches = {"k_cache": rows(0, 0, 2, 80), "v_cache": rows(0, 0, 2, 80)}
    check_device_values(make_call(**arguments(q=zeros(0, 1, 8, 128), seq_lens=none, **caches)))


def test_pages_before_the_window_and_past_the_length_are_not_looked_at():
    table = torch.tensor([[-1, 0, -1], [2, 3, 99], [-1, -1, -1]], dtype=torch.int32)
    good = arguments(**PAGES | {"block_table": table, "seq_lens": torch.tensor([32, 17, 0], dtype=torch.int32)})
    check_device_values(make_call(**good, window_size=16))
    with pytest.raises(ValueError, match="block_table: got page -1 for request 0 at position 0, want 0 to 8"):
        check_device_values(make_call(**good, window_size=17))
