"""What a kernel is launched with beside its matrix: declared once, by name, for the compiler, the host and a check.

A compiled function takes x, then addresses, then integers, by position. `Arguments` says which. The compiler's fake
arguments are made of it. A plan puts its numbers in order by their names. A kernel whose ``__call__`` has others is not
compiled.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from cute_kernels.runtime.spec import check_config, compile_matrix_kernel

ADDRESS, NUMBER = "Int64", "Int32"  # as kernels annotate them
RESULT = ("activation", "out_kind")


@dataclass(frozen=True)
class Arguments:
    """Names of a kernel's arguments between its matrix and the stream, in order.

    Attributes:
        addresses: 64-bit, of device memory, 0 for none.
        numbers: 32-bit.
    """

    addresses: tuple[str, ...]
    numbers: tuple[str, ...]

    def between(self, first: str, last: str, **values: int) -> tuple[int, ...]:
        """The numbers behind ``first`` and before ``last``, in order: what a plan knows of a launch.

        Raises:
            TypeError: one of them is missing, or a value is none of them; the message names it.
        """
        names = self.numbers[self.numbers.index(first) + 1 : self.numbers.index(last)]
        for name in values:
            if name not in names:
                raise TypeError(f"{name}: got a number of that name, want {', '.join(names)}")
        for name in names:
            if name not in values:
                raise TypeError(f"{name}: got no such number, want {', '.join(names)}")
        return tuple(values[name] for name in names)

    def check(self, kind: type[Any]) -> None:
        """Raises TypeError unless ``__call__`` of a kind of kernels has these arguments, with these types."""
        _, *parameters, stream = inspect.signature(kind.__call__).parameters.values()
        found = [(parameter.name, _type_name(parameter.annotation)) for parameter in parameters[1:]]
        wanted = [(name, ADDRESS) for name in self.addresses] + [(name, NUMBER) for name in self.numbers]
        if found != wanted or stream.name != "stream":
            odd = next((a for a, b in zip(found, wanted, strict=False) if a != b), (len(found), stream.name))
            raise TypeError(f"{kind.__name__}.__call__: got {odd}, want {wanted}, then the stream")


def _type_name(annotation: object) -> str:
    return annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))


def compile_kernel(
    kind: type[Any], config: Any, arguments: Arguments, arch: str, *options: str, dtype: str = "", **matrix: int
) -> Any:
    """Compiles a configuration's kernel for ``arch`` ("sm_90a") with fake arguments; needs no GPU.

    Args:
        kind: of the kernel, made of the configuration.
        dtype: of the matrix, default the configuration's.
        options, matrix: as of `compile_matrix_kernel`.

    Raises:
        ValueError: the configuration cannot be implemented.
        TypeError: the kernel has other arguments.
    """
    check_config(config)
    arguments.check(kind)
    counts = len(arguments.addresses), len(arguments.numbers)
    return compile_matrix_kernel(kind(config), dtype or config.dtype, counts, arch, *options, **matrix)


DENSE_ADDRESSES = ("codes", "scales", "zeros", "bias", "residual", "out", "workspace")
STREAM = Arguments(
    DENSE_ADDRESSES, ("n", "num_tiles", "k_blocks", "num_slices", "num_groups", "max_parts", *RESULT)
)  # fmt: skip
"""Of `linear.kernel.LinearKernel`."""

TILES = Arguments(DENSE_ADDRESSES, ("n", "num_tiles", "k_blocks", "whole", "splits", "num_ctas", *RESULT))
"""Of `WgmmaKernel`, `ResidentKernel` and `PortableKernel`."""

FACTORED_TILES = Arguments((*DENSE_ADDRESSES, "factors"), (*TILES.numbers, "eps", "offset"))
"""Of `FactoredResidentKernel`."""

LIMB_TILES = Arguments(
    ("codes", "scales", "limbs", "bias", "residual", "out", "workspace"), (*TILES.numbers, "block_rows")
)
"""Of `LimbWgmmaKernel`."""

LIMB_ROWS = Arguments(("end", "rows", "out", "scales"), ("places", "groups", "pitch"))
LIMB_BLOCKS = Arguments(("out",), ("rows", "groups"))
