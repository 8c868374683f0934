"""The kernels that served models need. The wheel of compiled kernels contains them and the shipped kernels.

The tables below list models that people serve, with the properties that decide which kernels they need. If another
model needs kernels that are not in the wheel, `prepare.why_not_ready` lists them when the model starts.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from cute_kernels.attention.problem import AttentionProblem
from cute_kernels.formats.kv import format_of
from cute_kernels.formats.weights import MXFP4, WeightFormat, integers
from cute_kernels.gemm.activations import ActivationFunction, ClampedSwiglu
from cute_kernels.gemm.experts.call import MAX_TOKENS
from cute_kernels.gemm.packed_experts import ExpertsForm
from cute_kernels.gemm.problem import LinearProblem
from cute_kernels.gemm.wgmma.deferred_config import GIVES, TAKES, DeferredKind
from cute_kernels.integrations import attention_kernels, expert_kernels
from cute_kernels.integrations.engine_cache import Formats
from cute_kernels.integrations.ready import specs_beside_norm, whole_specs
from cute_kernels.integrations.vllm import kv_formats, prepare
from cute_kernels.runtime.gpu import Gpu, standing_in
from cute_kernels.runtime.spec import KernelSpec

CAPTURED = (1, 2, 4, *range(8, 257, 8), *range(272, 513, 16))  # what vLLM captures
DECODED = attention_kernels.batches_up_to(512)
MOST_TOKENS = 16384  # of a step
KV_FORMATS = (
    ("e4m3_tensor", "e4m3_tensor"),
    ("int8_token_head", "int8_token_head"),
    ("e4m3_token_head", "e4m3_token_head"),
    ("int4_g4", "int4_g4"),
    ("int8_token_head", "int4_g4"),
)
"""K's and V's formats: vLLM's 8-bit caches, and those that the documentation recommends."""
COMMON = (KV_FORMATS[0], KV_FORMATS[-1])
"""vLLM's FP8 cache, and the cache that the documentation recommends first."""
PAGE_SIZE = 64  # what the plug-in prefers
DRAFTED = 3  # tokens at most: what fewer ask for, none among them, is a part of that


@dataclass(frozen=True)
class Heads:
    """A model's attention on one GPU.

    window: the window of the layers with a sliding window; None for layers without a window.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int = 128
    window: int | None = None
    sinks: bool = False
    max_model_len: int = 131072


HEADS = (
    *(Heads(32 // ranks, 8 // ranks) for ranks in (1, 2, 4, 8)),  # Llama-3 8B, Mistral, Qwen3 8B
    *(Heads(64 // ranks, 8 // ranks) for ranks in (1, 2, 4, 8)),  # Llama 70B, Qwen 72B, Qwen3 32B
    *(Heads(32 // ranks, 4 // ranks) for ranks in (1, 2, 4)),  # Qwen3-30B-A3B
    *(Heads(40 // ranks, 8 // ranks) for ranks in (1, 2, 4, 8)),  # Qwen 14B
)


WINDOWED = (
    *(Heads(64 // ranks, 8 // ranks, 64, window, sinks=True) for ranks in (1, 2) for window in (128, None)),  # gpt-oss
    *(Heads(32 // ranks, 16 // ranks, 128, window) for ranks in (1, 2) for window in (1024, None)),  # Gemma 3 27B
    *(Heads(16, 8, 256, window) for window in (1024, None)),  # Gemma 3 12B
    Heads(32, 8, 128, 4096),  # Mistral 7B v0.1
)
"""Attention of models whose layers have sliding windows or sinks."""


@dataclass(frozen=True)
class Caches:
    """The caches that a model's layers attend over.

    Attributes:
        k, v: names of the formats of K and V.
        page_size: number of tokens in a page.
        dtype: the queries' dtype.
    """

    k: str
    v: str
    page_size: int = PAGE_SIZE
    dtype: torch.dtype = torch.bfloat16

    @property
    def formats(self) -> Formats:
        return kv_formats.laid_out(Formats(format_of(self.k), format_of(self.v)))


CACHES = (
    *(Caches(*names) for names in KV_FORMATS),
    *(Caches(*names, page_size) for names in COMMON for page_size in (16, 32, 128)),  # as --block-size says
    *(Caches(*names, dtype=torch.float16) for names in COMMON),  # as many AWQ checkpoints say
)


@dataclass(frozen=True)
class Layers:
    """A model's linear layers.

    Attributes:
        shapes: (n, k) of each layer.
        sides: for each layer, GIVES if the layer's product may produce a deferred norm, TAKES if it may consume one,
            else None.
    """

    shapes: tuple[tuple[int, int], ...]
    sides: tuple[DeferredKind | None, ...] = (None,) * 4

    @classmethod
    def of(cls, hidden: int, middle: int, qkv: int, heads: int, ranks: int = 1) -> Layers:
        """Makes the layers of one of ``ranks`` GPUs from a whole model's widths.

        Args:
            hidden: the model's width.
            middle: the MLP's width.
            qkv: the width of queries, keys and values together.
            heads: the width of all query heads together.
        """
        return cls(
            (
                (qkv // ranks, hidden),
                (hidden, heads // ranks),
                (2 * middle // ranks, hidden),
                (hidden, middle // ranks),
            ),
            (TAKES, GIVES, TAKES, GIVES) if ranks == 1 else (None,) * 4,
        )


LAYERS = (
    *(Layers.of(4096, 14336, 6144, 4096, ranks) for ranks in (1, 2)),  # Llama-3 8B
    *(Layers.of(8192, 28672, 10240, 8192, ranks) for ranks in (1, 2, 4, 8)),  # Llama 70B
    *(Layers.of(5120, 17408, 7168, 5120, ranks) for ranks in (1, 2)),  # Qwen3 14B
    *(Layers.of(5120, 25600, 10240, 8192, ranks) for ranks in (1, 2)),  # Qwen3 32B
    *(Layers(((5120 // ranks, 2048), (2048, 4096 // ranks))) for ranks in (1, 2)),  # Qwen3-30B-A3B, around attention
    *(Layers(((9216 // ranks, 4096), (4096, 8192 // ranks))) for ranks in (1, 2, 4)),  # Qwen3-235B-A22B, the same
)
WEIGHTS = (
    (integers(4, 128), "bf16"),
    (integers(8, 128), "bf16"),
    *((integers(4, 128, True), dtype) for dtype in ("bf16", "fp16")),  # AWQ
    (integers(4, 128), "fp16"),
)
"""Formats of weights with dtypes of activations."""
EXPERT_WEIGHTS = (integers(4, 128), integers(8, 128), integers(4, 128, True))
"""Formats of experts' weights, with bf16 activations."""


