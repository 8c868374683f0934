"""What a call of decode attention may look like; errors name the argument, what came and what is wanted."""

import math

import torch

from cute_kernels.attention.tiles import HEAD_DIMS
from cute_kernels.kv_formats import KvFormat, format_of

Q_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
MAX_BATCH = 65535  # the grid's third dimension
MAX_SPLITS = 65535  # times the tokens of a tile, they fit 32 bits
MAX_TOKENS = 2**31 - 2**16  # of a request: rounded up to whole tiles, they fit 32 bits


def check_call(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    kv_format: str,
    num_splits: int | None,
    out: torch.Tensor | None,
) -> KvFormat:
    """Raises TypeError or ValueError unless the arguments describe a decode step; returns the format.

    Looks at shapes, dtypes, strides and devices only: nothing here waits for a GPU.
    """
    form = format_of(kv_format)
    tensors = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "seq_lens": seq_lens}
    if out is not None:
        tensors["out"] = out
    check_tensors(**tensors)
    for name, tensor in tensors.items():
        _check_tensor(name, tensor, q.device)
    _check_query(q, kv_format, form)
    batch, _, num_q_heads, head_dim = q.shape
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        _check_cache(name, cache, batch, head_dim, kv_format, form)
    if v_cache.shape != k_cache.shape:
        raise ValueError(f"v_cache: got shape {_shape(v_cache)}, want that of k_cache, {_shape(k_cache)}")
    num_kv_heads = k_cache.shape[2]
    if num_q_heads % num_kv_heads:
        raise ValueError(f"q: got {num_q_heads} query heads, want a multiple of the cache's {num_kv_heads} KV heads")
    if seq_lens.dtype != torch.int32:
        raise TypeError(f"seq_lens: got dtype {seq_lens.dtype}, want torch.int32")
    if seq_lens.shape != (batch,):
        raise ValueError(f"seq_lens: got shape {_shape(seq_lens)}, want [{batch}], the batch of q")
    if num_splits is not None and (
        not isinstance(num_splits, int) or isinstance(num_splits, bool) or not 1 <= num_splits <= MAX_SPLITS
    ):
        raise ValueError(f"num_splits: got {num_splits!r}, want None or an int from 1 to {MAX_SPLITS}")
    if out is not None:
        check_out(out, q)
    return form


def check_tensors(**tensors: object) -> None:
    """Raises TypeError naming the first argument that is no tensor."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name}: got {type(tensor).__name__}, want a torch.Tensor")


def check_out(out: torch.Tensor, q: torch.Tensor) -> None:
    """Raises TypeError or ValueError unless ``out`` can take the result for ``q``."""
    check_tensors(out=out)
    if out.dtype != q.dtype:
        raise TypeError(f"out: got dtype {out.dtype}, want {q.dtype}, that of q")
    if out.shape != q.shape:
        raise ValueError(f"out: got shape {_shape(out)}, want {_shape(q)}, that of q")


def check_scale(softmax_scale: float | None) -> None:
    """Raises TypeError or ValueError unless the scale is None or a positive finite number.

    The kernel masks scores with -inf before it scales them: times zero or a negative number that would count.
    """
    if softmax_scale is None:
        return
    if not isinstance(softmax_scale, (int, float)):
        raise TypeError(f"softmax_scale: got {type(softmax_scale).__name__}, want None or a number")
    if not 0 < softmax_scale < math.inf:
        raise ValueError(f"softmax_scale: got {softmax_scale}, want None or a positive finite number")


def _check_tensor(name: str, tensor: torch.Tensor, device: torch.device) -> None:
    if tensor.device != device:
        raise ValueError(f"{name}: got a tensor on {tensor.device}, want it on {device}, where q is")
    if not tensor.is_contiguous():
        raise ValueError(f"{name}: got strides {tensor.stride()} for shape {_shape(tensor)}, want a contiguous tensor")


def _check_query(q: torch.Tensor, kv_format: str, form: KvFormat) -> None:
    if q.dim() != 4:
        raise ValueError(f"q: got {q.dim()} dimensions, want 4: [batch, q_len, num_q_heads, head_dim]")
    if q.dtype not in Q_DTYPES:
        raise TypeError(f"q: got dtype {q.dtype}, want torch.bfloat16 or torch.float16")
    if form.cache_dtype in Q_DTYPES and form.cache_dtype != q.dtype:
        raise TypeError(f"q: got dtype {q.dtype}, want {form.cache_dtype}, that of a {kv_format} cache")
    if q.shape[1] != 1:
        raise ValueError(f"q: got q_len {q.shape[1]}, want 1")
    if q.shape[3] not in HEAD_DIMS:
        raise ValueError(f"q: got head_dim {q.shape[3]}, want one of {', '.join(map(str, HEAD_DIMS))}")
    if q.shape[0] > MAX_BATCH:
        raise ValueError(f"q: got a batch of {q.shape[0]}, want at most {MAX_BATCH}")
    if q.shape[2] == 0:
        raise ValueError("q: got no query heads, want at least one per KV head")


def _check_cache(name: str, cache: torch.Tensor, batch: int, head_dim: int, kv_format: str, form: KvFormat) -> None:
    if cache.dim() != 4:
        raise ValueError(f"{name}: got {cache.dim()} dimensions, want 4: [batch, max_seq_len, num_kv_heads, row]")
    if cache.dtype not in form.cache_dtypes:
        raise TypeError(f"{name}: got dtype {cache.dtype}, want {form.cache_dtype} for {kv_format}")
    if cache.shape[0] != batch:
        raise ValueError(f"{name}: got a batch of {cache.shape[0]}, want {batch}, that of q")
    row = form.row_elements(head_dim)
    if cache.shape[3] != row:
        raise ValueError(
            f"{name}: got rows of {cache.shape[3]} elements, want {row} for {kv_format} at head_dim {head_dim}"
        )
    if cache.shape[2] == 0:
        raise ValueError(f"{name}: got no KV heads, want at least 1")
    if cache.shape[1] > MAX_TOKENS:
        raise ValueError(f"{name}: got {cache.shape[1]} tokens a request, want at most {MAX_TOKENS}")
    if cache.shape[1] * cache.shape[2] * form.row_bytes(head_dim) >= 2**40:
        raise ValueError(f"{name}: got {_shape(cache)}, want less than 2**40 bytes a request")


def check_lengths(seq_lens: torch.Tensor, max_seq_len: int) -> None:
    """Raises ValueError if a length is negative or longer than the cache. Waits for the device."""
    if seq_lens.numel() == 0:
        return
    low, high = (int(value) for value in torch.aminmax(seq_lens))
    if low < 0 or high > max_seq_len:
        raise ValueError(f"seq_lens: got lengths from {low} to {high}, want 0 to {max_seq_len}, the cache's tokens")


def _shape(tensor: torch.Tensor) -> list[int]:
    return list(tensor.shape)
