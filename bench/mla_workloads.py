"""What `python -m bench mla` decodes: shapes as data, what they cost, and inputs made from them on the GPU."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from cute_kernels.mla import mla_decode, sparse_mla_decode
from cute_kernels.mla.config import fits_tma_tiles
from cute_kernels.mla.formats import V_DIM, format_of
from cute_kernels.mla.reference import mla_decode_reference, sparse_mla_decode_reference
from cute_kernels.mla.schedule import Workload
from layouts.kv.mla import MlaModel1

SUITES = ("sparse", "prefill", "dense", "append")
PAGE_SIZE = 64
PAGE_ALIGNMENT = 576  # bytes that a split page's size is a multiple of, as FlashMLA wants it
CONTEXT = 32768  # tokens of a request that the sparse shapes choose from, as in FlashMLA's own benchmark
# Queries and tokens of this size make scores of about unit size: some tokens matter more than others.
TOKEN_DEVIATION, SOFTMAX_SCALE = 0.1, 0.5
CHUNK_PAGES = 1 << 11  # that are held in fp32 while a cache is made
CHECKED_REQUESTS = 4


@dataclass(frozen=True)
class MlaShape:
    """One decode step: ``q_len`` queries of ``num_heads`` heads for each of ``batch`` requests of ``seq_len`` tokens.

    topk: tokens that each query has chosen; 0 for all of them.
    shared: all requests have the same context, as the queries of one prompt have.
    """

    kv_format: str
    batch: int
    num_heads: int
    q_len: int = 1
    seq_len: int = CONTEXT
    topk: int = 0
    shared: bool = False

    @property
    def suite(self) -> str:
        if self.shared:
            return "prefill"
        return "sparse" if self.topk else "dense"

    @property
    def head_dim(self) -> int:
        return format_of(self.kv_format).head_dims[0]

    @property
    def contexts(self) -> int:
        return 1 if self.shared else self.batch

    @property
    def work(self) -> Workload:
        """As the schedule sees it, on an H200."""
        if self.topk:
            return Workload(self.batch * self.q_len, self.num_heads, self.topk)
        tokens = -(-self.seq_len // PAGE_SIZE) * PAGE_SIZE
        tma_tiles = fits_tma_tiles("paged", self.kv_format, PAGE_SIZE)
        return Workload(self.batch, self.q_len * self.num_heads, tokens, tma_tiles=tma_tiles)

    @property
    def flops(self) -> int:
        """Of both products, all columns of K and 512 of V, over every token that a query names: as FlashMLA counts.

        What causality hides of q_len > 1 is counted, too: at most q_len - 1 tokens of thousands.
        """
        return 2 * self.batch * self.q_len * self.num_heads * (self.topk or self.seq_len) * (self.head_dim + V_DIM)

    @property
    def token_bytes(self) -> int:
        return format_of(self.kv_format).row_bytes(self.head_dim)

    @property
    def gathered_bytes(self) -> int:
        """Bytes of tokens: a sparse step's once for each query that names them, a dense step's once."""
        return self.batch * (self.q_len * self.topk or self.seq_len) * self.token_bytes

    @property
    def name(self) -> str:
        tokens = f"topk={self.topk}" if self.topk else f"s_k={self.seq_len}"
        return f"{self.suite} {self.kv_format} b={self.batch} h={self.num_heads} s_q={self.q_len} {tokens}"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


SPARSE = (
    MlaShape("mla_fp8", batch=128, num_heads=128, q_len=2, topk=2048),
    MlaShape("mla_fp8", batch=148, num_heads=128, q_len=2, topk=32768),
    MlaShape("mla_fp8", batch=128, num_heads=128, q_len=1, topk=2048),
    MlaShape("mla_fp8", batch=128, num_heads=64, q_len=1, topk=2048),
    MlaShape("mla_fp8", batch=128, num_heads=16, q_len=1, topk=2048),
    MlaShape("mla_fp8", batch=2, num_heads=128, q_len=2, topk=2048),
    MlaShape("mla_fp8", batch=128, num_heads=8, q_len=1, topk=2048),
    MlaShape("mla_fp8", batch=128, num_heads=32, q_len=1, topk=2048),
    MlaShape("mla_fp8", batch=2, num_heads=16, q_len=1, topk=2048),
    MlaShape("mla_model1", batch=128, num_heads=128, q_len=2, topk=2048),
    MlaShape("mla_model1", batch=128, num_heads=64, q_len=1, topk=2048),
)
PREFILL = (MlaShape("mla_bf16", batch=4096, num_heads=128, topk=2048, shared=True),)
_WHOLE_CONTEXTS: tuple[dict[str, Any], ...] = (
    {"batch": 128, "num_heads": 128, "q_len": 2, "seq_len": 8192},
    {"batch": 128, "num_heads": 64, "seq_len": 8192},
    {"batch": 128, "num_heads": 16, "seq_len": 8192},
    {"batch": 1, "num_heads": 128, "seq_len": 32768},
)
DENSE = (
    *(MlaShape(kv_format, **shape) for kv_format in ("mla_bf16", "mla_fp8") for shape in _WHOLE_CONTEXTS),
    MlaShape("mla_fp16", **_WHOLE_CONTEXTS[0]),
    MlaShape("mla_model1", **_WHOLE_CONTEXTS[1]),
)
QUICK = (SPARSE[0], SPARSE[4], SPARSE[5], DENSE[0], DENSE[2], DENSE[3])


def shapes(suites: tuple[str, ...], quick: bool = False) -> list[MlaShape]:
    """The shapes of all suites but "append", in the order of the table."""
    return [shape for shape in (QUICK if quick else (*SPARSE, *PREFILL, *DENSE)) if shape.suite in suites]


@dataclass(frozen=True)
class MlaInputs:
    """Tensors of one shape, in the layouts that FlashMLA and `cute_kernels.mla` share but for an axis of one KV head.

    q: [batch, q_len, num_heads, head_dim]. cache: [num_pages, PAGE_SIZE, row]. block_table: int32 [batch, pages of a
    request]. seq_lens: int32 [batch]. indices: int32 [batch, q_len, topk], None for whole contexts.
    """

    shape: MlaShape
    q: torch.Tensor
    cache: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    indices: torch.Tensor | None

    def sample(self, count: int = CHECKED_REQUESTS) -> tuple[torch.Tensor, MlaInputs]:
        """(int64 [n], the inputs of these requests alone): up to ``count`` requests, spread over the batch."""
        batch = self.shape.batch
        rows = torch.linspace(0, batch - 1, min(batch, count), device=self.q.device).long()
        indices = None if self.indices is None else self.indices[rows]
        return rows, MlaInputs(
            self.shape, self.q[rows], self.cache, self.block_table[rows], self.seq_lens[rows], indices
        )

    def run(self, **options: Any) -> Any:
        """The public call; options: out, return_lse."""
        given: dict[str, Any] = {"kv_format": self.shape.kv_format, "softmax_scale": SOFTMAX_SCALE} | options
        if self.indices is None:
            return mla_decode(self.q, self.cache, self.seq_lens, block_table=self.block_table, **given)
        return sparse_mla_decode(self.q, self.cache, self.indices, **given)

    def reference(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, lse) in fp64, as `run` returns them."""
        given: dict[str, Any] = {"kv_format": self.shape.kv_format, "softmax_scale": SOFTMAX_SCALE}
        given["compute_dtype"] = torch.float64
        if self.indices is None:
            return mla_decode_reference(self.q, self.cache, self.block_table, self.seq_lens, **given)
        return sparse_mla_decode_reference(self.q, self.cache, self.indices, **given)[:2]

    def read_bytes(self) -> int:
        """Bytes that the step cannot do without: each token that anybody sees once, and q; to whole KiB."""
        if self.indices is None:
            tokens = int(self.seq_lens.sum())
        else:
            seen = torch.zeros(self.cache.shape[0] * PAGE_SIZE, dtype=torch.bool, device=self.cache.device)
            seen[self.indices.flatten().long()] = True
            tokens = int(seen.sum())
        num_bytes = tokens * self.shape.token_bytes + self.q.numel() * self.q.element_size()
        return -(-num_bytes // 1024) * 1024


def make_inputs(shape: MlaShape, device: torch.device | str = "cuda", seed: int = 0) -> MlaInputs:
    """Random queries and tokens, pages in random order; a query's chosen tokens are distinct and in random order."""
    generator = torch.Generator(device).manual_seed(seed)
    pages_of_each = -(-shape.seq_len // PAGE_SIZE)
    num_pages = shape.contexts * pages_of_each
    order = torch.randperm(num_pages, generator=generator, device=device)
    table = order.view(shape.contexts, pages_of_each).to(torch.int32).expand(shape.batch, -1).contiguous()
    size = (shape.batch, shape.q_len, shape.num_heads, shape.head_dim)
    q = torch.randn(size, generator=generator, dtype=format_of(shape.kv_format).q_dtype, device=device)
    return MlaInputs(
        shape=shape,
        q=q,
        cache=make_cache(shape.kv_format, num_pages, generator),
        block_table=table,
        seq_lens=torch.full((shape.batch,), shape.seq_len, dtype=torch.int32, device=device),
        indices=_choose(shape, table, generator) if shape.topk else None,
    )


def make_cache(kv_format: str, num_pages: int, generator: torch.Generator) -> torch.Tensor:
    """[num_pages, PAGE_SIZE, row] of random tokens on the generator's device, by the format's own quantiser."""
    form, device = format_of(kv_format), generator.device
    token = form.token(form.head_dims[0])
    row = form.row_elements(token.head_dim)
    page = token.page_bytes(PAGE_SIZE, PAGE_ALIGNMENT) if isinstance(token, MlaModel1) else PAGE_SIZE * row
    pages = torch.empty((num_pages, page), dtype=form.cache_dtypes[0], device=device)
    for chunk in pages.split(CHUNK_PAGES):
        size = (chunk.shape[0], PAGE_SIZE, token.head_dim)
        rows = form.quantize(torch.randn(size, generator=generator, device=device) * TOKEN_DEVIATION)
        whole = token.to_pages(rows, PAGE_ALIGNMENT) if isinstance(token, MlaModel1) else rows.flatten(1)
        chunk.copy_(whole)
    return pages[:, : PAGE_SIZE * row].unflatten(1, (PAGE_SIZE, row))


def _choose(shape: MlaShape, table: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """int32 [batch, q_len, topk]: slots of tokens of each request, chosen by each query for itself."""
    dice = torch.rand((shape.batch, shape.q_len, shape.seq_len), generator=generator, device=table.device)
    tokens = dice.argsort(dim=-1)[..., : shape.topk]
    pages = table.long()[:, None, :].expand(-1, shape.q_len, -1).gather(2, tokens // PAGE_SIZE)
    return (pages * PAGE_SIZE + tokens % PAGE_SIZE).to(torch.int32)
