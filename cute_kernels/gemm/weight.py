"""`PackedWeight`: the quantised weight of a linear layer as the kernels read it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import InitVar, dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch.compiler import is_compiling

from cute_kernels import arguments, blocks
from cute_kernels.formats.weights import GROUP_SIZES, WeightFormat, integers, weight_format
from cute_kernels.formats.weights.base import spelling, without_row_scales
from cute_kernels.formats.weights.integers import SCALE_DTYPES as SCALE_DTYPES
from cute_kernels.gemm.packed import Packed, kept
from cute_kernels.runtime.gpu import GPU
from cute_kernels.runtime.plans import ALIGNMENT
from layouts.transform import Transform, unpack
from layouts.weights import hopper

TILE_N = hopper.TILE_N
TILE_BYTES = hopper.TILE_BYTES
K_MULTIPLE = 64
FORMAT_VERSION = 1  # of state dicts: "format" says bits and group size of integers,
KEY_VERSION = 2  # or the bytes of another format's key
TENSOR_NAMES = ("codes", "scales", "zeros", "perm", "input_scale")
_COPIED = TENSOR_NAMES[:3]  # 16 bytes at a time; the others are read in any place
BLOCK_ELEMENTS = 1 << 21  # of a weight that is unpacked at a time: 8 MB in fp32, which caches hold
GPU_BLOCK_ELEMENTS = 1 << 24  # on a GPU, where a block is some 50 launches: 2M elements take 10 us, launches 500


@lru_cache(maxsize=1024)
def _unpacking(n: int, k: int, bits: int) -> Transform:
    """Returns the transform from packed codes of a weight [n, k] to rows. It is cached, as computing it takes longer
    than applying it to a small weight."""
    return hopper.transform(n, k, bits).inverse()


def symmetric_zero(bits: int) -> int:
    """Returns the code that stands for 0 in an integer weight without stored zero points: 8 for codes of 4 bits, 128
    for codes of 8 bits."""
    return 1 << (bits - 1)


def _share_of_groups(tensor: torch.Tensor, rank: int, world_size: int, more: int) -> torch.Tensor:
    """Cuts a tensor [tiles, G + more, 64] along its groups. Returns a rank's share of the first G groups, followed by
    the last ``more`` groups."""
    groups = tensor.shape[1] - more
    own = tensor[:, :groups].chunk(world_size, dim=1)[rank]
    return torch.cat((own, tensor[:, groups:]), dim=1) if more else own.contiguous()


def padded_shape(shape: tuple[int, int], group_size: int | None) -> tuple[int, int]:
    """Returns (N_pad, K_pad) of a weight [N, K]: N in whole tiles of 64, K in whole groups and multiples of 64."""
    (n, k), k_multiple = shape, max(K_MULTIPLE, group_size or 0)
    return -(-n // TILE_N) * TILE_N, -(-k // k_multiple) * k_multiple


def scales_of(weight: PackedWeight, groups: slice | torch.Tensor) -> torch.Tensor:
    """Returns a weight's stored scales [N_pad, ...] for the groups at ``groups``, with the second-level scales after
    them."""
    scales, more = rows_of(weight.scales), weight.format.more_groups
    own = scales[:, : scales.shape[1] - more][:, groups]
    return torch.cat((own, scales[:, scales.shape[1] - more :]), dim=1) if more else own


def codes_of_rows(weight: PackedWeight, first: int, last: int) -> torch.Tensor:
    """Returns codes uint8 [last - first, K_pad] of rows ``first`` to ``last`` - 1, in packed order."""
    tile = first // TILE_N
    return weight.unpack_tiles(tile, -(-last // TILE_N))[first - tile * TILE_N : last - tile * TILE_N]


def num_groups(shape: tuple[int, int], group_size: int | None) -> int:
    """Returns the number of groups along the padded K; 1 without groups."""
    return padded_shape(shape, group_size)[1] // group_size if group_size else 1


def row_blocks(num_tiles: int, k: int, device: torch.device) -> Iterator[tuple[int, int]]:
    """Yields ranges (first, last) of tiles of 64 rows, ``last`` excluded, that together cover ``num_tiles`` tiles. The
    device decides how long a range is. k: number of weights of a row.
    """
    usual = BLOCK_ELEMENTS if device.type == "cpu" else GPU_BLOCK_ELEMENTS
    step = max(1, blocks.elements(usual) // (TILE_N * k))
    for first in range(0, num_tiles, step):
        yield first, min(first + step, num_tiles)


class WeightForm(NamedTuple):
    """The static properties of a `PackedWeight`: everything but the contents of tensors.

    Attributes:
        perm, input_scale: the tensor's address modulo 16, or None if there is no such tensor.
        device_index: index of the GPU, -1 on a CPU.
    """

    format: WeightFormat
    shape: tuple[int, int]
    scale_dtype: torch.dtype
    device_index: int
    perm: int | None
    input_scale: int | None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the activations that the weight takes."""
        return self.format.activation_dtype(self.scale_dtype)

    @property
    def comes_as_it_is(self) -> bool:
        """Whether rows of x are multiplied unchanged: the weight has neither act-order nor input scales."""
        return self.perm is self.input_scale is None


