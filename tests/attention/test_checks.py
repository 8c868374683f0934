"""Bad input: the error names the argument, what came and what is wanted."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cute_kernels import decode_attention
from cute_kernels.attention import decode_attention_splits
from cute_kernels.attention.checks import MAX_BATCH, MAX_SPLITS, MAX_TOKENS, check_call, check_lengths


def arguments(kv_format: str = "int4_g4", **changes: Any) -> dict[str, Any]:
    """A call that is right, but for ``changes``: 3 requests, 12 tokens, 8 query heads on 2 KV heads of 128."""
    row, dtype = (80, torch.uint8) if kv_format == "int4_g4" else (128, torch.bfloat16)
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
    ("q-len", {"q": zeros(3, 2, 8, 128)}, ValueError, "q: got q_len 2, want 1"),
    ("head-dim", {"q": zeros(3, 1, 8, 72)}, ValueError, "q: got head_dim 72, want one of 64, 80, 96, 128, 192, 256"),
    ("row-width", {"k_cache": rows(3, 12, 2, 68)}, ValueError,
     "k_cache: got rows of 68 elements, want 80 for int4_g4 at head_dim 128"),
    ("k-batch", {"k_cache": rows(2, 12, 2, 80)}, ValueError, "k_cache: got a batch of 2, want 3, that of q"),
    ("v-batch", {"v_cache": rows(4, 12, 2, 80)}, ValueError, "v_cache: got a batch of 4, want 3, that of q"),
    ("v-tokens", {"v_cache": rows(3, 11, 2, 80)}, ValueError,
     r"v_cache: got shape \[3, 11, 2, 80\], want that of k_cache, \[3, 12, 2, 80\]"),
    ("head-ratio", {"q": zeros(3, 1, 7, 128)}, ValueError,
     "q: got 7 query heads, want a multiple of the cache's 2 KV heads"),
    ("no-q-heads", {"q": zeros(3, 1, 0, 128)}, ValueError, "q: got no query heads, want at least one per KV head"),
    ("no-kv-heads", {"k_cache": rows(3, 12, 0, 80)}, ValueError, "k_cache: got no KV heads, want at least 1"),
    ("lens-batch", {"seq_lens": zeros(2, dtype=torch.int32)}, ValueError,
     r"seq_lens: got shape \[2\], want \[3\], the batch of q"),
    ("out-shape", {"out": zeros(3, 8, 128)}, ValueError, r"out: got shape \[3, 8, 128\], want \[3, 1, 8, 128\]"),
    # strides
    ("q-strided", {"q": zeros(3, 1, 128, 8).transpose(2, 3)}, ValueError,
     r"q: got strides .* for shape \[3, 1, 8, 128\], want a contiguous tensor"),
    ("k-strided", {"k_cache": rows(3, 2, 12, 80).transpose(1, 2)}, ValueError, "k_cache: got strides"),
    ("v-strided", {"v_cache": rows(3, 24, 2, 80)[:, ::2]}, ValueError, "v_cache: got strides"),
    ("lens-strided", {"seq_lens": zeros(6, dtype=torch.int32)[::2]}, ValueError, "seq_lens: got strides"),
    ("out-strided", {"out": zeros(3, 1, 128, 8).transpose(2, 3)}, ValueError, "out: got strides"),
    # kinds of things
    ("q-list", {"q": [1.0]}, TypeError, r"q: got list, want a torch\.Tensor"),
    ("k-none", {"k_cache": None}, TypeError, r"k_cache: got NoneType, want a torch\.Tensor"),
    ("lens-list", {"seq_lens": [0, 5, 12]}, TypeError, r"seq_lens: got list, want a torch\.Tensor"),
    ("out-list", {"out": [0]}, TypeError, r"out: got list, want a torch\.Tensor"),
    ("format", {"kv_format": "int4"}, ValueError, "kv_format: got 'int4', want one of bf16, fp16, int4_g1, int4_g2"),
    ("splits-zero", {"num_splits": 0}, ValueError, f"num_splits: got 0, want None or an int from 1 to {MAX_SPLITS}"),
    ("splits-many", {"num_splits": MAX_SPLITS + 1}, ValueError, f"num_splits: got {MAX_SPLITS + 1}, want None"),
    ("splits-float", {"num_splits": 2.0}, ValueError, r"num_splits: got 2\.0, want None or an int"),
    ("splits-bool", {"num_splits": True}, ValueError, "num_splits: got True, want None or an int"),
    ("scale-zero", {"softmax_scale": 0.0}, ValueError,
     r"softmax_scale: got 0\.0, want None or a positive finite number"),
    ("scale-negative", {"softmax_scale": -0.1}, ValueError, r"softmax_scale: got -0\.1"),
    ("scale-nan", {"softmax_scale": float("nan")}, ValueError, "softmax_scale: got nan"),
    ("scale-inf", {"softmax_scale": float("inf")}, ValueError, "softmax_scale: got inf"),
    ("scale-str", {"softmax_scale": "0.1"}, TypeError, "softmax_scale: got str, want None or a number"),
    # devices
    ("k-elsewhere", {"k_cache": rows(3, 12, 2, 80).to("meta")}, ValueError,
     "k_cache: got a tensor on meta, want it on cpu, where q is"),
    ("lens-elsewhere", {"seq_lens": zeros(3, dtype=torch.int32).to("meta")}, ValueError,
     "seq_lens: got a tensor on meta, want it on cpu"),
    ("out-elsewhere", {"out": zeros(3, 1, 8, 128).to("meta")}, ValueError, "out: got a tensor on meta, want it on cpu"),
    # lengths
    ("too-long", {"seq_lens": torch.tensor([0, 13, 5], dtype=torch.int32)}, ValueError,
     "seq_lens: got lengths from 0 to 13, want 0 to 12, the cache's tokens"),
    ("negative", {"seq_lens": torch.tensor([-1, 3, 5], dtype=torch.int32)}, ValueError,
     "seq_lens: got lengths from -1 to 5, want 0 to 12"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "message"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_a_bad_argument_is_named_with_what_came_and_what_is_wanted(changes, error, message):
    with pytest.raises(error, match=message):
        decode_attention(**arguments(**changes))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [case[1:] for case in BAD if "out" not in case[1] and "num_splits" not in case[1]],
    ids=[case[0] for case in BAD if "out" not in case[1] and "num_splits" not in case[1]],
)
def test_the_call_that_shows_its_splits_checks_the_same(changes, error, message):
    with pytest.raises(error, match=message):
        decode_attention_splits(**arguments(**changes), num_splits=2)


def test_what_is_wrong_is_said_before_anything_is_written():
    out = torch.full((3, 1, 8, 128), torch.nan, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="seq_lens"):
        decode_attention(**arguments(seq_lens=torch.tensor([0, 13, 5], dtype=torch.int32), out=out))
    assert out.isnan().all()


def test_16_bit_caches_have_the_dtype_of_the_queries():
    with pytest.raises(TypeError, match=r"q: got dtype torch\.float16, want torch\.bfloat16, that of a bf16 cache"):
        decode_attention(**arguments("bf16", q=zeros(3, 1, 8, 128, dtype=torch.float16)))
    with pytest.raises(TypeError, match=r"k_cache: got dtype torch\.float16, want torch\.bfloat16 for bf16"):
        decode_attention(**arguments("bf16", k_cache=zeros(3, 12, 2, 128, dtype=torch.float16)))


def test_sizes_that_no_launch_can_index_are_refused():
    def huge(**changes: Any) -> None:
        tensors = arguments()
        batch, tokens = changes.get("batch", 3), changes.get("tokens", 12)
        cache = shape_only(batch, tokens, changes.get("heads", 2), 80, dtype=torch.uint8)
        q = shape_only(batch, 1, 2 * changes.get("heads", 2), 128, dtype=torch.bfloat16)
        check_call(q, cache, cache, shape_only(batch, dtype=torch.int32), tensors["kv_format"], None, None)

    huge()
    with pytest.raises(ValueError, match=f"q: got a batch of {MAX_BATCH + 1}, want at most {MAX_BATCH}"):
        huge(batch=MAX_BATCH + 1)
    with pytest.raises(ValueError, match=f"k_cache: got {MAX_TOKENS + 1} tokens a request, want at most {MAX_TOKENS}"):
        huge(tokens=MAX_TOKENS + 1)
    with pytest.raises(ValueError, match=r"k_cache: got \[3, 16777216, 1024, 80\], want less than 2\*\*40 bytes"):
        huge(tokens=1 << 24, heads=1024)


def test_lengths_from_zero_to_the_caches_tokens_are_right():
    check_lengths(torch.tensor([0, 12], dtype=torch.int32), 12)
    check_lengths(torch.zeros(0, dtype=torch.int32), 0)
    with pytest.raises(ValueError, match="seq_lens: got lengths from 1 to 1, want 0 to 0"):
        check_lengths(torch.tensor([1], dtype=torch.int32), 0)
