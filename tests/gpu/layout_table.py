"""Head layouts that the GPU tests draw from, and the kernels they need: few enough to compile before the tests."""

from __future__ import annotations

from dataclasses import dataclass

from cute_kernels.attention.candidates import candidate_configs
from cute_kernels.attention.compile import AttentionSpec
from cute_kernels.attention.decode_config import DecodeConfig
from cute_kernels.attention.problem import AttentionProblem
from cute_kernels.formats.kv import format_of


@dataclass(frozen=True)
class HeadLayout:
    """What decides which kernels a call may use.

    Args:
        groups: query heads per KV head that share those kernels.
        word_copies: the number of tokens is such that no bulk copy can address the cache.
    """

    kv_format: str
    head_dim: int
    num_kv_heads: int
    groups: tuple[int, ...]
    q_dtype: str = "bf16"
    word_copies: bool = False

    def __str__(self) -> str:
        copies = "-word" if self.word_copies else ""
        return f"{self.kv_format}-{self.q_dtype}-d{self.head_dim}-h{self.num_kv_heads}x{self.groups[0]}{copies}"

    def tokens(self, wanted: int) -> int:
        """About ``wanted``, such that a request's cache is (or with ``word_copies`` is not) a multiple of 16 bytes."""
        token_bytes = self.num_kv_heads * format_of(self.kv_format).row_bytes(self.head_dim)
        while (wanted * token_bytes % 16 != 0) != self.word_copies:
            wanted += 1
        return wanted

    def problem(self, batch: int, max_seq_len: int, group: int | None = None) -> AttentionProblem:
        return AttentionProblem.uniform(
            batch=batch,
            max_seq_len=max_seq_len,
            num_q_heads=self.num_kv_heads * (group or self.groups[0]),
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            kv_format=self.kv_format,
            q_dtype=self.q_dtype,
            aligned=not self.word_copies,
        )

    def configs(self) -> list[DecodeConfig]:
        """All that the schedule may choose, whatever the batch and the lengths."""
        found = [config for group in self.groups for config in candidate_configs(self.problem(1, 1, group))]
        return list(dict.fromkeys(found))


ONE_WARP = tuple(range(1, 9))  # query heads that a warp carries
TWO_WARPS = tuple(range(9, 17))

LAYOUTS = [
    # 16-bit caches: the number of KV heads does not matter to the kernel.
    HeadLayout("bf16", 64, 3, ONE_WARP),
    HeadLayout("bf16", 128, 1, ONE_WARP),
    HeadLayout("bf16", 128, 10, (24, 64)),
    HeadLayout("bf16", 256, 2, ONE_WARP),
    HeadLayout("fp16", 64, 12, TWO_WARPS, "fp16"),
    HeadLayout("fp16", 128, 32, ONE_WARP, "fp16"),
    HeadLayout("fp16", 256, 1, (24, 64), "fp16"),
    # INT4, all KV heads of a cache in a CTA.
    HeadLayout("int4_g1", 128, 1, ONE_WARP),
    HeadLayout("int4_g2", 128, 1, ONE_WARP),
    HeadLayout("int4_g4", 128, 1, ONE_WARP),
    HeadLayout("int4_g8", 128, 1, ONE_WARP),
    HeadLayout("int4_g8", 128, 1, (24, 64), "fp16"),
    HeadLayout("int4_g4", 128, 8, ONE_WARP),
    HeadLayout("int4_g2", 64, 3, ONE_WARP, "fp16"),
    HeadLayout("int4_g8", 64, 1, TWO_WARPS),
    HeadLayout("int4_g1", 64, 2, ONE_WARP),
    HeadLayout("int4_g1", 256, 1, ONE_WARP, "fp16"),
    HeadLayout("int4_g8", 256, 2, TWO_WARPS),
    HeadLayout("int4_g4", 256, 3, (24, 64), "fp16"),
    # INT4, a part of the heads.
    HeadLayout("int4_g8", 128, 12, ONE_WARP, "fp16"),
    HeadLayout("int4_g2", 256, 32, ONE_WARP),
    HeadLayout("int4_g1", 128, 32, ONE_WARP, "fp16"),
    HeadLayout("int4_g4", 64, 10, TWO_WARPS),
    # INT4, copied by words.
    HeadLayout("int4_g1", 128, 1, ONE_WARP, word_copies=True),
    HeadLayout("int4_g1", 128, 10, TWO_WARPS, "fp16", word_copies=True),
    HeadLayout("int4_g2", 64, 3, ONE_WARP, word_copies=True),
]


def specs() -> list[AttentionSpec]:
    """Every kernel that a call with one of `LAYOUTS` may use."""
    configs = dict.fromkeys(config for layout in LAYOUTS for config in layout.configs())
    return [AttentionSpec(config) for config in configs]