class WeightTensors(NamedTuple):
    """The fields of a `PackedWeight`, without checks. A layer makes such an object from its own tensors in each
    call."""

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    format: WeightFormat
    shape: tuple[int, int]
    perm: torch.Tensor | None = None
    input_scale: torch.Tensor | None = None

    @property
    def form(self) -> WeightForm:
        """The form of a `PackedWeight` with these tensors. Each call of a layer computes this form, so the fastest
        constructor, `tuple.__new__`, makes it."""
        perm, scale, at = self.perm, self.input_scale, self.codes.get_device()
        past = None if perm is None else perm.data_ptr() % ALIGNMENT
        scale_past = None if scale is None else scale.data_ptr() % ALIGNMENT
        return tuple.__new__(WeightForm, (self.format, self.shape, self.scales.dtype, at, past, scale_past))

    @property
    def dtype(self) -> torch.dtype:
        return self.format.activation_dtype(self.scales.dtype)

    @property
    def device(self) -> torch.device:
        return self.codes.device


@dataclass(frozen=True, eq=False, repr=False)
class PackedWeight(Packed):
    """A weight [N, K] (out_features, in_features) in 4- or 8-bit codes of a format. For integers W[n, k] = (code -
    zero) * scale.

    All kernels of the family read the same tensors. N and K are padded to N_pad and K_pad (`padded_shape`); G is the
    number of groups along K_pad. A weight's value is exact in fp32, and rounded once.

    Args:
        codes: uint8 [N_pad / 64, K_pad / tile_k, 2048], unsigned codes in the order of `layouts.weights.hopper`; tile_k
            is 64 for 4-bit codes and 32 for 8-bit ones. bf16 and fp16 activations read the same bytes.
        scales: [N_pad / 64, G, 64]. Scales of integer formats have the dtype of the activations, bf16 (below 2**27) or
            fp16; scales of other formats have `WeightFormat.scale_dtype`. Scales of a second level are stored as
            additional groups after the G groups.
        zeros: uint8 [N_pad / 64, G, 64] for a format with zero points (0 to 16 with 4-bit codes), else None. Integers
            without zero points have zero at code 8 or 128.
        format: `cute_kernels.formats.weights.integers(bits, group_size, zero_points)`, or another one.
        shape: (N, K), without padding.
        perm: int32 [K], a permutation, or None: position i of the packed K axis takes input perm[i] (act-order).
        input_scale: [K] in the dtype of the activations, or None: numbers by which inputs are multiplied first (AWQ's
            pre-scale).
        check_values: whether the values of scales, zeros and perm are checked, which waits for a GPU. Give False for
            tensors of a weight that was checked before. Values of tensors without data (meta, fake) are never checked,
            nor while torch.compile traces or a CUDA graph is captured.

    On a GPU, codes, scales and zeros must start on 16 bytes. torch allocates tensors so, but a view into a larger
    buffer may start elsewhere.

    Raises:
        TypeError, ValueError: a field is not as above; the message names it.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    format: WeightFormat
    shape: tuple[int, int]
    perm: torch.Tensor | None = None
    input_scale: torch.Tensor | None = None
    check_values: InitVar[bool] = True

    # Importers of other projects' layers, which `cute_kernels._weight_importers` puts here: they call this module.
    from_awq: ClassVar[Callable[..., PackedWeight]]
    from_gptq: ClassVar[Callable[..., PackedWeight]]
    from_compressed_tensors: ClassVar[Callable[..., PackedWeight]]
    from_hqq: ClassVar[Callable[..., PackedWeight]]
    from_torchao: ClassVar[Callable[..., PackedWeight]]
    from_fastertransformer: ClassVar[Callable[..., PackedWeight]]

    tensor_names: ClassVar[tuple[str, ...]] = TENSOR_NAMES
    _is_hf_initialized = True  # what transformers' initialisation of a loaded model asks each `weight` that it finds

    def __post_init__(self, check_values: bool) -> None:
        check_weight_format(self.format)
        arguments.check_matrix_shape("shape", self.shape)
        arguments.check_tensors(codes=self.codes, scales=self.scales)
        n_pad, k_pad = padded_shape(self.shape, self.group_size)
        tiles, k = n_pad // TILE_N, self.shape[1]
        groups = num_groups(self.shape, self.group_size)
        dtype = self.format.activation_dtype(self.scales.dtype)
        check_presence(self.zeros, self.format)
        self._check("codes", torch.uint8, (tiles, k_pad // hopper.tile_k(self.bits), TILE_BYTES))
        self._check("scales", self.scales.dtype, (tiles, groups + self.format.more_groups, TILE_N))
        self._check("zeros", torch.uint8, (tiles, groups, TILE_N))
        self._check("perm", torch.int32, (k,))
        self._check("input_scale", dtype, (k,))
        arguments.check_flag("check_values", check_values)
        if check_values and has_values(self.codes):
            self.format.check_values(self.scales[:, :groups], self.zeros)
            if self.perm is not None:
                arguments.check_permutation("perm", self.perm)

    def _check(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        tensor = getattr(self, name)
        if tensor is None:
            return
        arguments.check_tensors(**{name: tensor})
        arguments.check_dtype(name, tensor, dtype)
        if tuple(tensor.shape) != shape:
            n, k = self.shape
            kind = f"{self.bits}-bit [{n}, {k}] in {f'groups of {self.group_size}' if self.group_size else 'rows'}"
            raise ValueError(f"{name}: got shape {list(tensor.shape)}, want {list(shape)} for a weight of {kind}")
        arguments.check_contiguous(name, tensor)
        arguments.check_place(name, tensor, self.codes.device, "codes")
        if name in _COPIED:
            check_start(name, tensor)

    @kept
    def form(self) -> WeightForm:
        """The fields that decide a plan for this weight. Addresses of tensors are not among them, except the alignment
        of perm and input_scale.
        """
        fields = self.codes, self.scales, self.zeros, self.format, self.shape, self.perm, self.input_scale
        return WeightTensors(*fields).form

    def __repr__(self) -> str:
        n, k = self.shape
        parts = [self.format.label, f"[{n}, {k}]", f"group_size={self.group_size}", str(self.dtype)]
        parts += [f"with {name}" for name in ("zeros", "perm", "input_scale") if getattr(self, name) is not None]
        return f"PackedWeight({', '.join(parts)}, {self.nbytes / 1e6:.1f} MB on {self.device})"

    @classmethod
    def __torch_function__(cls, *_: object, **__: object) -> Any:
        """Refuses all functions of torch, since none supports a packed weight. nn.TransformerEncoder calls a fused
        function only if no `weight` has this method.
        """
        return NotImplemented

    # -- values ------------------------------------------------------------------------------------------------------

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Returns W [N, K] in ``dtype``, default the weight's own ``dtype``, with inputs in their own order: perm is
        undone.

        `input_scale` is not multiplied in: a layer computes (x * input_scale) W^T. A block of rows at a time is
        converted through fp32.

        Raises:
            TypeError: dtype is not floating.
        """
        n, k = self.shape
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise TypeError(f"dtype: got {dtype!r}, want None or a floating one")
        out = torch.empty(n, k, dtype=dtype or self.dtype, device=self.device)
        for first, last in row_blocks(self.codes.shape[0], self.codes.shape[1] * hopper.tile_k(self.bits), self.device):
            out[first * TILE_N : last * TILE_N] = self.dequantize_tiles(first, last)
        return out

    def dequantize_tiles(self, first: int, last: int) -> torch.Tensor:
        """Returns rows 64 * first to 64 * last - 1 of W as exact fp32 numbers [rows, K]. Rows that pad N are left
        out.
        """
        codes = self.unpack_tiles(first, last)
        zeros = None if self.zeros is None else rows_of(self.zeros[first:last])
        scales, of_rows = without_row_scales(self.format, rows_of(self.scales[first:last]))
        rows, groups = scales.shape
        w = self.format.dequantize(codes.view(rows, groups, -1), scales, zeros).view(rows, -1)
        w = w if of_rows is None else w * of_rows.unsqueeze(-1)
        w = w[: self.shape[0] - first * TILE_N, : self.shape[1]]
        if self.perm is None:
            return w
        return torch.empty_like(w).index_copy_(1, self.perm.long(), w)

    def unpack_tiles(self, first: int, last: int) -> torch.Tensor:
        """Returns codes uint8 [64 * (last - first), K_pad] of tiles ``first`` to ``last`` - 1, in packed order."""
        codes = self.codes[first:last]
        tiles, k_tiles, _ = codes.shape
        in_order = _unpacking(tiles * TILE_N, k_tiles * hopper.tile_k(self.bits), self.bits)
        return unpack(in_order(codes), self.bits)

    # -- places ------------------------------------------------------------------------------------------------------

    def shard_n(self, rank: int, world_size: int) -> PackedWeight:
        """Returns a copy of a rank's output features (column-parallel). It equals a weight that is packed from these
        rows alone.

        Raises:
            ValueError: N is no multiple of 64 * world_size, or rank is not below world_size.
        """
        n, k = self.shape
        _check_rank(rank, world_size)
        if n % (TILE_N * world_size):
            raise ValueError(
                f"world_size: got {world_size}, want one with N = {n} a multiple of {TILE_N} * world_size; "
                "cute_kernels.gemm.slice_outputs takes any rows"
            )
        own: dict[str, Any] = {"codes": hopper.shard_n(self.codes, rank, world_size).clone()}
        for name in ("scales", "zeros"):
            tensor = getattr(self, name)
            own[name] = None if tensor is None else tensor.chunk(world_size)[rank].clone()
        return replace(self, shape=(n // world_size, k), **own, check_values=False)

    def shard_k(self, rank: int, world_size: int) -> PackedWeight:
        """Returns a copy of a rank's input columns (row-parallel). It equals a weight that is packed from these columns
        alone. The sum of all ranks' products is the layer's product; bias and residual are added on one rank only. With
        `perm`, the rank's slice of perm must name only inputs of this rank, which is rare for act-order weights.

        Raises:
            ValueError: a rank's part of K is no multiple of 64 and of the group size; rank is not below world_size;
                or the rank's part of perm has inputs of other ranks.
        """
        n, k = self.shape
        _check_rank(rank, world_size)
        multiple = max(K_MULTIPLE, self.group_size or 0)
        if k % (multiple * world_size):
            raise ValueError(
                f"world_size: got {world_size}, want one with K = {k} a multiple of {multiple} * world_size; "
                "cute_kernels.gemm.slice_inputs cuts inside groups"
            )
        share = k // world_size
        own: dict[str, Any] = {"codes": hopper.shard_k(self.codes, rank, world_size).contiguous()}
        if self.group_size is not None:
            for name in ("scales", "zeros"):
                tensor = getattr(self, name)
                more = self.format.more_groups if name == "scales" else 0
                own[name] = None if tensor is None else _share_of_groups(tensor, rank, world_size, more)
        if self.input_scale is not None:
            own["input_scale"] = self.input_scale[rank * share : (rank + 1) * share].clone()
        if self.perm is not None:
            perm = self.perm[rank * share : (rank + 1) * share] - rank * share
            if bool(((perm < 0) | (perm >= share)).any()):
                raise ValueError(
                    f"perm: rank {rank} of {world_size} would take inputs outside its {share}, want an act-order "
                    "weight whole or sharded along N"
                )
            own["perm"] = perm
        return replace(self, shape=(n, share), **own, check_values=False)

    # -- state dicts -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Returns the tensors by the names of their fields, and "format", int64 [5]: version, N, K, bits, group_size (0
        without groups).

        For formats other than integers "format" is version 2, N, K, and the bytes of the format's key. safetensors and
        `torch.save` can store these tensors; `from_state_dict` is the inverse.
        """
        return {**self._tensors(), "format": format_numbers(self.format, self.shape)}

    @classmethod
    def from_state_dict(cls, tensors: dict[str, torch.Tensor]) -> PackedWeight:
        """Makes the weight of a `state_dict`'s tensors, which are not copied.

        Raises:
            TypeError, ValueError: a tensor is missing, unknown or does not fit; the message names it.
        """
        found, shape, _ = checked_state(tensors, TENSOR_NAMES)
        fields: dict[str, Any] = {name: tensors.get(name) for name in TENSOR_NAMES}
        return cls(**fields, format=found, shape=shape)


def checked_state(
    tensors: dict[str, torch.Tensor], names: Collection[str], more: int = 0
) -> tuple[WeightFormat, tuple[int, int], tuple[int, ...]]:
    """Checks the names of a state dict's tensors, and decodes "format". Returns (format, shape, further integers of
    "format").

    names: names of the tensors that are allowed besides "format". more: how many further integers "format" has.

    Raises:
        TypeError, ValueError: a tensor is missing, unknown or does not fit; the message names it.
    """
    arguments.check_kind("tensors", tensors, dict, "the dict of state_dict")
    arguments.check_tensors(**{name: tensors[name] for name in ("format", "codes", "scales") if name in tensors})
    for name in ("format", "codes", "scales"):
        if name not in tensors:
            raise ValueError(f"{name}: got no such tensor, want format, codes and scales")
    unknown = sorted(tensors.keys() - {*names, "format"})
    if unknown:
        raise ValueError(f"{unknown[0]}: got a tensor of that name, want none but {', '.join(names)}, format")
    found, shape, numbers = format_of_numbers(tensors["format"], tensors.get("zeros") is not None, more)
    return fitted(found, tensors["scales"]), shape, numbers


def rows_of(tiled: torch.Tensor) -> torch.Tensor:
    """Reorders scales or zeros from tiles [tiles, G, 64] to rows [64 * tiles, G]."""
    return tiled.transpose(1, 2).flatten(0, 1)


def format_numbers(weight_format: WeightFormat, shape: tuple[int, int], *more: int) -> torch.Tensor:
    """Returns the int64 integers that describe a weight in a state dict. more: further integers, such as the number of
    experts.
    """
    own = weight_format.numbers
    key = *more, *weight_format.key.encode()
    numbers = (FORMAT_VERSION, *shape, *own, *more) if own else (KEY_VERSION, *shape, *key)
    return torch.tensor(numbers, dtype=torch.int64, device="cpu")


def format_of_numbers(
    found: torch.Tensor, has_zeros: bool, more: int = 0
) -> tuple[WeightFormat, tuple[int, int], tuple[int, ...]]:
    """Decodes the integers of `format_numbers`. Returns (format, shape, further integers).

    Raises:
        ValueError: the integers are not those of `format_numbers`, or name no format.
    """
    integer = 5 + more
    if found.dtype != torch.int64 or found.dim() != 1 or found.numel() < integer:
        raise ValueError(f"format: got {found.dtype} {list(found.shape)}, want torch.int64 [{integer}]")
    if found.is_meta:
        raise ValueError("format: got a tensor without data (meta), want one on a CPU or CUDA device")
    version, n, k, *rest = found.tolist()
    if version not in (FORMAT_VERSION, KEY_VERSION):
        raise ValueError(f"format: got version {version}, want {FORMAT_VERSION} or {KEY_VERSION}")
    if version == KEY_VERSION:
        numbers = rest[more:]
        if not all(0 <= number < 128 for number in numbers):
            raise ValueError(f"format: got {numbers}, want the bytes of a format's key")
        return weight_format(bytes(numbers).decode()), (n, k), tuple(rest[:more])
    if found.numel() != integer:
        raise ValueError(f"format: got {found.dtype} {list(found.shape)}, want torch.int64 [{integer}]")
    bits, group_size = rest[:2]
    check_format(bits, group_size or None, (n, k))
    return integers(bits, group_size or None, has_zeros), (n, k), tuple(rest[2:])


# -- checks ------------------------------------------------------------------------------------------------------------


def check_weight_format(weight_format: object) -> None:
    """Raises TypeError unless the value is a weight format."""
    if not isinstance(weight_format, WeightFormat):
        raise TypeError(
            f"format: got {weight_format!r}, want a WeightFormat, such as "
            "cute_kernels.formats.weights.integers(bits, group_size, zero_points)"
        )


def check_presence(zeros: object, weight_format: WeightFormat) -> None:
    """Raises ValueError if the format has zero points and ``zeros`` is None, or if it has no zero points and ``zeros``
    is given."""
    if (zeros is not None) != bool(weight_format.has_zeros):
        found, wanted = ("none", "some") if zeros is None else ("some", "None")
        raise ValueError(f"zeros: got {found}, want {wanted} for a weight in the format {spelling(weight_format)}")


def check_format(bits: object, group_size: object, shape: object) -> None:
    """Raises TypeError or ValueError unless there is a format of integers with these bits and groups, and ``shape`` can
    be a weight's."""
    if not arguments.is_one_of(bits, hopper.CODE_BITS):
        raise ValueError(f"bits: got {bits!r}, want 4 or 8")
    group_size = per_row(group_size)
    if group_size is not None and not arguments.is_one_of(group_size, GROUP_SIZES):
        wanted = ", ".join(map(str, GROUP_SIZES))
        raise ValueError(f"group_size: got {group_size!r}, want one of {wanted}, or None or -1 for one scale per row")
    arguments.check_matrix_shape("shape", shape)


