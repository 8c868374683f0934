"""Every compile-time choice of the kernel that writes MLA tokens, as data. No GPU types here."""

from __future__ import annotations

from dataclasses import dataclass

from cute_kernels.device.cuda import WARP_THREADS
from cute_kernels.mla.formats import MlaFormat, format_of
from layouts.kv.format import Field
from layouts.kv.mla import ROPE_DIM, MlaDense, MlaFp8, MlaModel1

DTYPES = ("bf16", "fp16", "fp32")  # of what is written; fp32 for bulk quantisation alone
ROPE_STYLES = ("none", "half", "interleaved")
LANE_COLUMNS = 16  # latent columns of a lane: 16 bytes of E4M3
WIDE_POSITIONS = 1  # a bit of a launch's mode


@dataclass(frozen=True)
class WriteConfig:
    """One compiled variant of the kernel.

    Attributes:
        kv_format: name of the cache format, see :mod:`cute_kernels.mla.formats`.
        head_dim: number of columns of a token, latent and RoPE together.
        dtype: the dtype of the numbers that the kernel reads: "bf16", "fp16" or "fp32".
        rope: "none", "half" or "interleaved", over all 64 RoPE columns.
        placed: whether a call gives a slot for each token. If not, token i is written to slot i.
        unit: number of bytes of the widest store, 16 or 8. It is 8 if pages hold a single 584-byte token, since such
            pages begin at multiples of 8.
        num_warps: number of warps of a CTA; each writes one token.
    """

    kv_format: str
    head_dim: int
    dtype: str
    rope: str = "none"
    placed: bool = True
    unit: int = 16
    num_warps: int = 4

    @property
    def form(self) -> MlaFormat:
        return format_of(self.kv_format)

    @property
    def token(self) -> MlaFp8 | MlaModel1 | MlaDense:
        return self.form.token(self.head_dim)

    @property
    def latent_dim(self) -> int:
        return self.head_dim - ROPE_DIM

    @property
    def latent_lanes(self) -> int:
        """The number of lanes that hold latent columns: 32, or 28 for 448 columns. With 28, the last four lanes of a
        warp repeat the work of lanes 24 to 27."""
        return self.latent_dim // LANE_COLUMNS

    @property
    def tile_lanes(self) -> int:
        """Number of lanes that share a scale; 0 without scales."""
        token = self.token
        return 0 if isinstance(token, MlaDense) else token.tile_size // LANE_COLUMNS

    def field(self, name: str) -> Field:
        """Returns the field called ``name`` in a token's bytes."""
        return next(field for field in self.token.fields if field.name == name)

    @property
    def tokens_per_cta(self) -> int:
        return self.num_warps

    @property
    def num_threads(self) -> int:
        return self.num_warps * WARP_THREADS

    @property
    def name(self) -> str:
        """A C identifier that tells configurations apart."""
        how = "append" if self.placed else "quantize"
        return f"mla_{how}_{self.kv_format}_{self.dtype}_d{self.head_dim}_{self.rope}_u{self.unit}w{self.num_warps}"

    def can_implement(self) -> str | None:
        """Returns why this configuration cannot be compiled, or None."""
        if self.head_dim not in self.form.head_dims:
            return f"head_dim {self.head_dim} is not one of {', '.join(map(str, self.form.head_dims))}"
        if self.dtype not in DTYPES:
            return f"dtype {self.dtype!r} is not one of {', '.join(DTYPES)}"
        if self.rope not in ROPE_STYLES:
            return f"rope {self.rope!r} is not one of {', '.join(ROPE_STYLES)}"
        if self.unit not in (8, 16):
            return f"unit {self.unit} is not 8 or 16"
        if not 1 <= self.num_warps <= 32:
            return f"num_warps {self.num_warps} is not from 1 to 32"
        return None
