"""What is benchmarked: shapes as data, and inputs made from them on the GPU."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

import torch

from cute_kernels.kv_formats import Int4Format, format_of

FORMATS = ("bf16", "int4_g1", "int4_g4")
BATCHES = (1, 32, 64, 128, 256, 512)
QUICK_BATCHES = (1, 64, 512)
L2_BYTES = 256 << 20  # shapes beyond the main table read more than this, so that no cache can help


@dataclass(frozen=True)
class DecodeShape:
    """One decode step: every request has `seq_len` cached tokens and one query token."""

    batch: int
    seq_len: int = 8192
    num_q_heads: int = 8
    num_kv_heads: int = 1
    head_dim: int = 128

    def cache_bytes(self, kv_format: str) -> int:
        """Bytes of K and V together, which one decode step must read."""
        return 2 * self.batch * self.seq_len * self.num_kv_heads * format_of(kv_format).row_bytes(self.head_dim)

    @property
    def name(self) -> str:
        return f"B={self.batch} T={self.seq_len} HQ={self.num_q_heads} HKV={self.num_kv_heads} D={self.head_dim}"

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


@dataclass
class DecodeInputs:
    """Tensors of one decode step; caches are [batch, seq_len, num_kv_heads, row]."""

    shape: DecodeShape
    kv_format: str
    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    seq_lens: torch.Tensor

    def sample(self, count: int) -> tuple[torch.Tensor, DecodeInputs]:
        """Indices of up to `count` requests spread over the batch (first and last included), and copies of them."""
        batch = self.shape.batch
        picked = sorted({round(i * (batch - 1) / max(1, count - 1)) for i in range(count)})
        index = torch.tensor(picked, device=self.q.device)
        shape = replace(self.shape, batch=len(picked))
        q, k_cache, v_cache, seq_lens = (t[index] for t in (self.q, self.k_cache, self.v_cache, self.seq_lens))
        return index, DecodeInputs(shape, self.kv_format, q, k_cache, v_cache, seq_lens)


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


def _filled(shape: DecodeShape) -> DecodeShape:
    """The shape with the least power-of-two batch whose smallest cache format exceeds `L2_BYTES`."""
    batch = 1
    while replace(shape, batch=batch).cache_bytes("int4_g1") <= L2_BYTES:
        batch *= 2
    return replace(shape, batch=batch)


def make_inputs(
    shape: DecodeShape, kv_format: str, device: torch.device | str = "cuda", seed: int = 0, chunk_rows: int = 1 << 20
) -> DecodeInputs:
    """Gaussian q, K and V; INT4 caches are quantised from Gaussian values, `chunk_rows` rows at a time."""
    generator = torch.Generator(device=device).manual_seed(seed)
    dtype = format_of(kv_format).cache_dtype
    dtype = dtype if dtype.is_floating_point else torch.bfloat16
    q = torch.randn(shape.batch, 1, shape.num_q_heads, shape.head_dim, dtype=dtype, device=device, generator=generator)
    k_cache, v_cache = (_make_cache(shape, kv_format, device, generator, chunk_rows) for _ in range(2))
    seq_lens = torch.full((shape.batch,), shape.seq_len, dtype=torch.int32, device=device)
    return DecodeInputs(shape, kv_format, q, k_cache, v_cache, seq_lens)


def _make_cache(
    shape: DecodeShape, kv_format: str, device: torch.device | str, generator: torch.Generator, chunk_rows: int
) -> torch.Tensor:
    form = format_of(kv_format)
    size = (shape.batch, shape.seq_len, shape.num_kv_heads, form.row_elements(shape.head_dim))
    cache = torch.empty(size, dtype=form.cache_dtype, device=device)
    if not isinstance(form, Int4Format):
        return cache.normal_(generator=generator)
    row = form.row(shape.head_dim)
    for chunk in cache.view(-1, row.row_bytes).split(chunk_rows):
        values = torch.randn(len(chunk), shape.head_dim, device=device, generator=generator)
        chunk.copy_(row.quantize(values))
    return cache
