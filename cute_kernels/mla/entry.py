"""The host functions of both decode kernels: what plans call, with addresses and numbers."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from cute_kernels.device.types import extents
from cute_kernels.mla.few_heads.kernel import FewHeadsKernel
from cute_kernels.mla.kernel import MlaKernel
from cute_kernels.mla.loads.locate import Chosen, PagedSource, Pages, SparseSource
from cute_kernels.mla.loads.tma_tiles import TmaTileMap
from cute_kernels.mla.mainloops.softmax import RESCALE_SLACK
from cute_kernels.mla.work import MlaSizes, Results


class DecodeEntry:
    """kernel: what is launched, `MlaKernel` or `FewHeadsKernel`."""

    def __init__(self, kernel: MlaKernel | FewHeadsKernel):
        self.kernel, self.config = kernel, kernel.config

    @cute.jit
    def sparse(
        self,
        q: cute.Tensor,
        out: Int64,
        lse: Int64,
        max_logits: Int64,
        sinks: Int64,
        partials: Int64,
        softmax_scale: Float32,
        num_parts: Int32,
        num_ctas: Int32,
        flags: Int64,
        cache: Int64,
        page_stride: Int64,
        token_stride: Int32,
        page_size: Int32,
        num_tokens: Int32,
        indices: Int64,
        topk: Int32,
        topk_length: Int64,
        extra_cache: Int64,
        extra_page_stride: Int64,
        extra_token_stride: Int32,
        extra_page_size: Int32,
        extra_num_tokens: Int32,
        extra_indices: Int64,
        extra_topk: Int32,
        extra_topk_length: Int64,
        stream,
    ):
        """Launches over (queries x blocks of 64 heads, parts), ``num_ctas`` in all, or over work ranges of all queries,
        in equal work ranges, if num_parts is 0: see :mod:`.stream_k`; num_ctas is a multiple of the blocks of heads
        then.

        q: bf16 or fp16 [batch, q_len, num_heads, head_dim]. Addresses: out [batch, q_len, num_heads, 512] in q's dtype;
        lse fp32 [batch, q_len, num_heads]; max_logits likewise or 0; sinks fp32 [num_heads] or 0; partials: see
        `Results`, used if num_parts > 1, when out, lse and max_logits are the combining kernel's to write; under
        stream-K that and flags are the words and the flags of `PartialExchange`; cache: pages ``page_stride`` bytes
        apart, of page_size tokens ``token_stride`` bytes apart (their data, if pages are split), multiples of 16;
        num_tokens: indices below it exist, at most 2**31 - 1; indices int32 [batch, q_len, topk]; topk_length int32
        [batch] or 0. The same for the extra cache; extra_topk is 0 without one (page_size is then 1)."""
        batch, q_len, num_heads = extents(q)[:3]
        # Who asks for the greatest scores gets running maxima that are.
        slack = cutlass.select_(max_logits != 0, Float32(0.0), Float32(RESCALE_SLACK))
        shape = MlaSizes(batch * q_len, q_len, num_heads, num_heads, num_parts, Int32(0), slack)
        main_pages = Pages.of(cache, page_stride, token_stride, page_size)
        extra_pages = Pages.of(extra_cache, extra_page_stride, extra_token_stride, extra_page_size)
        main = Chosen(main_pages, num_tokens, indices, topk, topk_length)
        extra = Chosen(extra_pages, extra_num_tokens, extra_indices, extra_topk, extra_topk_length)
        results = Results(out, lse, max_logits, sinks, partials)
        self.kernel.launch(q, SparseSource(main, extra), results, flags, shape, num_ctas, softmax_scale, stream)

    @cute.jit
    def paged(
        self,
        q: cute.Tensor,
        out: Int64,
        lse: Int64,
        max_logits: Int64,
        sinks: Int64,
        partials: Int64,
        softmax_scale: Float32,
        num_parts: Int32,
        num_ctas: Int32,
        flags: Int64,
        cache: Int64,
        page_stride: Int64,
        token_stride: Int32,
        page_size: Int32,
        num_pages: Int32,
        table: Int64,
        table_stride: Int32,
        max_pages: Int32,
        seq_lens: Int64,
        causal: Int32,
        stream,
    ):
        """Launches over (requests x blocks of 64 of their queries' heads, parts), or over work ranges of all requests.

        As :meth:`sparse`, with tokens 0 to seq_lens[b] of a request: addresses of table int32 [batch, max_pages], rows
        ``table_stride`` elements apart, and seq_lens int32 [batch]. causal: 1 if query i of q_len sees the tokens up to
        seq_lens[b] - q_len + i only, else 0.
        """
        batch, q_len, num_heads = extents(q)[:3]
        slack = cutlass.select_(max_logits != 0, Float32(0.0), Float32(RESCALE_SLACK))
        shape = MlaSizes(batch, 1, q_len * num_heads, num_heads, num_parts, causal, slack)
        pages = Pages.of(cache, page_stride, token_stride, page_size)
        source = PagedSource(pages, num_pages, table, table_stride, max_pages, seq_lens)
        if const_expr(self.config.tma_tiles):
            source = TmaTileMap(self.config).source(source, cache, page_stride, token_stride)
        results = Results(out, lse, max_logits, sinks, partials)
        self.kernel.launch(q, source, results, flags, shape, num_ctas, softmax_scale, stream)
