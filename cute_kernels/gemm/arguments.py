"""The arguments that kernels of linear layers are launched with.

The arguments of FP8 products, and of the kernel that makes their rows of x, are in
`cute_kernels.gemm.operands.fp8_config`. Those of a layer's products in one launch are in
`cute_kernels.gemm.layer.arguments`.

Dense products (`STREAM`, `TILES` and the lists that begin with `TILES`) have these arguments:

    x                     [m, k]; k and the row stride in elements are multiples of 8; rows begin on 16 bytes
    codes                 address of uint8 [num_tiles, k_blocks * tiles of a k block, 2048]
    scales, zeros         addresses: scales of the format's dtype, and uint8 zero points, both [num_tiles, groups, 64]
    bias                  address of [n] in x's dtype, or 0
    residual              address of a matrix in x's dtype, of out's shape, or 0
    out                   address of [m, n], or of [m, n / 2] for swiglu, of the dtype ``out_kind``
    workspace             address of fp32 words; every word is EMPTY before and after the launch
    k_blocks              padded K / the configuration's block_k
    activation, out_kind  integers that stand for an activation and an output dtype: :mod:`.activations`, `.out_kinds`
    num_slices            of `STREAM`: number of slices of K
    num_groups            of `STREAM`: number of groups of CTAs; all CTAs must fit on the GPU together
    max_parts             of `STREAM`: largest number of parts of a block; workspace [blocks, max_parts, m * block_rows]
    whole                 number of tiles that are not cut; with multicast, the tiles of a cluster's CTAs count as one
    splits                number of parts of each tile that is cut, along K (no part is empty) or along rows of x. 1 if
                          the configuration cuts no tiles. A sequential reduction cuts every tile, and one CTA computes
                          all parts of a tile. workspace [tiles that are cut, splits - 1, block_rows * tile_m]
    num_ctas              number of CTAs that are launched

`INPUT_ROWS` has the arguments of the kernel that prepares rows; addresses are multiples of 16 bytes:

    x                     rows of k elements, ``stride`` elements apart, a multiple of 8
    out                   [m, k], k a multiple of 8
    order                 int32 [k]: input i of out is input order[i] of x; read only if the configuration permutes
    factors               [k] in x's dtype, in x's order; read only if the configuration scales
    parts                 number of CTAs of each row
    end                   address of an int32, the number of rows of out that are written; 0: all rows are written
    rows                  int32 [m]: row i of out is made of row rows[i] of x. 0: it is made of row i of x
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cute_kernels.formats.code import load_code
from cute_kernels.runtime.launch_arguments import LaunchArguments, arguments, joined
from cute_kernels.runtime.spec import check_config

RESULT = ("activation", "out_kind")


def matrix_arguments(addresses: tuple[str, ...], numbers: tuple[str, ...], matrix: str = "x") -> LaunchArguments:
    """Returns launch arguments: a matrix, then addresses, then int32 numbers."""
    return joined(arguments("tensor", matrix), arguments("address", *addresses), arguments("int32", *numbers))


@dataclass(frozen=True)
class CompiledAs:
    """How a configuration is compiled: its kernel class and its launch arguments.

    Attributes:
        made_by: "module:class" of the kernel, which is imported only to compile it.
        arguments: the launch arguments; the first is a row-major matrix of any size.
        dtype: dtype of the matrix; default: the configuration's.
        divisibility: a number of elements that divides the length of every row of the matrix.
        assumed_align: the alignment of the matrix's first byte, in bytes.
    """

    made_by: str
    arguments: LaunchArguments
    dtype: str = ""
    divisibility: int = 8
    assumed_align: int = 16


def code_of(config: object) -> tuple[str, ...]:
    """Returns the import paths "module:name" of the device code of a configuration's mainloop and reduction. Such code
    is imported only to compile a kernel."""
    policies = (getattr(config, name, None) for name in ("mainloop", "reduction"))
    return tuple(place for policy in policies if policy is not None for place in policy.code)


def compile_kernel(config: Any, kernel: CompiledAs, arch: str, *options: str) -> Any:
    """Compiles a configuration for ``arch`` ("sm_90a") with fake arguments; needs no GPU.

    Raises:
        ValueError: the configuration cannot be implemented.
    """
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_compact_tensor

    check_config(config)
    made = load_code(kernel.made_by)(config)
    types = {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16, "fp32": cutlass.Float32}
    types |= {"int32": cutlass.Int32, "int64": cutlass.Int64}
    shape = (cute.sym_int(), cute.sym_int(divisibility=kernel.divisibility))
    matrix = make_fake_compact_tensor(
        types[kernel.dtype or config.dtype], shape, stride_order=(1, 0), assumed_align=kernel.assumed_align
    )
    return kernel.arguments.compile(made.launch, {kernel.arguments.names[0]: matrix}, arch, *options)


DENSE_ADDRESSES = ("codes", "scales", "zeros", "bias", "residual", "out", "workspace")
STREAM = matrix_arguments(
    DENSE_ADDRESSES, ("n", "num_tiles", "k_blocks", "num_slices", "num_groups", "max_parts", *RESULT)
)  # fmt: skip
"""The arguments of `StreamKernel`."""
STREAM_KERNEL = CompiledAs("cute_kernels.gemm.stream.kernel:StreamKernel", STREAM)

TILE_NUMBERS = ("n", "num_tiles", "k_blocks", "whole", "splits", "num_ctas", *RESULT)
TILES = matrix_arguments(DENSE_ADDRESSES, TILE_NUMBERS)
"""The arguments of `WgmmaKernel` and `ResidentKernel`."""
TILES_KERNEL = CompiledAs("cute_kernels.gemm.wgmma.kernel:WgmmaKernel", TILES)

GIVES_NORM = joined(TILES.arguments, arguments("address", "norm", "scaled", "squares"), arguments("float32", "offset"))
TAKES_NORM = joined(
    TILES.arguments,
    arguments("address", "squares"),
    arguments("int32", "parts"),
    arguments("float32", "inverse_k", "eps"),
)
"""The arguments of products around a deferred norm, in addition to those of `TILES`.

`GIVES_NORM`, before the norm: norm, the norm's weight, bf16 [n], n a multiple of 256, on 16 bytes; scaled bf16 [m, n]
and squares fp32 [m, n / 64], which are written; offset, added to the norm's weight. `TAKES_NORM`, after the norm:
squares fp32 [m, parts], on 16 bytes, parts a multiple of 4; inverse_k, 1 / k; eps.
"""


INPUT_ROWS = joined(
    arguments("tensor", "out"),
    arguments("address", "x", "end", "rows", "order", "factors"),
    arguments("int64", "stride"),
    arguments("int32", "parts"),
)
