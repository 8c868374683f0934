"""What is benchmarked: shapes as data, and inputs made from them on the GPU."""

from __future__ import annotations

import math
import random
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from cute_kernels.formats.kv import KvFormat, format_of, format_pair
from cute_kernels.names import CacheLayout
from layouts.kv.channel_blocks import TAIL_TOKENS

FORMATS = ("bf16", "int4_g1", "int4_g4")
BATCHES = (1, 32, 64, 128, 256, 512)
QUICK_BATCHES = (1, 64, 512)
GROUP_SIZE, BITS = 128, 4  # of the weights of experts, where nothing else is said
HEADS_FIRST = ", heads first"  # ends the name of a shape over head-major caches
L2_BYTES = 256 << 20  # shapes beyond the main table read more than this, so that no cache can help


@dataclass(frozen=True)
class DecodeShape:
    """One decode step: every request has `seq_len` cached tokens, the last `q_len` of which are queries.

    page_size: 0 for contiguous caches. ragged: lengths are log-uniform from 128 to `seq_len` instead. cache_layout: as
    the public call takes it.
    """

    batch: int
    seq_len: int = 8192
    num_q_heads: int = 8
    num_kv_heads: int = 1
    head_dim: int = 128
    q_len: int = 1
    page_size: int = 0
    ragged: bool = False
    cache_layout: CacheLayout = "NHD"

    @property
    def lengths(self) -> list[int]:
        """Of the requests; the same in every run."""
        if not self.ragged:
            return [self.seq_len] * self.batch
        draw, ends = random.Random(0), (math.log(128), math.log(self.seq_len))
        return [int(math.exp(draw.uniform(*ends))) for _ in range(self.batch)]

    def cache_bytes(self, kv_format: str) -> int:
        """Bytes of K and V together, which one decode step must read, to whole KiB."""
        num_bytes = 2 * sum(self.lengths) * self.num_kv_heads * format_of(kv_format).row_bytes(self.head_dim)
        return -(-num_bytes // 1024) * 1024 if self.ragged else num_bytes

    @property
    def heads_first(self) -> DecodeShape:
        """This shape with a head-major cache."""
        return replace(self, cache_layout="HND")

    @property
    def name(self) -> str:
        return self.case + (HEADS_FIRST if self.cache_layout == "HND" else "")

    @property
    def case(self) -> str:
        """The name without the layout of the cache."""
        name = f"B={self.batch} T={self.seq_len} HQ={self.num_q_heads} HKV={self.num_kv_heads} D={self.head_dim}"
        name += f" q_len={self.q_len}" if self.q_len > 1 else ""
        name += f" pages of {self.page_size}" if self.page_size else ""
        return name + (" ragged" if self.ragged else "")

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def own_options(self, device: torch.device | str, generator: torch.Generator) -> dict[str, Any]:
        """What the public call takes besides because of the shape."""
        return {}


@dataclass
class DecodeInputs:
    """Tensors of one decode step; caches are [batch, seq_len, num_kv_heads, row], or pages, or head-major ones.

    options: what the public call takes besides: a block table, scales beside the cache, its layout.
    """

    shape: DecodeShape
    kv_format: Any  # a KvFormatName; tables of the suites have strings
    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    seq_lens: torch.Tensor
    options: dict[str, Any] = field(default_factory=dict)

    def sample(self, count: int) -> tuple[torch.Tensor, DecodeInputs]:
        """Indices of up to `count` requests spread over the batch (first and last included), and copies of them."""
        batch = self.shape.batch
        picked = sorted({round(i * (batch - 1) / max(1, count - 1)) for i in range(count)})
        index = torch.tensor(picked, device=self.q.device)
        shape = replace(self.shape, batch=len(picked))
        options, k_cache, v_cache = dict(self.options), self.k_cache, self.v_cache
        if "block_table" in options:
            options["block_table"] = options["block_table"][index]
        else:
            k_cache, v_cache = k_cache[index], v_cache[index]
        for name in {"tail_slots", "block_list", "block_counts"} & options.keys():
            options[name] = options[name][index]
        q, seq_lens = self.q[index], self.seq_lens[index]
        return index, DecodeInputs(shape, self.kv_format, q, k_cache, v_cache, seq_lens, options)


def main_shapes(batches: tuple[int, ...] = BATCHES) -> list[DecodeShape]:
    """The shapes of the published tables: T=8192, 8 query heads on one KV head, D=128."""
    return [DecodeShape(batch) for batch in batches]


def other_shapes(quick: bool = False) -> list[DecodeShape]:
    """Lengths from 1k to 128k, more heads, other head dimensions; batches such that INT4 rows too exceed 256 MiB."""
    lengths = (1024, 131072) if quick else (1024, 4096, 16384, 65536, 131072)
    shapes = [DecodeShape(0, seq_len=length) for length in lengths]
    shapes += [DecodeShape(0, num_q_heads=64, num_kv_heads=8), DecodeShape(0, num_q_heads=32, num_kv_heads=32)]
    shapes += [DecodeShape(0, head_dim=64), DecodeShape(0, head_dim=256)]
    return [_filled(shape) for shape in shapes]


CACHE_FORMATS = ("int8_token_head", "int8_tensor", "int8_channel", "int8_g4", "e4m3_token_head", "e4m3_tensor", "e5m2")


def cache_rows() -> list[tuple[DecodeShape, str]]:
    """What a whole KV cache asks for beside the main table: 8 bits, pages, several queries, ragged batches, MHA."""
    rows = [(DecodeShape(batch), name) for name in CACHE_FORMATS for batch in (32, 128, 512)]
    for name in ("bf16", "int4_g1", "e4m3_tensor", "int8_token_head"):
        plain = () if name in CACHE_FORMATS else (0,)
        rows += [(DecodeShape(batch, page_size=size), name) for batch in (128, 512) for size in (*plain, 64, 16)]
        rows += [(DecodeShape(128, q_len=4), name)]
        rows += [(DecodeShape(64, seq_len=131072, page_size=64, ragged=True), name)]
    rows += [(DecodeShape(16, num_q_heads=32, num_kv_heads=32), name) for name in ("int4_g1", "e4m3_tensor")]
    return rows


def _filled(shape: DecodeShape) -> DecodeShape:
    """The shape with the least power-of-two batch whose smallest cache format exceeds `L2_BYTES`."""
    batch = 1
    while replace(shape, batch=batch).cache_bytes("int4_g1") <= L2_BYTES:
        batch *= 2
    return replace(shape, batch=batch)


def make_inputs(
    shape: DecodeShape,
    kv_format: str,
    device: torch.device | str = "cuda",
    seed: int = 0,
    chunk_rows: int = 1 << 20,
    filled: bool = True,
) -> DecodeInputs:
    """Gaussian q, K and V; INT4 caches are quantised from Gaussian values, `chunk_rows` rows at a time.

    Beside keys in blocks V is in rows of as many bytes: INT4 with a scale for every 32 columns. filled: False for
    caches whose rows nobody reads, as where kernels are listed.
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    form = format_of(kv_format)
    dtype = torch.bfloat16 if form.is_coded else form.cache_dtype
    q = torch.randn(
        shape.batch, shape.q_len, shape.num_q_heads, shape.head_dim, dtype=dtype, device=device, generator=generator
    )
    options: dict[str, Any] = {}
    scale = given_scale(kv_format, shape.num_kv_heads, shape.head_dim, device)
    if scale is not None:
        options |= {"k_scale": scale, "v_scale": scale}
    if shape.cache_layout != "NHD":
        options["cache_layout"] = shape.cache_layout
    size = (shape.batch, shape.seq_len)
    if shape.page_size:
        options["block_table"], num_pages = _block_table(shape, device, generator)
        size = (num_pages, shape.page_size)
    formats: Any = kv_format
    if form.in_blocks:
        formats = kv_format, f"int4_g{shape.head_dim // form.block_tokens}"
        waiting = (shape.batch, TAIL_TOKENS, shape.num_kv_heads, shape.head_dim)
        options["k_tail"] = torch.randn(waiting, dtype=torch.float16, device=device, generator=generator)
        options["tail_slots"] = torch.arange(shape.batch, dtype=torch.int32, device=device)
    k_cache, v_cache = (
        _make_cache(shape, size, name, scale, device, generator, chunk_rows if filled else 0)
        for name in format_pair(formats)
    )
    seq_lens = torch.tensor(shape.lengths, dtype=torch.int32, device=device)
    options |= shape.own_options(device, generator)
    return DecodeInputs(shape, formats, q, k_cache, v_cache, seq_lens, options)


def given_scale(kv_format: str, num_kv_heads: int, head_dim: int, device: torch.device | str) -> torch.Tensor | None:
    """What a format wants beside a cache of Gaussian values: up to 4 standard deviations are kept."""
    form = format_of(kv_format)
    if form.given_scale is None:
        return None
    dims = {"tensor": (), "head": (num_kv_heads,), "channel": (num_kv_heads, head_dim)}
    largest = 448.0 if kv_format.startswith("e4m3") else 127.0
    return torch.full(dims[form.given_scale], 4.0 / largest, device=device)


def beside_rows(form: KvFormat, scale: torch.Tensor | None) -> torch.Tensor | None:
    """A given scale as the format's own functions take it: one that rows [..., num_kv_heads, head_dim] broadcast."""
    return scale[:, None] if scale is not None and form.given_scale == "head" else scale


def _block_table(
    shape: DecodeShape, device: torch.device | str, generator: torch.Generator
) -> tuple[torch.Tensor, int]:
    """(int32 [batch, pages of the longest request], number of pages): pages in random order, unused entries -1."""
    counts = [-(-length // shape.page_size) for length in shape.lengths]
    order = torch.randperm(sum(counts), device=device, generator=generator).to(torch.int32)
    table = torch.full((shape.batch, -(-shape.seq_len // shape.page_size)), -1, dtype=torch.int32, device=device)
    for row, pages in zip(table, order.split(counts), strict=True):
        row[: len(pages)] = pages
    return table, sum(counts)


def _make_cache(
    shape: DecodeShape,
    size: tuple[int, int],
    kv_format: str,
    scale: torch.Tensor | None,
    device: torch.device | str,
    generator: torch.Generator,
    chunk_rows: int,
) -> torch.Tensor:
    form = format_of(kv_format)
    row = form.row_elements(shape.head_dim)
    if shape.cache_layout == "HND":
        blocks, tokens = size
        cache = torch.empty((blocks, shape.num_kv_heads, tokens, row), dtype=form.cache_dtype, device=device)
        if not chunk_rows:
            return cache
        plain = replace(shape, cache_layout="NHD")
        return cache.copy_(_make_cache(plain, size, kv_format, scale, device, generator, chunk_rows).transpose(1, 2))
    cache = torch.empty((*size, shape.num_kv_heads, row), dtype=form.cache_dtype, device=device)
    if not chunk_rows:
        return cache
    if not form.is_coded:
        return cache.normal_(generator=generator)
    tokens = -(-max(1, chunk_rows // shape.num_kv_heads) // form.block_tokens) * form.block_tokens  # whole blocks
    for chunk in cache.view(-1, shape.num_kv_heads, row).split(tokens):
        values = torch.randn(*chunk.shape[:2], shape.head_dim, device=device, generator=generator)
        chunk.copy_(form.quantize(values, beside_rows(form, scale)))
    return cache


@dataclass(frozen=True)
class MoeModel:
    """The layer of experts of a model: gate and up [experts, 2 inner, hidden], down [experts, hidden, inner]."""

    name: str
    experts: int
    topk: int
    hidden: int
    inner: int

    @property
    def products(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """N and K of an expert, of the two products."""
        return (2 * self.inner, self.hidden), (self.hidden, self.inner)


@dataclass(frozen=True)
class MoeShape:
    """A layer with a number of tokens."""

    model: MoeModel
    tokens: int

    @property
    def name(self) -> str:
        return f"{self.model.name}, {self.tokens} tokens"

    def flops(self, product: int) -> int:
        n, k = self.model.products[product]
        return 2 * self.tokens * self.model.topk * n * k

    def weight_bytes(self, product: int, active: int) -> int:
        """Codes and scales of the active experts, each of which must be read."""
        n, k = self.model.products[product]
        return active * (n * k * BITS // 8 + 2 * n * (k // GROUP_SIZE))
