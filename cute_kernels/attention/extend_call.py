"""A call of extend attention as one object: checked, and every option in the form that kernel and reference take."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from cute_kernels.arguments import (
    check_apart,
    check_contiguous,
    check_optional_count,
    check_optional_positive,
    check_place,
    check_tensors,
    check_vector,
    overlaps,
    shape_of,
    strides_of,
)
from cute_kernels.attention import call as attention_call
from cute_kernels.attention import checks
from cute_kernels.attention.call import AttentionCall, Bias, CacheOperand
from cute_kernels.attention.extend_config import MAX_SPLITS
from cute_kernels.attention.extend_policies import HEAD_DIMS, cannot_multiply_fp8, cannot_read, cannot_unpack
from cute_kernels.formats.kv import KvFormat, format_of
from cute_kernels.formats.kv import names as format_names
from cute_kernels.formats.scores import tensors_of
from cute_kernels.formats.scores.features import Features
from cute_kernels.names import CacheLayout
from cute_kernels.runtime.plans import ALIGNMENT

PIECE = ALIGNMENT // 2  # elements: what copies take of a row at once
MAX_ROW_STRIDE = 2**22  # elements from a token to the next one, beside a cache: those of a tile fit 32 bits
MAX_ROWS = 2**31 - 2**16  # queries times heads: rounded up to whole work tiles, they fit 32 bits


@dataclass(frozen=True, eq=False)
class ExtendCall:
    """One checked call.

    Attributes:
        q: [total_q, num_q_heads, head_dim], a query's heads side by side.
        cu_seqlens_q: int32 [batch + 1]: request b has the queries from the b-th to the one before the (b + 1)-th.
        base: everything else, as a call of decode attention has it; its q is there for its shape alone.
        new: K and V of the queries' own tokens, [total_q, num_kv_heads, head_dim] in q's dtype, rows contiguous; None
            where they come from the cache.
        tree_mask: int32 [total_q, words], contiguous: which of its request's new tokens each query sees; None where
            their order says so.
        num_splits, sm_margin, unpack, max_seq_len, fp8_products: as given.
        out: where the result goes, contiguous, as q; None for a new one.
    """

    q: torch.Tensor
    cu_seqlens_q: torch.Tensor
    base: AttentionCall
    new: tuple[torch.Tensor, torch.Tensor] | None
    out: torch.Tensor | None
    tree_mask: torch.Tensor | None = None
    num_splits: int | None = None
    sm_margin: int = 0
    unpack: bool | None = None
    max_seq_len: int | None = None
    fp8_products: bool = False

    @property
    def batch(self) -> int:
        return self.base.batch

    @property
    def features(self) -> Features:
        """What decides the compiled variant besides shapes and formats."""
        return replace(self.base.features, queries=False, causal=self.base.causal and self.tree_mask is None)

    def requests(self) -> Iterator[tuple[slice, AttentionCall]]:
        """(queries, the call of one request alone) of every request that has queries; waits for the device."""
        ends = self.cu_seqlens_q.tolist()
        for request in range(self.batch):
            own = slice(ends[request], ends[request + 1])
            if own.start < own.stop:
                yield own, self._request(request, own)

    def _request(self, request: int, own: slice) -> AttentionCall:
        base, part = self.base, slice(request, request + 1)
        if base.block_table is not None:
            table, k, v = base.block_table[part], base.k, base.v
        else:
            table, k, v = None, _part(base.k, part), _part(base.v, part)
        lengths = base.seq_lens[part]
        tensors = dict(base.score_tensors)
        for tensor in tensors_of(base.terms):
            if "batch" in tensor.shape:
                tensors[tensor.name] = tensors[tensor.name].narrow(tensor.shape.index("batch"), request, 1)
        request_call = replace(
            base,
            q=self.q[own].unsqueeze(0),
            k=k,
            v=v,
            seq_lens=lengths,
            block_table=table,
            out=None,
            score_tensors=tensors,
        )
        if self.tree_mask is None:
            return request_call
        return self._with_tree(request_call, own, int(lengths[0]) - (own.stop - own.start))

    def _with_tree(self, request_call: AttentionCall, own: slice, before: int) -> AttentionCall:
        """The same call with the tree's mask as a bias; before: tokens that come before the new ones."""
        assert self.tree_mask is not None
        room = request_call.max_seq_len
        seen = unpack_tree_mask(self.tree_mask[own], torch.arange(room, device=self.q.device) - before)
        bias = torch.zeros(seen.shape, device=self.q.device).masked_fill(~seen, -torch.inf)[None, :, None]
        shape = (1, own.stop - own.start, self.q.shape[1], room)
        return replace(request_call, causal=False, bias=Bias(bias, checks.check_bias(bias, shape)))

    def new_tokens(self, own: slice) -> AttentionCall:
        """The call of one request over its own queries' tokens alone, which are not in the cache."""
        assert self.new is not None
        base, count = self.base, own.stop - own.start
        form = format_of(checks.Q_DTYPES[self.q.dtype])
        k, v = (
            replace(operand, cache=rows[own].unsqueeze(0), form=form, scale=None)
            for operand, rows in zip((base.k, base.v), self.new, strict=True)
        )
        lengths = torch.tensor([count], dtype=torch.int32, device=self.q.device)
        newer = replace(
            base,
            q=self.q[own].unsqueeze(0),
            k=k,
            v=v,
            seq_lens=lengths,
            block_table=None,
            head_major=False,
            max_seq_len=count,
            page_size=count,
            num_blocks=1,
        )
        return newer if self.tree_mask is None else self._with_tree(newer, own, 0)


