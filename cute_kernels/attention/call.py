"""A checked call of attention as one object, with every option in the form that kernels and reference take."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from cute_kernels import arguments
from cute_kernels.arguments import Wanted
from cute_kernels.attention import checks, extend_checks, operands
from cute_kernels.attention.extend_config import MAX_EXTEND_SPLITS
from cute_kernels.attention.operands import Bias, CacheOperand, ChosenBlocks, Tail
from cute_kernels.attention.options import TENSORS, CallOptions, keys_seen, with_defaults
from cute_kernels.formats.kv import format_of
from cute_kernels.formats.scores import SIZES, check_given, tensors_of
from cute_kernels.formats.scores.features import Features

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Given(NamedTuple):
    """The arguments of a call, before they are checked.

    Attributes:
        options: all options (see `NO_OPTIONS`), or None for a call of decode attention that uses none.
        cu_seqlens_q: None for decode attention.
    """

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    seq_lens: torch.Tensor
    kv_format: str | tuple[str, str]
    softmax_scale: float | None = None
    num_splits: int | None = None
    return_lse: bool = False
    out: torch.Tensor | None = None
    options: Mapping[str, Any] | None = None
    cu_seqlens_q: torch.Tensor | None = None

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors that every call has, by name: q, the caches, seq_lens, and for extend attention cu_seqlens_q."""
        ends = {} if self.cu_seqlens_q is None else {"cu_seqlens_q": self.cu_seqlens_q}
        return dict(zip(self._fields[:4], self[:4], strict=True)) | ends


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """One checked call of decode or extend attention.

    Attributes:
        q: [batch, q_len, num_q_heads, head_dim], the last two dimensions contiguous; of extend attention [total_q,
            num_q_heads, head_dim].
        k, v: the caches.
        seq_lens: int32 [batch].
        block_table: int32 [batch, max_pages], columns contiguous, or None for contiguous caches.
        num_kv_heads: number of KV heads of the caches.
        max_seq_len: number of tokens that a request's row of the table, or its contiguous cache, has room for.
        page_size: number of tokens of a page; max_seq_len for contiguous caches, whose requests are one block each.
        num_blocks: number of pages of the cache; the batch size for contiguous caches.
        head_major: whether the caches are "HND".
        softmax_scale: as given, or the default.
        causal: whether keys after the query are hidden; a window implies it.
        window: number of keys that a query sees, its own key included; None if the window would hide nothing.
        soft_cap: None without a soft cap.
        sinks, alibi_slopes: fp32 [num_q_heads], contiguous.
        q_shift: fp32 [batch, q_len, num_q_heads], contiguous: added to q . k.
        v_rotation, v_factor: the parts of V's transform that the kernel has to undo (the reference ignores them).
        bias: added to the scores [batch, q_len, num_q_heads, max_seq_len].
        terms: names of the registered options (:mod:`cute_kernels.formats.scores`) that the call uses.
        score_tensors: the tensors of these registered options, by name.
        tail: the keys of unfinished blocks, for a K format in blocks; None for other formats.
        blocks: which of a request's blocks each KV head reads; None for all tokens.
        num_splits: as given.
        out: the tensor for the result, contiguous, with q's shape but V's head_dim; None if the call makes a new one.

    For extend attention, whose requests differ in their numbers of queries:
        cu_seqlens_q: int32 [batch + 1]: request b has queries cu_seqlens_q[b] to cu_seqlens_q[b + 1] - 1.
        new: K and V of the queries' own tokens, [total_q, num_kv_heads, head_dim] in q's dtype, rows contiguous; None
            if they come from the cache.
        tree_mask: int32 [total_q, words], contiguous: which of its request's new tokens each query sees; None without a
            tree.
        sm_margin, unpack, fp8_products: as given.
        longest: the argument max_seq_len, as given.
    """

    q: torch.Tensor
    k: CacheOperand
    v: CacheOperand
    seq_lens: torch.Tensor
    block_table: torch.Tensor | None
    num_kv_heads: int
    max_seq_len: int
    page_size: int
    num_blocks: int
    head_major: bool
    softmax_scale: float
    causal: bool
    window: int | None
    soft_cap: float | None
    sinks: torch.Tensor | None
    alibi_slopes: torch.Tensor | None
    bias: Bias | None
    num_splits: int | None
    out: torch.Tensor | None
    q_shift: torch.Tensor | None = None
    v_rotation: int = 1
    v_factor: bool = False
    terms: tuple[str, ...] = ()
    score_tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    tail: Tail | None = None
    cu_seqlens_q: torch.Tensor | None = None
    new: tuple[torch.Tensor, torch.Tensor] | None = None
    tree_mask: torch.Tensor | None = None
    sm_margin: int = 0
    unpack: bool | None = None
    longest: int | None = None
    fp8_products: bool = False
    blocks: ChosenBlocks | None = None

    @property
    def batch(self) -> int:
        return self.seq_lens.shape[0]

    @property
    def extends(self) -> bool:
        """Whether it is a call of extend attention."""
        return self.cu_seqlens_q is not None

    @property
    def q_len(self) -> int:
        """Number of queries of each request; 1 for extend attention, whose requests differ in their numbers of
        queries.
        """
        return 1 if self.extends else self.q.shape[1]

    @property
    def num_q_heads(self) -> int:
        return self.q.shape[-2]

    @property
    def head_dim(self) -> int:
        """The head_dim of q and K; V's is ``v.head_dim``."""
        return self.q.shape[-1]

    @property
    def group(self) -> int:
        """Number of query heads that share a KV head."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def out_shape(self) -> tuple[int, ...]:
        return *self.q.shape[:-1], self.v.head_dim

    @property
    def has_keys(self) -> bool:
        """Whether the call may have keys: it has ``new`` tokens, or its cache has room for a token."""
        return self.new is not None or (self.k.cache.numel() > 0 and self.max_seq_len > 0)

    def first_seen(self, lengths: torch.Tensor) -> torch.Tensor:
        """Returns [batch]: for each request the first position that any of its queries sees. A window hides all earlier
        positions."""
        if self.window is None:
            return torch.zeros_like(lengths)
        return (lengths - self.q_len - self.window + 1).clamp(min=0)

    @property
    def features(self) -> Features:
        """The features that, with shapes and formats, decide the compiled variant."""
        return Features(
            queries=self.q_len > 1,
            causal=self.causal and (self.tree_mask is None if self.extends else self.q_len > 1),
            window=self.window is not None,
            soft_cap=self.soft_cap is not None,
            sinks=self.sinks is not None,
            alibi=self.alibi_slopes is not None,
            shift=self.q_shift is not None,
            v_rotation=self.v_rotation,
            v_factor=self.v_factor,
            bias=checks.BIAS_DTYPES[self.bias.tensor.dtype] if self.bias is not None else None,
            terms=self.terms,
            paged=self.block_table is not None or self.blocks is not None,
            head_major=self.head_major,
            tail=self.tail is not None,
            by_head=self.blocks is not None,
        )

    def in_pages(self) -> AttentionCall:
        """Returns a call over chosen blocks with the sizes that kernels take. ``max_seq_len`` becomes the number of
        tokens that a block list has room for.

        Without a block table, ``page_size`` becomes the number of tokens of a block: kernels take the blocks of a
        contiguous cache as pages.
        """
        assert self.blocks is not None
        page_size = self.blocks.tokens if self.block_table is None else self.page_size
        return replace(self, page_size=page_size, max_seq_len=self.blocks.list.shape[2] * self.blocks.tokens)

    def requests(self) -> Iterator[tuple[slice, AttentionCall]]:
        """Yields (queries, the call of one request alone) for every request that has queries; waits for the device."""
        assert self.cu_seqlens_q is not None
        ends = self.cu_seqlens_q.tolist()
        for request in range(self.batch):
            own = slice(ends[request], ends[request + 1])
            if own.start < own.stop:
                yield own, self.request(request, own)

    def request(self, request: int, own: slice) -> AttentionCall:
        """Returns the call of one request alone. own: the request's queries."""
        part = slice(request, request + 1)
        if self.block_table is not None:
            table, k, v = self.block_table[part], self.k, self.v
        else:
            table, k, v = None, operands.part_of(self.k, part), operands.part_of(self.v, part)
        lengths = self.seq_lens[part]
        tensors = dict(self.score_tensors)
        for tensor in tensors_of(self.terms):
            if "batch" in tensor.shape:
                tensors[tensor.name] = tensors[tensor.name].narrow(tensor.shape.index("batch"), request, 1)
        blocks = self.blocks
        if blocks is not None:
            blocks = replace(blocks, list=blocks.list[part], counts=blocks.counts[part])
        alone = self._of(own, k, v, lengths, blocks=blocks, block_table=table, out=None, score_tensors=tensors)
        if self.tree_mask is None:
            return alone
        return self._with_tree(alone, own, int(lengths[0]) - (own.stop - own.start))

    def _of(
        self, own: slice, k: CacheOperand, v: CacheOperand, lengths: torch.Tensor, **changes: object
    ) -> AttentionCall:
        """Returns a decode call of one request. own: the request's queries; k, v: its keys and values. ``lengths``
        replaces seq_lens, and ``changes`` replace further fields of this call.
        """
        q = self.q[own].unsqueeze(0)
        return replace(self, cu_seqlens_q=None, q=q, k=k, v=v, seq_lens=lengths, **changes)

    def _with_tree(self, request_call: AttentionCall, own: slice, before: int) -> AttentionCall:
        """Returns ``request_call`` with the tree's mask as a bias. before: number of the request's tokens before its
        new tokens.
        """
        assert self.tree_mask is not None
        room = request_call.max_seq_len
        seen = unpack_tree_mask(self.tree_mask[own], torch.arange(room, device=self.q.device) - before)
        bias = torch.zeros_like(seen, dtype=torch.float32).masked_fill(~seen, -torch.inf)[None, :, None]
        shape = (1, own.stop - own.start, self.q.shape[1], room)
        return replace(request_call, causal=False, bias=Bias.of(bias, shape))

    def new_tokens(self, own: slice) -> AttentionCall:
        """Returns a decode call of one request over its new tokens alone. own: the request's queries. K and V come from
        ``new``, not from the cache.
        """
        assert self.new is not None
        count = own.stop - own.start
        form = format_of(checks.Q_DTYPES[self.q.dtype])
        k, v = (
            replace(operand, cache=rows[own].unsqueeze(0), form=form, scale=None)
            for operand, rows in zip((self.k, self.v), self.new, strict=True)
        )
        lengths = torch.tensor([count], dtype=torch.int32, device=self.q.device)
        pages = {"max_seq_len": count, "page_size": count, "num_blocks": 1}
        newer = self._of(own, k, v, lengths, block_table=None, head_major=False, **pages)
        return newer if self.tree_mask is None else self._with_tree(newer, own, 0)


