"""From a configuration to a compiled function; the only module of this room that starts the compiler."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from cute_kernels.attention.arguments import arguments_of
from cute_kernels.attention.candidates import candidate_configs
from cute_kernels.attention.checks import WORD
from cute_kernels.attention.config import DecodeConfig
from cute_kernels.attention.features import Features
from cute_kernels.attention.merge_states import merge_specs
from cute_kernels.attention.problem import DecodeProblem
from cute_kernels.formats import scores as score_options
from cute_kernels.formats.kv import code_of, modules_of
from cute_kernels.runtime.spec import KernelSpec, check_config

if TYPE_CHECKING:
    import cutlass.cute as cute

DENSE_PAIRS = [("bf16", "bf16"), ("fp16", "fp16")]
INT4_PAIRS = [(f"int4_g{groups}", q_dtype) for groups in (1, 2, 4, 8) for q_dtype in ("bf16", "fp16")]
BYTE_FORMATS = ("int8_token_head", "int8_tensor", "int8_channel", "e4m3_token_head", "e4m3_tensor", "e5m2")
PAGED_FORMATS = ("bf16", "int4_g1", "int4_g4", "int8_token_head", "e4m3_tensor")
PAGED = Features(paged=True)
SHIPPED_KV_HEADS = (1, 8, 32)  # all heads of a cache in a CTA, or 8 of them


@dataclass(frozen=True, eq=False)
class DecodeSpec(KernelSpec):
    """One decode attention kernel.

    The function takes what :mod:`cute_kernels.attention.arguments` lists: torch tensors as they are, then addresses and
    numbers. It runs on torch's current stream.
    """

    config: DecodeConfig
    family: ClassVar[str] = "attention"

    def policies(self) -> tuple[object, ...]:
        of_formats = code_of("decode", self.config.k_format, self.config.v_format)
        return *of_formats, *score_options.code_of(self.config.features)

    def modules(self) -> tuple[str, ...]:
        of_formats = modules_of(self.config.k_format, self.config.v_format)
        return tuple(dict.fromkeys((*of_formats, *score_options.modules_of(self.config.features))))

    def compile(self, arch: str) -> Any:
        return compile_decode(self.config, arch)


def shipped_specs() -> list[KernelSpec]:
    """What bundles hold and the gates compile: configurations of common head layouts. Others compile on demand."""
    pairs = [(head_dim, *names) for head_dim in (64, 128, 256) for names in (*DENSE_PAIRS, *INT4_PAIRS)]
    pairs += [(128, name, "bf16") for name in BYTE_FORMATS]
    problems = [
        DecodeProblem.uniform(1, 4096, 8 * num_kv_heads, num_kv_heads, head_dim, kv_format, q_dtype)
        for head_dim, kv_format, q_dtype in pairs
        for num_kv_heads in SHIPPED_KV_HEADS
    ]
    problems += [
        DecodeProblem.uniform(
            2, 4096, 8 * num_kv_heads, num_kv_heads, 128, name, "bf16", page_tokens=64, features=PAGED
        )
        for name in PAGED_FORMATS
        for num_kv_heads in (1, 8)
    ]
    configs = dict.fromkeys(config for problem in problems for config in candidate_configs(problem))
    return [*(DecodeSpec(config) for config in configs), *merge_specs()]


def compile_decode(config: DecodeConfig, arch: str, *options: str) -> Any:
    """Compiles one configuration for ``arch`` ("sm_90a") with fake tensors; needs no GPU.

    Raises ValueError if the configuration cannot be implemented.
    """
    import cutlass

    from cute_kernels.attention.kernel import DecodeKernel

    check_config(config)
    declared = arguments_of(config.features, config.page_tokens > 0)
    return declared.compile(
        DecodeKernel(config).launch, fake_tensors(config, cutlass.AddressSpace.gmem), arch, *options
    )


def fake_tensors(config: DecodeConfig, memory: cute.AddressSpace) -> dict[str, Any]:
    """What stands for the tensors of a launch, by name; a compiled function takes only what fits them.

    memory: the DSL's address space of the tensors, that of the GPU's global memory but for tests.
    """
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_tensor

    float_type = {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16}

    def tensor(dtype, shape, align):
        order = tuple(reversed(range(len(shape))))
        return make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=align, memspace=memory)

    def strided(dtype, shape, units, align):
        """The first dimensions have any strides that are multiples of ``units`` bytes, others follow from the shape."""
        strides = [cute.sym_int64(divisibility=unit * 8 // dtype.width) for unit in units]
        dense = [math.prod(shape[i + 1 :]) for i in range(len(units), len(shape))]
        return make_fake_tensor(dtype, shape, stride=(*strides, *dense), assumed_align=align, memspace=memory)

    # Blocks begin where copies may; of rows that carry their scales most do not, and the plan knows which copies fit.
    units = {"tma": (16, 16, 16), "map": (16, 16, WORD), "bulk": (16, WORD, WORD), "word": (WORD, WORD, WORD)}

    batch, q_len, q_heads, blocks, outer, inner = (cute.sym_int() for _ in range(6))
    caches = [
        strided(
            float_type.get(form.name, cutlass.Uint8),
            (blocks, outer, inner, form.row_elements(head_dim)),
            units[copy],
            units[copy][0],
        )
        for form, head_dim, copy in zip(config.formats, config.head_dims, config.copies, strict=True)
    ]
    q = strided(float_type[config.q_dtype], (batch, q_len, q_heads, config.head_dim), (16, 16), 16)
    out = tensor(float_type[config.q_dtype], (batch, q_len, q_heads, config.v_head_dim), 16)
    lengths = tensor(cutlass.Int32, (batch,), 4)
    return {"q": q, "k_cache": caches[0], "v_cache": caches[1], "seq_lens": lengths, "out": out}
