"""`WeightFormat`, which describes the bytes of a weight for every part of the package, and the registry of formats."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch

from cute_kernels.formats.weights.decoder import ByteDecoder, CodeDecoder, E4m3Decoder, PackedMath
from layouts.weights.hopper import CODE_BITS, STEP_K, TILE_N

GROUP_MULTIPLE = STEP_K  # of a group size
SCALE_BYTES = (1, 2, 4)  # of a stored scale; four are an fp32 number
ROW_SCALE_BYTES = 4  # fp32
_NAME = re.compile(r"[a-z][a-z0-9]*\Z")

Format = TypeVar("Format", bound="WeightFormat")


@dataclass(frozen=True, eq=False)
class WeightFormat(ABC):
    """The format of a stored weight [N, K]: codes, and a scale for each group of consecutive inputs of a row.

    Codes lie in the order of `layouts.weights.hopper`; scales and zero points lie in tiles [N_pad / 64, G, 64], so the
    scales of 64 rows for one group are neighbours. Subclasses are frozen dataclasses with ``eq=False`` whose fields
    JSON can hold. Each format has one object, the registered one: it equals only itself, and unpickling returns it.

    Attributes:
        bits: number of bits of a code, 4 or 8.
        group_size: number of consecutive inputs that share a scale, a multiple of 16 that divides 256; 0: one scale per
            row.
        has_zeros: whether each group has a zero point, uint8.
        scale_bytes: number of bytes of a stored scale: 1, 2, or 4 for an fp32 number that kernels take without
            conversion.
        dtypes: dtypes of activations that such weights support, "bf16" and "fp16".
        power_scales: whether stored scales are E8M0 bytes (exponents of two), and none is NaN.
        row_scales: whether each row also has a second-level scale, fp32, by which accumulators are multiplied.
            Second-level scales are stored after a tile's group scales, as if they were scales of further groups: see
            `with_row_scales`.
        codes_as_bytes: whether `byte_decoder` can convert codes to bytes, so that few rows of x are multiplied in
            limbs.
        bytes_in_e4m3: whether the bytes of `byte_decoder`, and limbs, are E4M3 numbers. If not, both are signed
            integers, and products are exact.
        byte_exponent: log2 of the byte value by which `byte_decoder` represents 1.
        nan_codes: codes that are NaN. Kernels do not test for them; instead, `with_nan_codes` makes the scale of their
            group NaN.
        code_dtypes: dtypes that checkpoints use for bytes of codes.
        given_scale_dtypes: dtypes that checkpoints use for scales of one byte.
        pad_code: the code in padding rows and columns.
        decode_cost: the time of decoding, relative to integer codes of as many bits.
        stream_clocks: clocks in which an SM decodes 128 inputs of 64 rows of W in `StreamKernel`; 0 if loading takes
            longer.
        limb_clocks: as stream_clocks, in `ResidentKernel`, which decodes to bytes.
        key: the format's name in operators and state dicts, made of ``codes_name`` and ``scales_name``.
    """

    bits: int
    group_size: int

    has_zeros: ClassVar[Any] = False  # formats that may have them make it a field
    scale_bytes: ClassVar[int] = 2
    power_scales: ClassVar[bool] = False
    row_scales: ClassVar[bool] = False
    dtypes: ClassVar[tuple[str, ...]] = ("bf16", "fp16")
    decode_cost: ClassVar[float] = 1.0
    stream_clocks: ClassVar[float] = 0.0
    limb_clocks: ClassVar[float] = 0.0
    bytes_in_e4m3: ClassVar[bool] = False
    byte_exponent: ClassVar[int] = 4
    nan_codes: ClassVar[tuple[int, ...]] = ()
    code_dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.uint8,)
    given_scale_dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.uint8,)

    if TYPE_CHECKING:

        @property
        def key(self) -> str: ...  # an attribute of each object: calls look it up

    def __post_init__(self) -> None:
        for name in (self.codes_name, self.scales_name):
            if not _NAME.match(name):
                raise ValueError(f"{type(self).__name__}: got the name {name!r}, want lower-case letters and digits")
        if self.bits not in CODE_BITS:
            raise ValueError(f"bits: got {self.bits!r}, want 4 or 8")
        size = self.group_size
        if size and (size < GROUP_MULTIPLE or 256 % size):
            raise ValueError(f"group_size: got {size!r}, want 16, 32, 64, 128 or 256, or 0 for one scale per row")
        if self.scale_bytes not in SCALE_BYTES:
            raise ValueError(f"scale_bytes: got {self.scale_bytes}, want 1, 2 or 4")
        object.__setattr__(self, "key", f"{self.codes_name}_{self.scales_name}")

    # -- names ---------------------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def codes_name(self) -> str:
        """The codes' part of the key, such as "w4": lower-case letters and digits."""

    @property
    def scales_name(self) -> str:
        """The scales' part of the key, such as "g128"."""
        return f"g{self.group_size or 'channel'}"

    @property
    def title(self) -> str:
        """The format's name in reports."""
        return self.key

    def symbol_name(self, dtype: str) -> str:
        """Returns the part of a kernel's name for the format and for activations of ``dtype``."""
        return f"{self.codes_name}{dtype}_{self.scales_name}"

    @property
    def label(self) -> str:
        """The format's description in a weight's repr."""
        return self.key

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments that name the format in a layer's repr and in saved configurations."""
        return {"format": self.key}

    @property
    def numbers(self) -> tuple[int, ...]:
        """The integers that state dicts of version 1 hold for the format. Later formats have none: their state dicts
        hold the key.
        """
        return ()

    def __str__(self) -> str:
        return self.key

    # -- sizes ---------------------------------------------------------------------------------------------------------

    @property
    def group_scale_bytes(self) -> int:
        """Bytes of the scales of a tile's 64 rows for one group."""
        return TILE_N * self.scale_bytes

    @property
    def group_zero_bytes(self) -> int:
        """Bytes of the zero points of a tile's 64 rows for one group."""
        return TILE_N if self.has_zeros else 0

    @property
    def more_groups(self) -> int:
        """How many groups' scales would take as many bytes as the second-level scales; 0 without a second level."""
        return ROW_SCALE_BYTES // self.scale_bytes if self.row_scales else 0

    @property
    def codes_as_bytes(self) -> bool:
        return False

    @property
    def sums_inputs(self) -> bool:
        """Whether int8 products are corrected by sums of x over groups, because of zero points or shifts."""
        return bool(self.has_zeros)

    @property
    def pad_code(self) -> int:
        return 0

    def simplest(self, zeros: torch.Tensor | None) -> tuple[WeightFormat, torch.Tensor | None]:
        """Returns the simplest format for a weight with zero points ``zeros``, and the zero points that this format
        needs, or None. May wait for a GPU."""
        return self, zeros

    def with_zero_points(self, has_zeros: bool) -> WeightFormat:
        """Returns the variant of the format with or without zero points, if it exists."""
        return self

    def with_group_size(self, group_size: int) -> WeightFormat:
        """Returns the variant of the format with another group size; 0 is one scale a row. Raises ValueError if it is
        not registered."""
        if group_size == self.group_size:
            return self
        found = weight_format(replace(self, group_size=group_size).key)
        if found.group_size != group_size:
            raise ValueError(f"group_size: got {group_size}, want {found.group_size}, the only one of {self.key}")
        return found

    # -- values --------------------------------------------------------------------------------------------------------

    def scale_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Returns the dtype of a weight's stored scales for activations of ``dtype``. A stored scale takes
        `scale_bytes` bytes."""
        return dtype

    def activation_dtype(self, scale_dtype: torch.dtype) -> torch.dtype:
        """Returns the dtype of activations for which stored scales have ``scale_dtype``: the inverse of the method
        `scale_dtype`. Raises TypeError if no weight of the format has such scales."""
        return scale_dtype

    @abstractmethod
    def dequantize(self, codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None) -> torch.Tensor:
        """Returns the exact weights that codes stand for, in fp32. This is the definition of the format.

        Args:
            codes: uint8 [rows, G, group]. scales: [rows, G]. zeros: uint8 [rows, G], of formats that have them.
        """

    def check_values(self, scales: torch.Tensor, zeros: torch.Tensor | None) -> None:
        """Raises ValueError if kernels cannot take such scales or zero points; waits for a GPU."""
        return

    def fitting(self, scales: torch.Tensor) -> WeightFormat:
        """Returns the variant of the format that has the same bytes and supports the stored ``scales``. May wait for a
        GPU.
        """
        return self

    def includes(self, other: WeightFormat) -> bool:
        """Returns whether every weight in the format ``other`` is also a weight in this format, with the same bytes."""
        return other is self

    def with_nan_codes(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Returns scales [rows, G] that are NaN if a group of codes [rows, G, group] has one of `nan_codes`."""
        return scales

    def stored_scales(self, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Rounds positive fp32 ``values`` to the nearest stored scales, for activations of ``dtype``."""
        return values.to(self.scale_dtype(dtype))

    @abstractmethod
    def choose_scales(self, w: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Chooses (scales, zeros) [rows, G] for finite weights fp32 [rows, G, group] and activations of ``dtype``.

        Raises:
            ValueError: a group needs a scale that the format does not have.
        """

    @abstractmethod
    def choose_codes(self, w: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None) -> torch.Tensor:
        """Rounds weights fp32 [rows, G, group] to codes uint8 [rows, G, group], with given scales and zero points."""

    def choose_row_scales(self, w: torch.Tensor) -> torch.Tensor:
        """Chooses scales of the second level, fp32 [N], for weights [N, K] of formats with `row_scales`. The weights
        are then divided by these scales, and passed to `choose_scales` and `choose_codes`.
        """
        raise NotImplementedError(f"{self.key} has no scales of a second level")

    # -- device --------------------------------------------------------------------------------------------------------

    @abstractmethod
    def decoder(self, dtype: str, math: PackedMath) -> CodeDecoder:
        """Makes the decoder that turns codes into exact numbers of ``dtype``, without scales. math: the architecture's
        arithmetic of words and packed pairs of ``dtype``, from `cute_kernels.device.packed_math`. A decoder uses no
        other arithmetic, so the format's file does not import the compiler.
        """

    def scaling_decoder(self, dtype: str, math: PackedMath) -> CodeDecoder:
        """Makes the decoder that turns codes into scaled weights, rounded once, on Hopper. Only formats whose
        `scales_codes` is True have such a decoder. For other formats, the kernel multiplies the results of `decoder` by
        the scales.
        """
        raise NotImplementedError(f"{self.key} is not scaled as it is decoded")

    def scales_codes(self, dtype: str) -> bool:
        """Returns whether the format has a `scaling_decoder` for activations of ``dtype``. Must not import the
        compiler."""
        return False

    def byte_decoder(self, math: PackedMath) -> ByteDecoder:
        """Makes the decoder that turns codes into bytes, for formats with `codes_as_bytes`. A byte is 2 **
        `byte_exponent` times the weight without its scale."""
        raise NotImplementedError(f"{self.key} has no bytes of its codes")

    def e4m3_decoder(self) -> type[E4m3Decoder] | None:
        """Returns the decoder that turns codes into E4M3 numbers. Returns None for formats without FP8 products. Must
        not import the compiler."""
        return None

    # -- identity ------------------------------------------------------------------------------------------------------

    def registered(self) -> WeightFormat:
        """Returns the registered object of this key."""
        return weight_format(self.key)

    def __reduce__(self) -> tuple[Any, ...]:
        return _registered, (type(self), self.key)


def with_row_scales(scales: torch.Tensor, of_rows: torch.Tensor) -> torch.Tensor:
    """Joins scales of groups [rows, G] and second-level scales, fp32 [rows], to stored scales [rows, G +
    more_groups]."""
    return torch.cat((scales, of_rows.float().unsqueeze(-1).contiguous().view(scales.dtype)), dim=-1)


def without_row_scales(form: WeightFormat, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Splits stored scales [rows, G + more_groups] into (scales of groups, second-level scales or None). It is the
    inverse of `with_row_scales`."""
    if not form.row_scales:
        return scales, None
    groups = scales.shape[-1] - form.more_groups
    return scales[..., :groups], scales[..., groups:].contiguous().view(torch.float32).squeeze(-1)


_FORMATS: dict[str, WeightFormat] = {}
_SHORT: dict[str, WeightFormat] = {}  # by keys without underscores
_NAMES: dict[str, WeightFormat] = {}


def register(weight_format: Format) -> Format:
    """Registers a format by its key, and returns the format.

    Raises:
        ValueError: another object has the key.
    """
    if _FORMATS.setdefault(weight_format.key, weight_format) is not weight_format:
        raise ValueError(f"{weight_format.key}: got another format of that name, want one object per format")
    _SHORT[weight_format.key.replace("_", "")] = weight_format
    return weight_format


def registered_formats() -> tuple[WeightFormat, ...]:
    """Returns all formats, in the order in which they were registered."""
    return tuple(_FORMATS.values())


def weight_format(key: str, argument: str = "format") -> WeightFormat:
    """Returns the format with a key (with or without underscores), or with a name that `named` has given.

    Raises:
        ValueError: there is no such format; the message names the argument and similar keys.
    """
    found = _FORMATS.get(key) or _NAMES.get(key) or _SHORT.get(key)
    if found is None:
        near = " or ".join(get_close_matches(key, (*_NAMES, *_SHORT, *_FORMATS), n=2))
        raise ValueError(
            f"{argument}: got {key!r}, want one such as 'w4g128', 'w8gchannel' or 'w4g64z', or {', '.join(_NAMES)}"
            + (f"; did you mean {near}?" if near else "")
        )
    return found


def named(**formats: WeightFormat) -> None:
    """Gives registered formats names that users may write instead of keys."""
    _NAMES.update(formats)


def spelling(weight_format: WeightFormat) -> str:
    """Returns the spelling of a format in arguments and messages. It is the name that `named` has given, or else the
    key without underscores."""
    names = (name for name, each in _NAMES.items() if each is weight_format)
    return next(names, weight_format.key.replace("_", ""))


def _registered(_kind: type[WeightFormat], key: str) -> WeightFormat:
    """Returns the registered format with ``key``; pickle calls it to load a format. Unpickling the format's class has
    already imported the module that registers it.
    """
    return weight_format(key)
