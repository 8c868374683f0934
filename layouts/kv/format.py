"""The base class of KV-cache row formats, and `Field`, which describes a part of a row's bytes."""

from __future__ import annotations

import abc
from dataclasses import dataclass

import torch

from layouts.proofs import Proof, prove

FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Field:
    """A run of equal elements inside a row.

    Args:
        name: what the elements are.
        dtype: short element type: ``u4`` (two per byte, even index in the low nibble), ``s8``, ``fp16``, ``e4m3`` ...
        offset: index of the first byte inside the row.
        num_bytes: length of the run in bytes.
        note: a remark for readers.
    """

    name: str
    dtype: str
    offset: int
    num_bytes: int
    note: str = ""

    @property
    def end(self) -> int:
        """First byte after the run."""
        return self.offset + self.num_bytes


class KvRow(abc.ABC):
    """A row format for one head_dim. A row has the numbers of one head of one token: ``head_dim`` numbers in
    ``row_bytes`` bytes.

    All methods are vectorised over leading dimensions, work on CPU and CUDA tensors and never synchronise with the
    host. Subclasses are frozen dataclasses. So formats can be compared, and can be keys of compile caches.
    """

    head_dim: int

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """Short identifier, unique among registered formats."""

    @property
    @abc.abstractmethod
    def fields(self) -> tuple[Field, ...]:
        """The fields of a row, in ascending order, without gaps."""

    @property
    def row_bytes(self) -> int:
        """Bytes per row."""
        return self.fields[-1].end

    @abc.abstractmethod
    def quantize(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        """Converts floating [..., head_dim] to uint8 rows [..., row_bytes].

        NaN becomes 0 and numbers out of range saturate, so rows are finite for any input. ``scale`` is for formats
        whose scale may be outside the row; other formats refuse it (`check_no_scale`).
        """

    @abc.abstractmethod
    def dequantize(
        self, rows: torch.Tensor, dtype: torch.dtype = torch.float32, scale: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Converts uint8 rows [..., row_bytes] to ``dtype`` [..., head_dim]; in float64 the stored numbers are
        exact.
        """

    @abc.abstractmethod
    def pack(self, *parts: torch.Tensor) -> torch.Tensor:
        """Packs the parts of a row (codes first) into uint8 rows [..., row_bytes]."""

    @abc.abstractmethod
    def unpack(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Splits uint8 rows [..., row_bytes] into the parts that `pack` takes."""

    @abc.abstractmethod
    def error_bound(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        """Returns an upper bound, per element in float64, of ``|dequantize(quantize(x)) - x|`` for finite x in
        range."""

    def describe(self) -> str:
        """Describes the bytes of a row as text, one line per field."""
        lines = [f"{self.name}: {self.head_dim} elements in {self.row_bytes} bytes"]
        for field in self.fields:
            span = f"[{field.offset}, {field.end})"
            lines.append(f"  {span:<13} {field.dtype:<5} {field.name:<10} {field.note}".rstrip())
        return "\n".join(lines)

    def verify(self) -> tuple[Proof, ...]:
        """Proves the format's claims about itself; raises `ProofError` if a claim is not true."""
        return (self._verify_byte_map(), self._verify_bytes_round_trip(), self._verify_error_bound())

    def _verify_byte_map(self) -> Proof:
        cursor = 0
        for field in self.fields:
            prove(
                field.offset == cursor and field.num_bytes > 0, f"field {field.name} starts at {cursor}", "symbolic", 1
            )
            cursor = field.end
        return prove(cursor == self.row_bytes, "fields tile the row without gap or overlap", "symbolic", cursor)

    def _verify_bytes_round_trip(self) -> Proof:
        rows = torch.randint(0, 256, (512, self.row_bytes), dtype=torch.uint8, generator=_generator())
        same = torch.equal(self.pack(*self.unpack(rows)), rows)
        return prove(same, "pack(unpack(rows)) returns every byte", "sampled", rows.numel())

    def _verify_error_bound(self) -> Proof:
        x = adversarial_rows(self.head_dim)
        error = (self.dequantize(self.quantize(x), torch.float64) - x.double()).abs()
        holds = bool(torch.isfinite(error).all()) and bool((error <= self.error_bound(x)).all())
        return prove(holds, "|dequantize(quantize(x)) - x| <= error_bound(x)", "sampled", x.numel())

    def check_input(self, x: torch.Tensor) -> None:
        """Raises TypeError or ValueError unless x is a floating tensor [..., head_dim]."""
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"x is {type(x).__name__}; want a torch tensor [..., {self.head_dim}]")
        if x.dtype not in FLOATING:
            raise TypeError(f"x has dtype {x.dtype}; want one of {', '.join(map(str, FLOATING))}")
        if x.ndim == 0 or x.shape[-1] != self.head_dim:
            raise ValueError(f"x has shape {tuple(x.shape)}; want [..., {self.head_dim}] (head_dim)")

    def check_no_scale(self, scale: torch.Tensor | None) -> None:
        """Raises if a scale is given: the row holds all that it needs."""
        if scale is not None:
            raise ValueError(f"scale is given; {self.name} rows have no scale outside the row")

    def check_rows(self, rows: torch.Tensor) -> None:
        """Raises unless rows is uint8 [..., row_bytes]."""
        check_part(rows, "rows", torch.uint8, self.row_bytes)

    def check_output_dtype(self, dtype: torch.dtype) -> None:
        """Raises unless dtype is a floating dtype that `dequantize` can produce."""
        if dtype not in FLOATING:
            raise TypeError(f"dtype is {dtype}; want one of {', '.join(map(str, FLOATING))}")


def check_leading(**parts: torch.Tensor) -> None:
    """Raises unless all parts have the same dimensions before the last."""
    if len({part.shape[:-1] for part in parts.values()}) > 1:
        shapes = [tuple(part.shape) for part in parts.values()]
        raise ValueError(f"{', '.join(parts)} have shapes {shapes}; want equal leading dimensions")


def check_positive_int(name: str, value: int) -> None:
    """Raises unless value is an int above 0."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}; want an int")
    if value < 1:
        raise ValueError(f"{name} is {value}; want a positive int")


def check_part(part: torch.Tensor, name: str, dtype: torch.dtype, width: int) -> None:
    """Raises unless ``part`` is a tensor of ``dtype`` whose last dimension is ``width``."""
    if not isinstance(part, torch.Tensor):
        raise TypeError(f"{name} is {type(part).__name__}; want a torch tensor of {dtype}")
    if part.dtype != dtype:
        raise TypeError(f"{name} has dtype {part.dtype}; want {dtype}")
    if part.ndim == 0 or part.shape[-1] != width:
        raise ValueError(f"{name} has shape {tuple(part.shape)}; want [..., {width}]")


def check_range(codes: torch.Tensor, low: int, high: int) -> None:
    """Raises if a CPU tensor has codes below ``low`` or above ``high``. A CUDA tensor is not read, since that would
    synchronise.
    """
    if codes.device.type == "cpu" and codes.numel() and (codes.min() < low or codes.max() > high):
        raise ValueError(f"codes span [{int(codes.min())}, {int(codes.max())}]; want [{low}, {high}]")


def bytes_of(x: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of the last dimension of x as uint8 (little endian, as on the GPU)."""
    return reinterpret(x, torch.uint8)


def reinterpret(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns the bytes of the last dimension of x as another dtype. Copies x if its strides or alignment do not allow
    a view.
    """
    aligned = x.storage_offset() * x.element_size() % dtype.itemsize == 0
    if not x.is_contiguous() or x.stride(-1) != 1 or not aligned:
        x = x.new_empty(x.shape).copy_(x)
    return x.view(dtype)


def working_precision(x: torch.Tensor) -> torch.Tensor:
    """Returns x in the precision in which quantisers compute: float64 if x is float64, else float32."""
    return x if x.dtype == torch.float64 else x.float()


def finite(x: torch.Tensor, limit: float) -> torch.Tensor:
    """Returns x in working precision, with NaN as 0 and all other numbers clamped to +-limit."""
    return working_precision(x).nan_to_num(nan=0.0, posinf=limit, neginf=-limit).clamp(-limit, limit)


def adversarial_rows(head_dim: int) -> torch.Tensor:
    """Returns float32 rows for which a careless quantiser fails: constants, outliers, tiny and large ranges, signed
    zeros, ties.
    """
    gaussian = torch.randn(64, head_dim, generator=_generator())
    ramp = torch.linspace(-1, 1, head_dim)
    outlier = ramp.clone()
    outlier[head_dim // 2] = 1000.0
    special = [torch.full((head_dim,), value) for value in (0.0, -0.0, 1.0, -3.14159, 448.0, 1e-7, 6e-8)]
    scales = [ramp * magnitude for magnitude in (1e-8, 1e-6, 1e-4, 1e-2, 1.0, 7.5, 300.0)]
    offsets = [100.0 + ramp * magnitude for magnitude in (1e-3, 1e-1, 10.0)]
    return torch.cat([gaussian, gaussian * 20, torch.stack([outlier, *special, *scales, *offsets])])


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(20240501)
