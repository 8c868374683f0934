"""Compiles configurations into functions; no other module of attention starts the compiler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from cute_kernels.attention.arguments import COMBINE, UNPACK, decode_arguments, extend_arguments
from cute_kernels.attention.candidates import candidate_configs
from cute_kernels.attention.checks import WORD
from cute_kernels.attention.combine.config import DTYPES, NDIMS, CombineConfig
from cute_kernels.attention.decode_config import DecodeConfig
from cute_kernels.attention.extend_config import ExtendConfig
from cute_kernels.attention.extend_policies import UnpackConfig
from cute_kernels.attention.extend_schedule import choose, choose_key_rows, choose_unpacked, queries_to_unpack_for
from cute_kernels.attention.problem import AttentionProblem
from cute_kernels.formats import scores as score_options
from cute_kernels.formats.kv import KvFormat, code_of, load_code, modules_of
from cute_kernels.formats.scores.features import Features
from cute_kernels.runtime.fake_tensors import dense, element_type, strided
from cute_kernels.runtime.spec import KernelSpec, check_config

if TYPE_CHECKING:
    import cutlass.cute as cute

DENSE_PAIRS = [("bf16", "bf16"), ("fp16", "fp16")]
INT4_PAIRS = [(f"int4_g{groups}", q_dtype) for groups in (1, 2, 4, 8) for q_dtype in ("bf16", "fp16")]
BYTE_FORMATS = ("int8_token_head", "int8_tensor", "int8_channel", "e4m3_token_head", "e4m3_tensor", "e5m2")
PAGED_FORMATS = ("bf16", "int4_g1", "int4_g4", "int8_token_head", "e4m3_tensor")
EXTEND_FORMATS = ("bf16", "int8_token_head", "e4m3_token_head", "e4m3_tensor", "int4_g1", "int4_g4")
PAGED, CAUSAL_PAGES = Features(paged=True), Features(causal=True, paged=True)
SHIPPED_KV_HEADS = (1, 8, 32)  # all heads of a cache in a CTA, or 8 of them


@dataclass(frozen=True, eq=False)
class AttentionSpec(KernelSpec):
    """One kernel of attention. Its compiled function takes the arguments that :mod:`.arguments` lists for the
    configuration's class: torch tensors, addresses and integers. The function launches on torch's current stream.
    """

    config: DecodeConfig | ExtendConfig | UnpackConfig | CombineConfig
    family: ClassVar[str] = "attention"

    def policies(self) -> tuple[object, ...]:
        config = self.config
        of_formats = code_of(config.use, *config.format_names)
        return config.compiled_by, *getattr(config, "parts", ()), *of_formats, *score_options.code_of(config.features)

    def modules(self) -> tuple[str, ...]:
        of_options = score_options.modules_of(self.config.features)
        return tuple(dict.fromkeys((*modules_of(*self.config.format_names), *of_options)))

    def compile(self, arch: str) -> Any:
        return load_code(self.config.compiled_by)(self.config, arch)


def shipped_specs() -> list[KernelSpec]:
    """Returns the specs that bundles hold and CI compiles: configurations of common head layouts, and of causal extend
    attention over pages. Others compile on demand."""
    pairs = [(head_dim, *names) for head_dim in (64, 128, 256) for names in (*DENSE_PAIRS, *INT4_PAIRS)]
    pairs += [(128, name, "bf16") for name in BYTE_FORMATS]
    problems = [
        AttentionProblem.uniform(1, 4096, 8 * num_kv_heads, num_kv_heads, head_dim, kv_format, q_dtype)
        for head_dim, kv_format, q_dtype in pairs
        for num_kv_heads in SHIPPED_KV_HEADS
    ]
    problems += [
        AttentionProblem.uniform(
            2, 4096, 8 * num_kv_heads, num_kv_heads, 128, name, "bf16", page_tokens=64, features=PAGED
        )
        for name in PAGED_FORMATS
        for num_kv_heads in (1, 8)
    ]
    configs = dict.fromkeys(config for problem in problems for config in candidate_configs(problem))
    merges = [CombineConfig(dtype, ndim, states=True) for dtype in DTYPES for ndim in NDIMS]
    return [AttentionSpec(config) for config in (*configs, *merges, *_shipped_extend())]


def _shipped_extend() -> list[ExtendConfig | UnpackConfig | CombineConfig]:
    """Returns the configurations of extend attention that bundles hold: causal calls over pages of 64 tokens, and of 16
    for bf16 caches with head_dim 128."""
    problems = [AttentionProblem.ragged(128, name, name, "bf16", 64, CAUSAL_PAGES) for name in EXTEND_FORMATS]
    problems += [AttentionProblem.ragged(64, "bf16", "bf16", "bf16", 64, CAUSAL_PAGES)]
    problems += [AttentionProblem.ragged(128, "bf16", "bf16", "bf16", 16, CAUSAL_PAGES)]
    loading = [choose(problem) for problem in problems]
    many = [config for config in loading if queries_to_unpack_for(config, 1, 1, None) is not None]
    unpacked = [choose_unpacked(config) for config in many]
    few = [own for config in loading for own in choose_key_rows(config, mapped=True, tile_heads=2)]
    attention = dict.fromkeys((*loading, *few, *(config for _, config in unpacked)))
    return [*attention, *(config for config, _ in unpacked), CombineConfig("bf16")]


def compile_decode(config: DecodeConfig, arch: str, *options: str) -> Any:
    """Compiles one configuration for ``arch`` ("sm_90a") with fake tensors; needs no GPU.

    Raises ValueError if the configuration cannot be implemented.
    """
    import cutlass

    from cute_kernels.attention.decode_kernel import DecodeKernel

    check_config(config)
    declared = decode_arguments(config.features, config.page_tokens > 0)
    return declared.compile(
        DecodeKernel(config).launch, fake_tensors(config, cutlass.AddressSpace.gmem), arch, *options
    )


def fake_tensors(config: DecodeConfig, memory: cute.AddressSpace) -> dict[str, Any]:
    """Returns fake tensors for a launch, by name. The compiled function takes only tensors that match the fake ones.

    memory: the tensors' address space in the DSL: global memory, except in tests.
    """
    import cutlass
    import cutlass.cute as cute

    # Blocks begin where copies may; of rows that carry their scales most do not, and the plan knows which copies fit.
    units = {"tma": (16, 16, 16), "map": (16, 16, WORD), "bulk": (16, WORD, WORD), "word": (WORD, WORD, WORD)}

    batch, q_len, q_heads, blocks, outer, inner = (cute.sym_int() for _ in range(6))
    caches = [
        strided(
            cutlass.Uint8 if form.is_coded else element_type(form.name),
            (blocks, outer, inner, form.row_elements(head_dim)),
            units[copy],
            units[copy][0],
            memory,
        )
        for form, head_dim, copy in zip(config.formats, config.head_dims, config.copies, strict=True)
    ]
    dtype = element_type(config.q_dtype)
    q = strided(dtype, (batch, q_len, q_heads, config.head_dim), (16, 16), 16, memory)
    out = dense(dtype, (batch, q_len, q_heads, config.v_head_dim), memory=memory)
    lengths = dense(cutlass.Int32, (batch,), memory=memory)
    return {"q": q, "k_cache": caches[0], "v_cache": caches[1], "seq_lens": lengths, "out": out}


def compile_extend(config: ExtendConfig, arch: str, *options: str) -> Any:
    """Compiles one configuration for ``arch`` ("sm_90a") with fake tensors; needs no GPU.

    Raises ValueError if the configuration cannot be implemented.
    """
    import cutlass
    import cutlass.cute as cute

    from cute_kernels.attention.extend_kernel import ExtendKernel

    check_config(config)
    dtype = element_type(config.q_dtype)
    total_q, q_heads, *blocks = (cute.sym_int() for _ in range(5))

    def cache(form, cache_type):
        if cache_type is None:
            return _coded_cache(config, form, blocks)
        return strided(element_type(cache_type), (*blocks, config.head_dim), (16, 16, 16), 16)

    k_cache, v_cache = map(cache, config.formats, config.cache_types)
    rows = total_q, q_heads, config.head_dim
    tensors = {
        "q": strided(dtype, rows, (16,), 16),
        "k_cache": k_cache,
        "v_cache": v_cache,
        "cu_seqlens": dense(cutlass.Int32, (cute.sym_int(),)),
        "seq_lens": dense(cutlass.Int32, (cute.sym_int(),)),
        "out": dense(dtype, rows),
    }
    return extend_arguments(config.features).compile(ExtendKernel(config).launch, tensors, arch, *options)


def compile_unpack(config: UnpackConfig, arch: str, *options: str) -> Any:
    """Compiles the kernel that unpacks a cache, as :func:`compile_extend` compiles attention."""
    import cutlass
    import cutlass.cute as cute

    from cute_kernels.attention.loads.unpack import UnpackKernel

    check_config(config)
    dtype = element_type(config.dtype)
    *blocks, requests, heads, room = (cute.sym_int() for _ in range(6))

    k_cache, v_cache = (_coded_cache(config, form, blocks) for form in config.formats)
    tensors = {
        "k_cache": k_cache,
        "v_cache": v_cache,
        "k_rows": dense(dtype, (requests, heads, room, config.head_dim)),
        "v_rows": dense(dtype, (requests, heads, room, config.head_dim)),
        "cu_seqlens": dense(cutlass.Int32, (cute.sym_int(),)),
        "seq_lens": dense(cutlass.Int32, (cute.sym_int(),)),
    }
    return UNPACK.compile(UnpackKernel(config).launch, tensors, arch, *options)


def compile_combine(config: CombineConfig, arch: str, *options: str) -> Any:
    """Compiles the kernel that combines parts, as :func:`compile_extend` compiles attention."""
    import cutlass.cute as cute

    from cute_kernels.attention.combine.kernel import LANE_COLUMNS, CombineKernel

    check_config(config)
    outer = (cute.sym_int() for _ in range(config.ndim - 1))
    out = dense(element_type(config.dtype), (*outer, cute.sym_int(divisibility=LANE_COLUMNS)))
    return COMBINE.compile(CombineKernel(config).launch, {"out": out}, arch, *options)


def _coded_cache(config: ExtendConfig | UnpackConfig, form: KvFormat, blocks: Sequence[Any]) -> Any:
    """Returns a fake tensor for a cache of codes, whose rows may begin at any multiple of 4 bytes."""
    shape = (*blocks, form.row_elements(config.head_dim))
    return strided(element_type("e4m3"), shape, (WORD, WORD, WORD), WORD)
