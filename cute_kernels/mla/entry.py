"""The host side of both decode kernels: it turns launch arguments into sizes, sources of tokens, and results."""

from __future__ import annotations

from types import SimpleNamespace

import cutlass
from cutlass import Float32, Int32

from cute_kernels.device.softmax import RESCALE_SLACK
from cute_kernels.device.types import extents
from cute_kernels.mla.arguments import CHOSEN, EXTRA
from cute_kernels.mla.few_heads.kernel import FewHeadsKernel
from cute_kernels.mla.kernel import MlaKernel
from cute_kernels.mla.loads.locate import Chosen, PagedSource, Pages, SparseSource
from cute_kernels.mla.loads.tma_tiles import TmaTileMap
from cute_kernels.mla.work import MlaSizes, Results


class DecodeEntry:
    """The host side of a kernel, which makes a launch's run-time values. kernel: `MlaKernel` or `FewHeadsKernel`."""

    def __init__(self, kernel: MlaKernel | FewHeadsKernel):
        self.kernel, self.config = kernel, kernel.config

    def launch(self, given, stream):
        """Launches the kernel; ``given`` has the arguments of :func:`.arguments.arguments_of`.

        In sparse decode each query has its own tokens, so a row is a query. In paged decode a request's queries share
        tokens, so a row is a request with the heads of all its queries. The grid of work tiles is (rows x blocks of
        heads, parts).

        If num_parts is 0, CTAs have work ranges of equal size over all rows, see :mod:`.stream_k`. num_ctas is then a
        multiple of a row's number of blocks of heads.
        """
        batch, q_len, num_heads = extents(given.q)[:3]
        # Who asks for the greatest scores gets running maxima that are.
        slack = cutlass.select_(given.max_logits != 0, Float32(0.0), Float32(RESCALE_SLACK))
        if self.config.tokens == "sparse":
            shape = MlaSizes(batch * q_len, q_len, num_heads, num_heads, given.num_parts, Int32(0), slack)
            source = SparseSource(self.chosen(given), self.chosen(given, EXTRA))
        else:
            shape = MlaSizes(batch, 1, q_len * num_heads, num_heads, given.num_parts, given.causal, slack)
            source = self.paged(given)
        results = Results(given.out, given.lse, given.max_logits, given.sinks, given.partials)
        self.kernel.launch(given.q, source, results, given.flags, shape, given.num_ctas, given.softmax_scale, stream)

    def chosen(self, given, prefix: str = "") -> Chosen:
        """Describes the tokens that indices choose from a cache. prefix: `EXTRA` for the extra cache."""
        own = SimpleNamespace(**{each.name: getattr(given, prefix + each.name) for each in CHOSEN})
        return Chosen(self.pages(own), own.num_tokens, own.indices, own.topk, own.topk_length)

    def pages(self, given) -> Pages:
        return Pages.of(given.cache, given.page_stride, given.token_stride, given.page_size)

    def paged(self, given) -> PagedSource:
        """Describes the tokens of requests by their block table, with a tensor map if TMA loads them."""
        table = given.table, given.table_stride, given.max_pages
        source = PagedSource(self.pages(given), given.num_pages, *table, given.seq_lens)
        if not self.config.tma_tiles:
            return source
        return TmaTileMap(self.config).source(source, given.cache, given.page_stride, given.token_stride)