def make_call(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    kv_format: object,
    softmax_scale: float | None = None,
    num_splits: int | None = None,
    out: torch.Tensor | None = None,
    **options: Unpack[CallOptions],
) -> AttentionCall:
    """Makes a call of decode attention from the arguments of `decode_attention`. Checks everything that can be checked
    without waiting for a device.

    Raises:
        TypeError, ValueError: an argument does not fit; the message names it, what came and what is wanted.
    """
    given = with_defaults(options)
    forms, block_table = checks.check_formats(kv_format), given["block_table"]
    checks.check_layout(given["cache_layout"])
    tensors = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "seq_lens": seq_lens}
    tensors |= {name: given[name] for name in TENSORS if given[name] is not None}
    arguments.check_together(**tensors)
    checks.check_query(q, forms)
    batch, q_len, num_q_heads, head_dim = q.shape
    head_major = given["cache_layout"] == "HND"
    caches = operands.check_caches((batch, num_q_heads), k_cache, v_cache, forms, head_major, block_table)
    checks.check_heads(q_len, num_q_heads, caches.num_kv_heads)
    checks.check_row("k_cache", k_cache, forms[0], head_dim)
    v_head_dim = checks.check_value_rows(v_cache, forms[1])
    checks.check_readable("k_cache", forms[0], head_dim)
    checks.check_readable("v_cache", forms[1], v_head_dim)
    checks.check_blocks(forms, caches.tokens if block_table is not None else None)
    fp32, heads, of_head = (torch.float32,), (num_q_heads,), ", one for each query head"
    of_queries = q.shape[:3], q.device, "q", "", ": batch, q_len and heads of q", True
    wanted = [
        Wanted("seq_lens", seq_lens, (torch.int32,), (batch,), q.device, "q", "", ", the batch of q", True),
        Wanted("sinks", given["sinks"], fp32, heads, q.device, "q", "", of_head, True),
        Wanted("alibi_slopes", given["alibi_slopes"], fp32, heads, q.device, "q", "", of_head, True),
        Wanted("q_shift", given["q_shift"], fp32, *of_queries),
        checks.out_wanted(out, q, (*q.shape[:3], v_head_dim), ": q's, with the head_dim of V"),
    ]
    arguments.check_wanted(one for one in wanted if one.tensor is not None)
    arguments.check_optional_positive("softmax_scale", softmax_scale)
    arguments.check_optional_positive(
        "softcap", given["softcap"], 2.0**15
    )  # scores' rounding errors are in proportion to it
    arguments.check_flag("causal", given["causal"])
    window = given["window_size"] = keys_seen(given["window_size"])
    arguments.check_optional_count("window_size", window)
    arguments.check_optional_count("num_splits", num_splits, checks.MAX_SPLITS)
    scores = {} if given["score_options"] is None else given["score_options"]
    if out is not None:
        arguments.check_apart("out", out, {**tensors, **scores})
    max_seq_len, soft_cap, bias = caches.max_seq_len, given["softcap"], given["attn_bias"]
    tail = given["k_tail"], given["tail_slots"]
    checks.check_tail(forms[0], *tail, batch, (caches.num_kv_heads, head_dim))
    numbers = (batch, q_len, num_q_heads, caches.num_kv_heads, head_dim, max_seq_len)
    terms = check_given(scores, q, dict(zip(SIZES, numbers, strict=True)))
    blocks = ChosenBlocks.of(given, (batch, caches.num_kv_heads), q.device)
    call = AttentionCall(
        q=q,
        k=operands.operand_of("k_scale", k_cache, forms[0], head_dim, caches, given["k_scale"]),
        v=operands.operand_of("v_scale", v_cache, forms[1], v_head_dim, caches, given["v_scale"]),
        seq_lens=seq_lens,
        block_table=block_table,
        num_kv_heads=caches.num_kv_heads,
        max_seq_len=max_seq_len,
        page_size=caches.tokens,
        num_blocks=caches.num_blocks,
        head_major=caches.head_major,
        softmax_scale=head_dim**-0.5 if softmax_scale is None else float(softmax_scale),
        causal=given["causal"] or window is not None,
        window=window if window is not None and window < max_seq_len else None,
        soft_cap=None if soft_cap is None else float(soft_cap),
        sinks=given["sinks"],
        alibi_slopes=given["alibi_slopes"],
        bias=None if bias is None else Bias.of(bias, (batch, q_len, num_q_heads, max_seq_len)),
        num_splits=num_splits,
        out=out,
        q_shift=given["q_shift"],
        terms=terms,
        score_tensors=scores,
        tail=None if tail[0] is None else Tail(*tail),
        blocks=blocks,
    )
    if blocks is not None:
        blocks.check_whole_pages(caches, call.k, call.v, block_table)
    return call