def unpack_tree_mask(words: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """bool [queries, tokens]: what int32 words [queries, words] say of new tokens; below 0 stand older ones, seen."""
    last = words.shape[1] * 32 - 1
    at = tokens.clamp(0, max(last, 0))
    bits = words[:, at // 32] >> (at % 32) & 1 if last >= 0 else words.new_zeros(len(words), len(tokens))
    return (tokens < 0) | ((tokens <= last) & (bits != 0))


def _part(operand: CacheOperand, part: slice) -> CacheOperand:
    return replace(operand, cache=operand.cache[part])


def make_call(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor,
    kv_format: object,
    block_table: torch.Tensor | None = None,
    cache_layout: CacheLayout = "NHD",
    softmax_scale: float | None = None,
    causal: bool = True,
    window_size: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    new_k: torch.Tensor | None = None,
    new_v: torch.Tensor | None = None,
    tree_mask: torch.Tensor | None = None,
    num_splits: int | None = None,
    sm_margin: int = 0,
    unpack: bool | None = None,
    max_seq_len: int | None = None,
    fp8_products: bool = False,
    score_options: Mapping[str, torch.Tensor] | None = None,
    out: torch.Tensor | None = None,
) -> ExtendCall:
    """Checks everything that can be said without waiting for a device; arguments as `extend_attention` has them.

    Raises:
        TypeError, ValueError: an argument does not fit; the message names it, what came and what is wanted.
    """
    forms = checks.check_formats(kv_format)
    for name, form in zip(checks.CACHES, forms, strict=True):
        if cannot_read(form) is not None:
            known = ", ".join(known for known in format_names() if cannot_read(format_of(known)) is None)
            raise ValueError(
                f"kv_format: got {form.name} for {name}, want one of those that extend attention reads: {known}"
            )
    if unpack is True:
        _check_unpack(forms)
    check_tensors(q=q, k_cache=k_cache, v_cache=v_cache, seq_lens=seq_lens, cu_seqlens_q=cu_seqlens_q)
    check_place("cu_seqlens_q", cu_seqlens_q, q.device)
    check_query(q)
    if seq_lens.dim() != 1:
        raise ValueError(f"seq_lens: got shape {shape_of(seq_lens)}, want [batch]")
    batch = seq_lens.shape[0]
    check_vector("cu_seqlens_q", cu_seqlens_q, torch.int32, batch + 1, "the batch of seq_lens and one")
    check_optional_count("window_size", window_size)
    check_optional_positive("softcap", softcap)
    check_optional_count("num_splits", num_splits, MAX_SPLITS)
    if type(sm_margin) is not int or sm_margin < 0:
        raise ValueError(f"sm_margin: got {sm_margin!r}, want a number of SMs from 0 on")
    if unpack is not None and type(unpack) is not bool:
        raise TypeError(f"unpack: got {unpack!r}, want None, True or False")
    check_optional_count("max_seq_len", max_seq_len)
    _check_fp8(fp8_products, forms, q.shape[2], unpack)
    base = attention_call.make_call(
        q.new_empty((batch, 1, *q.shape[1:])),
        k_cache,
        v_cache,
        seq_lens,
        kv_format=kv_format,
        softmax_scale=softmax_scale,
        block_table=block_table,
        cache_layout=cache_layout,
        k_scale=k_scale,
        v_scale=v_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
        score_options=score_options,
    )
    if base.terms:
        _check_score_options(base.terms, tree_mask=tree_mask, new_k=new_k, new_v=new_v)
    if base.v.head_dim != q.shape[2]:
        raise ValueError(f"v_cache: got rows of head_dim {base.v.head_dim}, want {q.shape[2]}, that of q")
    if out is not None:
        check_out(out, q)
        check_place("out", out, q.device)
        check_contiguous("out", out)
        read = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "seq_lens": seq_lens, "cu_seqlens_q": cu_seqlens_q}
        read |= {"block_table": block_table, "k_scale": k_scale, "v_scale": v_scale, "sinks": sinks, "new_k": new_k}
        read |= {"alibi_slopes": alibi_slopes, "new_v": new_v, "tree_mask": tree_mask, **(score_options or {})}
        check_apart("out", out, read)
    new = _check_new(new_k, new_v, q, base.num_kv_heads)
    if new is not None:
        base = replace(base, window=window_size)  # new tokens come on top of what the cache has room for
    if tree_mask is not None:
        _check_tree_mask(tree_mask, q, window_size=window_size, alibi_slopes=alibi_slopes)
    return ExtendCall(
        q,
        cu_seqlens_q,
        base,
        new,
        out,
        tree_mask,
        num_splits,
        sm_margin,
        unpack=unpack,
        max_seq_len=max_seq_len,
        fp8_products=fp8_products,
    )


def _check_unpack(forms: tuple[KvFormat, KvFormat]) -> None:
    """Raises ValueError where a cache is to be unpacked and cannot be."""
    reason = cannot_unpack(forms[0]) or cannot_unpack(forms[1])
    if forms[0].is_coded != forms[1].is_coded:
        reason = f"K in {forms[0].name} and V in {forms[1].name}, of which one is of 16 bits"
    if reason is not None:
        raise ValueError(f"unpack: got True, want None or False: {reason}")


def _check_fp8(asked_for: object, forms: tuple[KvFormat, KvFormat], head_dim: int, unpack: bool | None) -> None:
    """Raises TypeError or ValueError where products are to be of 8 bits and cannot be."""
    if type(asked_for) is not bool:
        raise TypeError(f"fp8_products: got {asked_for!r}, want True or False")
    if not asked_for:
        return
    if (reason := cannot_multiply_fp8(forms, head_dim)) is not None:
        raise ValueError(f"fp8_products: got True, want False: {reason}")
    if unpack is False:
        raise ValueError("unpack: got False beside fp8_products, want None or True: values have to be transposed first")


def _check_score_options(names: tuple[str, ...], **others: object) -> None:
    """Raises ValueError for registered options that a call with these ``others`` cannot have."""
    for tensor in tensors_of(names):
        if "q_len" in tensor.shape:
            raise ValueError(
                f"score_options: got {tensor.name!r}, [{', '.join(map(str, tensor.shape))}], want tensors without a "
                "q_len: requests differ in it"
            )
    for name, value in others.items():
        if value is not None:
            raise ValueError(
                f"{name}: got a value beside score_options {', '.join(names)}, want None: where new tokens stand in "
                "their request is not known to it"
            )


def _check_tree_mask(mask: torch.Tensor, q: torch.Tensor, **positional: object) -> None:
    check_tensors(tree_mask=mask)
    check_place("tree_mask", mask, q.device)
    if mask.dtype != torch.int32:
        raise TypeError(
            f"tree_mask: got dtype {mask.dtype}, want torch.int32: 32 new tokens a word, see pack_tree_mask"
        )
    if mask.dim() != 2 or mask.shape[0] != q.shape[0]:
        raise ValueError(
            f"tree_mask: got shape {shape_of(mask)}, want [{q.shape[0]}, words]: a row for each query of q"
        )
    check_contiguous("tree_mask", mask)
    for name, value in positional.items():
        if value is not None:
            raise ValueError(f"{name}: got a value beside a tree_mask, want None: positions in a tree are not known")


def _check_new(
    new_k: torch.Tensor | None, new_v: torch.Tensor | None, q: torch.Tensor, num_kv_heads: int
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """K and V of the queries' own tokens, checked; None without."""
    if new_k is None and new_v is None:
        return None
    if new_k is None or new_v is None:
        name = "new_k" if new_k is None else "new_v"
        raise ValueError(f"{name}: got None, want a tensor, as the other of new_k and new_v is one")
    for name, tensor in (("new_k", new_k), ("new_v", new_v)):
        check_tensors(**{name: tensor})
        check_place(name, tensor, q.device)
        if tensor.dtype != q.dtype:
            raise TypeError(f"{name}: got dtype {tensor.dtype}, want {q.dtype}, that of q")
        wanted = [q.shape[0], num_kv_heads, q.shape[2]]
        if shape_of(tensor) != wanted:
            raise ValueError(f"{name}: got shape {shape_of(tensor)}, want {wanted}: a row for each query and KV head")
        check_rows(name, tensor)
    return new_k, new_v


def check_out(out: torch.Tensor, q: torch.Tensor) -> None:
    """Raises TypeError or ValueError unless ``out`` can take the result for ``q``, but for its place and strides."""
    check_tensors(out=out)
    if out.dtype != q.dtype:
        raise TypeError(f"out: got dtype {out.dtype}, want {q.dtype}, that of q")
    if out.shape != q.shape:
        raise ValueError(f"out: got shape {shape_of(out)}, want {shape_of(q)}, that of q")


def write_own(out: torch.Tensor, result: torch.Tensor, cu_seqlens_q: torch.Tensor) -> torch.Tensor:
    """Writes the result for the requests' queries into ``out``, whose other rows stay as they are; no wait."""
    own = torch.arange(out.shape[0], device=out.device) < cu_seqlens_q[-1]
    return out.copy_(torch.where(own[:, None, None], result, out))


def check_query(q: torch.Tensor) -> None:
    """Raises TypeError or ValueError unless q is what the kernels take."""
    if q.dim() != 3:
        raise ValueError(f"q: got {q.dim()} dimensions, want 3: [total_q, num_q_heads, head_dim]")
    if q.dtype not in checks.Q_DTYPES:
        raise TypeError(f"q: got dtype {q.dtype}, want torch.bfloat16 or torch.float16")
    if q.shape[2] not in HEAD_DIMS:
        raise ValueError(f"q: got head_dim {q.shape[2]}, want one of {', '.join(map(str, HEAD_DIMS))}")
    if q.shape[0] * q.shape[1] > MAX_ROWS:
        raise ValueError(f"q: got {q.shape[0]} queries of {q.shape[1]} heads, want at most {MAX_ROWS} together")
    _check_query_strides(q)


def row_stride(q: torch.Tensor) -> int | None:
    """Elements from a query to the next one; None where queries lie side by side, or there is one of any stride."""
    if q.dim() != 3:
        return None  # which checks refuse
    stride = q.stride(0)
    if stride == q.shape[1] * q.shape[2] or (q.shape[0] < 2 and stride % PIECE):
        return None
    return stride


def _check_query_strides(q: torch.Tensor) -> None:
    """Raises ValueError unless the heads of a query lie together, wherever that is."""
    if q.is_contiguous() or not q.numel():
        return
    query, head, column = strides_of(q)
    if column != 1 or head != q.shape[2]:
        raise ValueError(
            f"q: got strides {q.stride()} for shape {shape_of(q)}, want the last two dimensions contiguous"
        )
    if query % PIECE:
        raise ValueError(
            f"q: got strides {q.stride()} for shape {shape_of(q)}, want queries on multiples of {ALIGNMENT} bytes"
        )


def check_rows(name: str, rows: torch.Tensor) -> None:
    """Raises ValueError unless tensor maps can bring K or V of tokens beside a cache, [tokens, num_kv_heads, head_dim]:
    contiguous rows on multiples of 16 bytes."""
    if rows.is_contiguous() or not rows.numel():
        return
    found, strides = f"{name}: got strides {rows.stride()} for shape {shape_of(rows)}", strides_of(rows)
    if strides[2] != 1:
        raise ValueError(f"{found}, want rows contiguous: a last stride of 1")
    if any(stride % PIECE for stride in strides[:2]):
        raise ValueError(f"{found}, want rows on multiples of {ALIGNMENT} bytes")
    if overlaps(rows):
        raise ValueError(f"{found}, want rows that do not overlap")
    if strides[0] >= MAX_ROW_STRIDE:
        raise ValueError(f"{found}, want tokens less than {MAX_ROW_STRIDE} elements apart")


def check_device_values(call: ExtendCall) -> None:
    """Raises ValueError naming the request (and the position) of the first number that cannot be right.

    Looks at where requests begin, at lengths, and at the pages that hold a token which some query sees, so it waits for
    the device.
    """
    ends, total = call.cu_seqlens_q.tolist(), call.q.shape[0]
    if ends[0] != 0:
        raise ValueError(f"cu_seqlens_q: got {ends[0]} first, want 0")
    for request in range(call.batch):
        if not ends[request] <= ends[request + 1] <= total:
            raise ValueError(
                f"cu_seqlens_q: got {ends[request]} to {ends[request + 1]} for request {request}, want numbers that "
                f"do not fall, at most {total}, the queries of q"
            )
    if call.max_seq_len is not None and call.batch and int(longest := call.base.seq_lens.max()) > call.max_seq_len:
        request = call.base.seq_lens.tolist().index(int(longest))
        raise ValueError(
            f"seq_lens: got {int(longest)} for request {request}, want at most max_seq_len, {call.max_seq_len}"
        )
    for request in range(call.batch):
        own = call._request(request, slice(ends[request], ends[request + 1]))
        if not own.q_len:  # nobody looks at its pages
            own = replace(own, block_table=None)
        elif call.new is not None:
            length = int(own.seq_lens[0])
            if length < own.q_len:
                raise ValueError(
                    f"seq_lens: got {length} for request {request}, want at least {own.q_len}, its new tokens"
                )
            # The cache holds what lies before the queries; no query of the cache's own is behind that.
            own = replace(own, seq_lens=own.seq_lens - own.q_len, q=own.q[:, :0])
        try:
            attention_call.check_device_values(own)
        except ValueError as error:
            raise ValueError(str(error).replace("request 0", f"request {request}")) from None
