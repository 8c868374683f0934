"""Every compile-time choice of the kernels of routers, as data. No GPU types here."""

from __future__ import annotations

from dataclasses import dataclass

from cute_kernels.device.cuda import WARP_THREADS
from cute_kernels.gemm.arguments import CompiledAs
from cute_kernels.gemm.experts.arguments import ROUTING
from cute_kernels.gemm.experts.router.arguments import ROUTER, SELECT
from cute_kernels.gemm.experts.schedule import MAX_EXPERTS
from cute_kernels.runtime.spec import one_of

WARPS = 8
SORTING_WARPS = 32
MAX_TOKENS = 64  # the most tokens of a launch that computes the product, too
MAX_CHOICES = WARP_THREADS  # the most experts of a token, and groups: one for each lane
LANE_EXPERTS = (4, 8, 16)
TILE_TOKENS = (1, 8)
LOGITS, IDS = "logits", "ids"


@dataclass(frozen=True)
class RouterConfig:
    """The configuration of one of three kernels that run before the products. Two choose experts: one from hidden
    states of up to `MAX_TOKENS` tokens, one from logits of any number of tokens. The third sorts assignments by expert,
    from ids.

    Attributes:
        dtype: dtype of hidden states. For a kernel from logits, dtype of a bias or correction that is not fp32. For a
            kernel from ids, "int32" or "int64".
        weight: for a kernel from hidden states, the dtype of the router's weight: "own" (``dtype``) or "fp32". `LOGITS`
            or `IDS` for the two other kernels.
        lane_experts: number of a token's scores that a lane has. There may be 32 times as many experts.
        tile_tokens: number of tokens for which a thread adds up products at the same time.
    """

    dtype: str = "bf16"
    weight: str = "own"
    lane_experts: int = 4
    tile_tokens: int = 1

    @property
    def num_threads(self) -> int:
        return (SORTING_WARPS if self.weight == IDS else WARPS) * WARP_THREADS

    @property
    def id_words(self) -> int:
        """Number of 32-bit words that an id takes."""
        return 2 if self.dtype == "int64" else 1

    def kernel(self) -> CompiledAs:
        """Returns how the configuration's kernel is compiled."""
        if self.weight == IDS:
            made_by = "cute_kernels.gemm.experts.routing:RoutingKernel"
            return CompiledAs(made_by, ROUTING, divisibility=1, assumed_align=4 * self.id_words)
        if self.weight == LOGITS:
            return CompiledAs("cute_kernels.gemm.experts.router.kernel:SelectKernel", SELECT, "fp32", 1, 4)
        return CompiledAs("cute_kernels.gemm.experts.router.kernel:RouterKernel", ROUTER)

    @property
    def name(self) -> str:
        experts = 32 * self.lane_experts
        if self.weight == IDS:
            return f"moe_routing_i{32 * self.id_words}_pdl"
        if self.weight == LOGITS:
            return f"moe_select_{self.dtype}_e{experts}_pdl"
        weight = "" if self.weight == "own" else f"_w{self.weight}"
        return f"moe_router_{self.dtype}{weight}_e{experts}t{self.tile_tokens}_pdl"

    def can_implement(self) -> str | None:
        """Returns why this configuration cannot be compiled, or None."""
        return (
            one_of(self.dtype, ("int32", "int64") if self.weight == IDS else ("bf16", "fp16"), "dtype")
            or one_of(self.weight, ("own", "fp32", LOGITS, IDS), "weight")
            or one_of(self.tile_tokens, TILE_TOKENS, "tile_tokens")
            or one_of(self.lane_experts, LANE_EXPERTS, "lane_experts")
        )


def lane_experts_of(experts: int) -> int:
    """Returns the smallest of `LANE_EXPERTS` that is enough for ``experts`` experts. There are at most MAX_EXPERTS."""
    return next(count for count in LANE_EXPERTS if experts <= count * WARP_THREADS)


assert LANE_EXPERTS[-1] * WARP_THREADS == MAX_EXPERTS