SizeT = TypeVar("SizeT")


def per_row(group_size: SizeT) -> SizeT | None:
    """Returns None for -1, which checkpoints write if a row has one scale; else ``group_size``."""
    return None if isinstance(group_size, int) and group_size == -1 else group_size


def check_start(name: str, tensor: torch.Tensor) -> None:
    """Raises ValueError if a tensor on a GPU does not start on 16 bytes, as kernels' copies want it."""
    if is_compiling() or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return
    if tensor.is_cuda or GPU.takes_cpu:
        arguments.check_aligned(name, tensor, ALIGNMENT)


def has_values(tensor: torch.Tensor) -> bool:
    """Whether the values of a tensor can be read now. Reading may wait for a GPU."""
    if is_compiling() or type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.is_meta:
        return False
    return not is_captured(tensor)


def is_captured(tensor: torch.Tensor) -> bool:
    """Whether the tensor is on a GPU and a CUDA graph is being captured on the current stream."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def fitted(weight_format: WeightFormat, scales: torch.Tensor) -> WeightFormat:
    """Returns the variant of a format that has the same bytes and supports the stored scales. Returns the format itself
    if the values of scales cannot be read.
    """
    return weight_format.fitting(scales) if has_values(scales) else weight_format


def _check_rank(rank: int, world_size: int) -> None:
    arguments.check_count("world_size", world_size, 1)
    arguments.check_count("rank", rank, 0, world_size - 1)
