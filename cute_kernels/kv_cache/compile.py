"""Compiles configurations into functions. In kv_cache, only this module and `.step_compile` start the compiler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from cute_kernels.formats.kv import FORMATS, code_of, format_of, modules_of
from cute_kernels.kv_cache.arguments import FILL, append_arguments, bulk_arguments
from cute_kernels.kv_cache.config import DTYPES, AppendConfig, BulkConfig, RowPrologue, WrittenRows, row_alignment
from cute_kernels.runtime.fake_tensors import dense, element_type, strided
from cute_kernels.runtime.spec import KernelSpec, check_config
from layouts.kv.channel_blocks import TAIL_TOKENS

if TYPE_CHECKING:
    import cutlass.cute as cute

    from cute_kernels.device.rows import Elements

SHIPPED_SMALL_FORMATS = ("bf16", "int4_g1", "int4_g4")  # at head_dim 64 and 256


class _RowSpec(KernelSpec):
    """The base of the specs of kernels that read or write cache rows."""

    family: ClassVar[str] = "kv_cache"

    def policies(self) -> tuple[object, ...]:
        return code_of("write", *self.formats)

    def modules(self) -> tuple[str, ...]:
        return modules_of(*self.formats)

    @property
    def formats(self) -> tuple[str, ...]:
        """Names of the rows' formats."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class AppendSpec(_RowSpec):
    """One append kernel; :mod:`cute_kernels.kv_cache.arguments` lists the compiled function's arguments."""

    config: AppendConfig

    @property
    def formats(self) -> tuple[str, ...]:
        return self.config.k.format, self.config.v.format

    def compile(self, arch: str) -> Any:
        import cutlass

        from cute_kernels.kv_cache.kernel import AppendKernel

        check_config(self.config)
        tensors = fake_tensors(self.config, cutlass.AddressSpace.gmem)
        declared = append_arguments(self.config.transform is not None)
        return declared.compile(AppendKernel(self.config).launch, tensors, arch)


@dataclass(frozen=True, eq=False)
class FillSpec(_RowSpec):
    """The kernel that fills blocks of keys; the compiled function takes `cute_kernels.kv_cache.arguments.FILL`."""

    config: WrittenRows

    @property
    def formats(self) -> tuple[str, ...]:
        return (self.config.format,)

    @property
    def symbol(self) -> str:
        return f"fill_{self.config.format}_d{self.config.head_dim}"

    def compile(self, arch: str) -> Any:
        import cutlass

        from cute_kernels.kv_cache.channel_blocks_kernel import FillKernel

        if not self.config.form.in_blocks:
            raise ValueError(f"config: {self.config.format} rows are written token by token")
        tensors = fake_fill_tensors(self.config, cutlass.AddressSpace.gmem)
        return FILL.compile(FillKernel(self.config).launch, tensors, arch)


@dataclass(frozen=True, eq=False)
class BulkSpec(_RowSpec):
    """One bulk kernel; :mod:`cute_kernels.kv_cache.arguments` lists the compiled function's arguments."""

    config: BulkConfig

    @property
    def formats(self) -> tuple[str, ...]:
        return (self.config.kv_format,)

    def compile(self, arch: str) -> Any:
        import cutlass.cute as cute

        from cute_kernels.kv_cache.bulk import BulkKernel

        config = self.config
        check_config(config)
        kernel = BulkKernel(config)
        shape = cute.sym_int(), config.head_dim
        numbers = dense(element_type(config.dtype), shape, kernel.elements.piece.unit)
        declared = bulk_arguments(config.transform is not None)
        return declared.compile(kernel.launch, {"numbers": numbers}, arch)


def shipped_specs() -> list[KernelSpec]:
    """Returns the specs that bundles hold and CI compiles: appends with RoPE over the whole head, in half-split pairs
    as in Llama. Each has a variant for decode and a variant for all other calls.

    Everything else (other head dimensions, mixed formats, partial or interleaved RoPE, bulk) compiles on demand.
    """
    pairs = [
        (name, dtype)
        for name in FORMATS
        for dtype in DTYPES
        if name not in DTYPES or name == dtype  # 16-bit caches: those of the model's dtype
    ]
    configs = [AppendConfig.alike(name, dtype, 128, RowPrologue("half", 128)) for name, dtype in pairs]
    configs += [
        AppendConfig.alike(name, "bf16", head_dim, RowPrologue("half", head_dim))
        for head_dim in (64, 256)
        for name in SHIPPED_SMALL_FORMATS
    ]
    return [AppendSpec(kernel) for config in configs for kernel in (config.for_decode(), config)]


def fake_tensors(config: AppendConfig, memory: cute.AddressSpace) -> dict[str, Any]:
    """Returns fake tensors for an append, by name. A compiled function takes only tensors that match the fake ones.

    memory: the tensors' address space in the DSL: global memory, except in tests.
    """
    import cutlass
    import cutlass.cute as cute

    from cute_kernels.kv_cache.kernel import AppendKernel

    kernel = AppendKernel(config)

    def rows(heads: cute.SymInt, elements: Elements, head_dim: int):
        unit = elements.piece.unit
        return strided(element_type(config.dtype), (num_tokens, heads, head_dim), (unit,), unit, memory)

    def cache(kv_format: str, head_dim: int):
        form = format_of(kv_format)
        element = element_type(form.codes) if form.codes in DTYPES else cutlass.Uint8
        align = row_alignment(kv_format, head_dim, config.lanes, config.runs)
        pages = (cute.sym_int(), cute.sym_int()) if form.by_token else (num_pages, page_size)
        return strided(element, (*pages, kv_heads, form.row_elements(head_dim)), (align,) * 3, align, memory)

    num_tokens, q_heads, kv_heads, num_pages, page_size = (cute.sym_int() for _ in range(5))
    k_dim, v_dim = config.k.head_dim, config.v.head_dim
    return {
        "q": rows(q_heads, kernel.k_elements, k_dim),
        "k": rows(kv_heads, kernel.k_elements, k_dim),
        "v": rows(kv_heads, kernel.v_elements, v_dim),
        "q_out": rows(q_heads, kernel.k_elements, k_dim),
        "k_cache": cache(config.k.format, k_dim),
        "v_cache": cache(config.v.format, v_dim),
        "seq_lens": dense(cutlass.Int32, (cute.sym_int(),), memory=memory),
        "block_table": dense(cutlass.Int32, (cute.sym_int(), cute.sym_int()), memory=memory),
    }


def fake_fill_tensors(keys: WrittenRows, memory: cute.AddressSpace) -> dict[str, Any]:
    """Returns fake tensors for the kernel that fills blocks of keys, by name."""
    import cutlass
    import cutlass.cute as cute

    batch, heads = cute.sym_int(), cute.sym_int()
    rows = cute.sym_int(), cute.sym_int(), heads, keys.form.row_bytes(keys.head_dim)
    return {
        "k_new": dense(cutlass.Float16, (cute.sym_int(), heads, keys.head_dim), memory=memory),
        "k_tail": dense(cutlass.Float16, (cute.sym_int(), TAIL_TOKENS, heads, keys.head_dim), memory=memory),
        "tail_slots": dense(cutlass.Int32, (batch,), memory=memory),
        "k_cache": strided(cutlass.Uint8, rows, (4, 4, 4), 4, memory),
        "seq_lens": dense(cutlass.Int32, (batch,), memory=memory),
    }