def make_extend_call(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor,
    kv_format: object,
    num_splits: int | None = None,
    new_k: torch.Tensor | None = None,
    new_v: torch.Tensor | None = None,
    tree_mask: torch.Tensor | None = None,
    sm_margin: int = 0,
    unpack: bool | None = None,
    max_seq_len: int | None = None,
    fp8_products: bool = False,
    out: torch.Tensor | None = None,
    **options: Any,
) -> AttentionCall:
    """Makes a call of extend attention from the arguments of `extend_attention`, with the checks of :func:`make_call`.
    options: the arguments that `extend_attention` shares with `decode_attention`."""
    forms = extend_checks.check_formats(kv_format)
    if unpack is True:
        extend_checks.check_unpack(forms)
    arguments.check_tensors(q=q, k_cache=k_cache, v_cache=v_cache, seq_lens=seq_lens, cu_seqlens_q=cu_seqlens_q)
    arguments.check_place("cu_seqlens_q", cu_seqlens_q, q.device)
    extend_checks.check_query(q)
    arguments.check_shape("seq_lens", seq_lens, "batch")
    batch = seq_lens.shape[0]
    arguments.check_vector("cu_seqlens_q", cu_seqlens_q, torch.int32, batch + 1, "the batch of seq_lens and one")
    arguments.check_optional_count("num_splits", num_splits, MAX_EXTEND_SPLITS)
    if type(sm_margin) is not int or sm_margin < 0:
        raise ValueError(f"sm_margin: got {sm_margin!r}, want a number of SMs from 0 on")
    if unpack is not None and type(unpack) is not bool:
        raise TypeError(f"unpack: got {unpack!r}, want None, True or False")
    arguments.check_optional_count("max_seq_len", max_seq_len)
    extend_checks.check_fp8(fp8_products, forms, q.shape[2], unpack)
    one_query = q.new_empty((batch, 1, *q.shape[1:]))
    call = make_call(one_query, k_cache, v_cache, seq_lens, kv_format=kv_format, **options)
    if call.terms:
        extend_checks.check_score_options(call.terms, tree_mask=tree_mask, new_k=new_k, new_v=new_v)
    if call.blocks is not None:
        checks.check_absent("a block_list", operands.OF_POSITIONS, {"new_k": new_k, "tree_mask": tree_mask})
        if unpack is True or fp8_products:
            name = "unpack" if unpack is True else "fp8_products"
            raise ValueError(f"{name}: got True beside a block_list, want False: chosen blocks are read as they lie")
    if call.v.head_dim != q.shape[2]:
        raise ValueError(f"v_cache: got rows of head_dim {call.v.head_dim}, want {q.shape[2]}, that of q")
    of_rows = (q.dtype,), (q.shape[0], call.num_kv_heads, q.shape[2]), q.device, "q", ", that of q"
    words = ": 32 new tokens a word, see pack_tree_mask", ": a row for each query of q"
    wanted = [
        checks.out_wanted(out, q, q.shape, ", that of q"),
        Wanted("new_k", new_k, *of_rows, ": a row for each query and KV head"),
        Wanted("new_v", new_v, *of_rows, ": a row for each query and KV head"),
        Wanted("tree_mask", tree_mask, (torch.int32,), (q.shape[0], "words"), q.device, "q", *words, True),
    ]
    arguments.check_wanted(one for one in wanted if one.tensor is not None)
    if out is not None:
        read = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "seq_lens": seq_lens, "cu_seqlens_q": cu_seqlens_q}
        read |= {"new_k": new_k, "new_v": new_v, "tree_mask": tree_mask, **options, **call.score_tensors}
        arguments.check_apart("out", out, read)
    new = extend_checks.check_new(new_k, new_v)
    if tree_mask is not None:
        positional = {name: options.get(name) for name in ("window_size", "alibi_slopes")}
        checks.check_absent("a tree_mask", "positions in a tree are not known", positional)
    return replace(
        call,
        q=q,
        cu_seqlens_q=cu_seqlens_q,
        window=call.window
        if new is None
        else keys_seen(options.get("window_size")),  # new tokens come on top of what the cache has room for
        new=new,
        out=out,
        tree_mask=tree_mask,
        num_splits=num_splits,
        sm_margin=sm_margin,
        unpack=unpack,
        longest=max_seq_len,
        fp8_products=fp8_products,
    )


def unpack_tree_mask(words: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Unpacks int32 words [queries, words] of a tree's mask to bool [queries, tokens].

    tokens: for each column, the index of its token among the request's new tokens. Negative indices are older tokens,
    which every query sees.
    """
    last = words.shape[1] * 32 - 1
    at = tokens.clamp(0, max(last, 0))
    bits = words[:, at // 32] >> (at % 32) & 1 if last >= 0 else words.new_zeros(len(words), len(tokens))
    return (tokens < 0) | ((tokens <= last) & (bits != 0))