@dataclass(frozen=True)
class Experts:
    """A model's experts on one GPU.

    Attributes:
        middle: number of features between the two products.
        topk: number of experts that a token is sent to.
        weights: the formats of the model's checkpoints.
    """

    num_experts: int
    hidden: int
    middle: int
    topk: int
    weights: tuple[WeightFormat, ...] = EXPERT_WEIGHTS
    activation: ActivationFunction = expert_kernels.SWIGLU


EXPERTS = (
    *(Experts(128, 2048, 768 // ranks, 8) for ranks in (1, 2)),  # Qwen3-30B-A3B
    *(Experts(128, 4096, 1536 // ranks, 8) for ranks in (1, 2, 4)),  # Qwen3-235B-A22B
    *(Experts(8, 4096, 14336 // ranks, 2) for ranks in (1, 2, 4, 8)),  # Mixtral 8x7B
    *(Experts(count, 2880, 2880, 4, (MXFP4,), ClampedSwiglu()) for count in (32, 128)),  # gpt-oss
)


def specs() -> list[KernelSpec]:
    """Returns the kernels of all models in the tables; needs neither vLLM nor a GPU.

    It chooses some 70,000 schedules, one for each number of rows or requests of each shape.
    """
    parts = itertools.chain(_attention(), _linear(), _experts())
    return list(dict.fromkeys(spec for part in parts for spec in part()))


Part = Callable[[], list[KernelSpec]]
"""A function that lists the kernels of one shape."""


def _attention() -> Iterator[Part]:
    for heads, caches in itertools.product(dict.fromkeys(HEADS), CACHES):
        yield functools.partial(attention_specs, heads, caches, DRAFTED)
    for heads, names in itertools.product(WINDOWED, COMMON):
        yield functools.partial(attention_specs, heads, Caches(*names), DRAFTED)


def attention_specs(heads: Heads, caches: Caches, drafted: int, batches: tuple[int, ...] = DECODED) -> list[KernelSpec]:
    """Returns the kernels of a model's attention.

    drafted: the largest number of tokens of a request in a decode step.
    """
    layer = attention_kernels.EngineLayer(
        formats=caches.formats,
        head_size=heads.head_size,
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        sliding_window=heads.window,
        sinks=heads.sinks or None,
    )
    decodes = attention_kernels.Decodes(batches, 1 + drafted, heads.max_model_len, caches.page_size, caches.dtype)
    return attention_kernels.specs_of(layer, decodes, AttentionProblem.num_sms)


def _linear() -> Iterator[Part]:
    sides: dict[tuple[int, int], DeferredKind | None] = {}
    for shape, side in (pair for layers in LAYERS for pair in zip(layers.shapes, layers.sides, strict=False)):
        sides[shape] = sides.get(shape) or side
    for ((n, k), side), (form, dtype) in itertools.product(sides.items(), WEIGHTS):
        kind = side if dtype == "bf16" else None
        yield functools.partial(linear_specs, LinearProblem(1, n, k, k, form, dtype), kind)


def linear_specs(problem: LinearProblem, kind: DeferredKind | None = None) -> list[KernelSpec]:
    """Returns the kernels of a linear layer, given as a problem of one row. kind: whether its product may produce
    (GIVES) or consume (TAKES) a deferred norm; None for neither."""
    rows = prepare.RowCounts(CAPTURED, MOST_TOKENS).all()
    beside = [] if kind is None else specs_beside_norm(problem, rows, kind)
    whole = whole_specs(problem) if kind == GIVES and problem.k > problem.n else []  # of an MLP's last layer
    return list(dict.fromkeys([*(spec for m in rows for spec in prepare.specs_for(problem, m)), *beside, *whole]))


def _experts() -> Iterator[Part]:
    for experts in EXPERTS:
        yield from (functools.partial(_experts_specs_of, experts, form) for form in experts.weights)


def _experts_specs_of(experts: Experts, form: WeightFormat) -> list[KernelSpec]:
    with standing_in(Gpu(num_sms=lambda device: AttentionProblem.num_sms)):
        return experts_specs(experts, form)


def experts_specs(experts: Experts, form: WeightFormat) -> list[KernelSpec]:
    """Returns the kernels of a layer of experts, with bf16 activations, on this machine's GPU."""
    hidden, middle = experts.hidden, experts.middle
    gate_up = ExpertsForm(experts.num_experts, 2 * middle, hidden, hidden, form, torch.bfloat16, 0)
    down = ExpertsForm(experts.num_experts, hidden, middle, middle, form, torch.bfloat16, 0)
    tokens = expert_kernels.tokens_of(prepare.RowCounts(CAPTURED, MOST_TOKENS).all(), MAX_TOKENS)
    return list(expert_kernels.specs(gate_up, down, experts.topk, tokens, False, experts.activation))
