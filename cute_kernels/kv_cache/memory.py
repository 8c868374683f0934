"""`MemoryReport`, the bytes and pages of a KV cache."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MemoryReport:
    """The memory of a cache at the time of `KVCache.memory_report`; `str()` gives a readable summary.

    Attributes:
        kv_format: such as "int4_g4", or "int8_token_head + int4_g4" if K and V differ.
        layer_bytes: for each layer, the bytes of K's and V's pages.
        scale_bytes: bytes of the scales outside the pages, of all layers.
        page_size: tokens per page.
        pages: number of pages of each layer.
        pages_used: number of pages that at least one sequence refers to.
        pages_shared: number of pages that more than one sequence refers to.
        sequences: number of sequences.
        tokens: sum of the sequences' lengths.
        tokens_stored: number of tokens in pages; a token that several sequences share is counted once.
        token_bytes: bytes of K and V of one token, in all layers together.
        token_bytes_bf16: the same in bf16.
        tail_bytes: for formats in blocks, bytes of the newest keys, which are kept outside the pages, of all layers.
    """

    kv_format: str
    layer_bytes: tuple[int, ...]
    scale_bytes: int
    page_size: int
    pages: int
    pages_used: int
    pages_shared: int
    sequences: int
    tokens: int
    tokens_stored: int
    token_bytes: int
    token_bytes_bf16: int
    tail_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """Bytes of all layers' pages, of scales, and of the keys outside the pages."""
        return sum(self.layer_bytes) + self.scale_bytes + self.tail_bytes

    @property
    def pages_free(self) -> int:
        """Pages that no sequence has."""
        return self.pages - self.pages_used

    @property
    def stored_bytes(self) -> int:
        """Bytes that hold tokens."""
        return self.tokens_stored * self.token_bytes

    @property
    def wasted_bytes(self) -> int:
        """Bytes of used pages that hold no token: the unfilled ends of sequences."""
        return (self.pages_used * self.page_size - self.tokens_stored) * self.token_bytes

    @property
    def bf16_bytes(self) -> int:
        """Bytes that all layers' pages would take in bf16."""
        return self.pages * self.page_size * self.token_bytes_bf16

    def __str__(self) -> str:
        used = self.pages_used * self.page_size
        waste = 1 - self.tokens_stored / used if used else 0.0
        ratio = self.token_bytes_bf16 / self.token_bytes
        layers = len(self.layer_bytes)
        return "\n".join(
            (
                f"KV cache {self.kv_format}: {_size(self.total_bytes)} in {layers} layers of "
                f"{_size(self.layer_bytes[0])}; bf16 would take {_size(self.bf16_bytes)} ({ratio:.2f}x)",
                f"pages of {self.page_size} tokens: {self.pages_used} of {self.pages} used, {self.pages_free} free, "
                f"{self.pages_shared} shared",
                f"{self.tokens} tokens of {self.sequences} sequences, {self.tokens_stored} stored in "
                f"{_size(self.stored_bytes)}; {_size(self.wasted_bytes)} ({waste:.1%}) of used pages unfilled",
            )
        )


def _size(num_bytes: int) -> str:
    """Formats a number of bytes in the largest binary unit that keeps at least one digit before the point."""
    size, units = float(num_bytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        units.pop(0)
    return f"{size:.0f} {units[0]}" if units[0] == "B" else f"{size:.2f} {units[0]}"
