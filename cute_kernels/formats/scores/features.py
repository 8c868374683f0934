"""`Features`, the compile-time record of what a call of attention computes in addition to softmax(q K^T) V. There are
no GPU types here."""

from __future__ import annotations

from dataclasses import dataclass

BIAS_DTYPES = ("fp32", "bf16")
WIDEST_RESTORED = 128  # columns of a Hadamard block: 4 of each lane of a warp


@dataclass(frozen=True)
class Features:
    """The features of a compiled variant of attention. By default, it is a plain call of one query on dense caches.

    The values of features (the width of the window, the cap, addresses, strides) are arguments of the launch.

    Attributes:
        queries: a request has several queries (q_len > 1).
        causal: the queries of a request differ in the keys that they see.
        window: a query does not see keys that are farther back than the window.
        soft_cap: scores go through cap * tanh(score / cap).
        sinks: every query head has one more logit in the denominator.
        alibi: scores get slope * (key position - query position).
        shift: softmax_scale times q . k_center, one number per query, is added to scores before a soft cap. The center
            of a transformed cache has lowered q . k by q . k_center.
        v_rotation: number of columns of the Hadamard blocks by which the output is rotated back, up to
            `WIDEST_RESTORED`; 1 for no rotation.
        v_factor: the output's columns are multiplied by factors, one per KV head and column.
        bias: dtype of an additive bias, "fp32" or "bf16"; None without one.
        terms: names of registered options (:mod:`cute_kernels.formats.scores`), in order.
        paged: tokens are found through a block table.
        head_major: caches are "HND": the tokens of one head are contiguous.
        tail: keys have a format in blocks; the keys of the newest block are kept outside the cache.
        by_head: each KV head of a request reads only the blocks in its own list. Blocks consist of pages.
    """

    queries: bool = False
    causal: bool = False
    window: bool = False
    soft_cap: bool = False
    sinks: bool = False
    alibi: bool = False
    shift: bool = False
    v_rotation: int = 1
    v_factor: bool = False
    bias: str | None = None
    terms: tuple[str, ...] = ()
    paged: bool = False
    head_major: bool = False
    tail: bool = False
    by_head: bool = False

    def __post_init__(self) -> None:
        if self.bias is not None and self.bias not in BIAS_DTYPES:
            raise ValueError(f"bias: got {self.bias!r}, want None or one of {', '.join(map(repr, BIAS_DTYPES))}")

    @property
    def transformed(self) -> bool:
        """Whether a launch takes the arguments that undo a cache's transform."""
        return self.shift or self.restores

    @property
    def restores(self) -> bool:
        """Whether the launch undoes V's transform in the output."""
        return self.v_rotation > 1 or self.v_factor

    def problem(self, v_head_dim: int) -> str | None:
        """Returns why these features are impossible for outputs of ``v_head_dim`` columns, or None."""
        width = self.v_rotation
        if not 1 <= width <= WIDEST_RESTORED or width & (width - 1):
            return f"v_rotation {width} is not a power of two up to {WIDEST_RESTORED}"
        if width > 1 and v_head_dim & (v_head_dim - 1):
            return f"v_rotation {width} of a v_head_dim of {v_head_dim}"
        return None

    @property
    def name(self) -> str:
        """The features' part of a kernel's name, such as "causal_window" or "bias_bf16_paged"; "" without features."""
        names = [
            name
            for name in ("queries", "causal", "window", "soft_cap", "sinks", "alibi", "shift", "v_factor")
            if getattr(self, name)
        ]
        names += [f"v{self.v_rotation}"] if self.v_rotation > 1 else []
        names += [f"bias_{self.bias}"] if self.bias else []
        names += self.terms
        return "_".join(names + [name for name in ("paged", "head_major", "tail", "by_head") if getattr(self, name)])


PLAIN = Features()
