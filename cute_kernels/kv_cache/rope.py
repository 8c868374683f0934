"""`Rope`, rotary position embedding: its frequencies, and angles that stay exact at any position.

Su et al. 2021 (RoFormer) rotate pair i of a head's columns by the angle position * theta**(-2i / rotary_dim). Context
extensions change only the frequencies; the formulae are those of Hugging Face transformers' ``modeling_rope_utils``,
evaluated here in double precision.

An angle is kept as a fraction of a turn in 64-bit fixed point: ``phase = position * frequency mod 2**64`` is one
integer multiplication whose overflow drops whole turns. The usual fp32 product position * inv_freq is off by up to 4e-3
radians at position 128k. Here the only error is that frequencies are rounded to double: 1e-11 radians at 128k.
"""

from __future__ import annotations

import ast
import functools
import math
from dataclasses import dataclass, field

import torch

from cute_kernels.arguments import check_count, check_flag, check_number, check_positive

TURN = 2 * math.pi
PHASE_BITS = 64


@dataclass(frozen=True)
class LinearScaling:
    """Position interpolation (Chen et al. 2023; kaiokendev): every frequency is divided by ``factor``."""

    factor: float

    def __post_init__(self) -> None:
        check_positive("factor", self.factor)

    def frequencies(self, rotary_dim: int, theta: float) -> list[float]:
        """Returns the radians per position of each pair. theta: the base of the unscaled frequencies."""
        return [frequency / self.factor for frequency in base_frequencies(rotary_dim, theta)]


@dataclass(frozen=True)
class NtkScaling:
    """NTK-aware scaling (bloc97, emozilla): theta is increased so much that the lowest frequency is divided by about
    the stretch.

    The stretch is ``factor * seq_len / original_max_position - (factor - 1)``, at least 1. Without seq_len it is
    ``factor``.

    Args:
        factor: the factor of transformers' "dynamic" scaling.
        original_max_position: number of positions that the model was trained for.
        seq_len: the sequence length for which the stretch is computed, or None.
    """

    factor: float
    original_max_position: int | None = None
    seq_len: int | None = None

    def __post_init__(self) -> None:
        if (self.original_max_position is None) != (self.seq_len is None):
            raise ValueError(
                f"NtkScaling: got original_max_position {self.original_max_position} and seq_len {self.seq_len}, "
                "want both or none"
            )
        check_positive("factor", self.factor)
        for name in ("original_max_position", "seq_len"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name), 1)

    def frequencies(self, rotary_dim: int, theta: float) -> list[float]:
        """Returns the radians per position of each pair. theta: the base of the unscaled frequencies."""
        stretch = self.factor
        if self.seq_len is not None and self.original_max_position is not None:
            length = max(self.seq_len, self.original_max_position)
            stretch = self.factor * length / self.original_max_position - (self.factor - 1)
        if rotary_dim == 2:  # one frequency, 1 whatever theta is
            return base_frequencies(rotary_dim, theta)
        return base_frequencies(rotary_dim, theta * stretch ** (rotary_dim / (rotary_dim - 2)))


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's scaling, by wavelength. Frequencies with wavelengths above ``original_max_position /
    low_freq_factor`` are divided by ``factor``. Frequencies with wavelengths below ``original_max_position /
    high_freq_factor`` do not change. Frequencies in between are blended.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int

    def __post_init__(self) -> None:
        for name in ("factor", "low_freq_factor", "high_freq_factor"):
            check_positive(name, getattr(self, name))
        check_count("original_max_position", self.original_max_position, 1)
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor: got {self.high_freq_factor}, want more than low_freq_factor {self.low_freq_factor}"
            )

    def frequencies(self, rotary_dim: int, theta: float) -> list[float]:
        """Returns the radians per position of each pair. theta: the base of the unscaled frequencies."""
        return [self._scaled(frequency) for frequency in base_frequencies(rotary_dim, theta)]

    def _scaled(self, frequency: float) -> float:
        wavelength = TURN / frequency
        if wavelength > self.original_max_position / self.low_freq_factor:
            return frequency / self.factor
        if wavelength < self.original_max_position / self.high_freq_factor:
            return frequency
        turns = self.original_max_position / wavelength
        smooth = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        return (1 - smooth) * frequency / self.factor + smooth * frequency


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (Peng et al. 2023): frequencies with few turns within the trained context are interpolated, others do not
    change.

    Args:
        factor: the length of the extended context divided by that of the trained context.
        original_max_position: number of positions that the model was trained for.
        beta_fast: a frequency with more than this number of turns within the trained context does not change.
        beta_slow: a frequency with fewer than this number of turns is divided by ``factor``.
        attention_factor: the factor of cosines and sines. Default: computed from ``mscale`` and ``mscale_all_dim``
            (DeepSeek) if given, else 0.1 ln(factor) + 1.
        truncate: whether the range of blended pairs is rounded outwards to whole indices.
    """

    factor: float
    original_max_position: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        for name in ("factor", "beta_fast", "beta_slow"):
            check_positive(name, getattr(self, name))
        check_count("original_max_position", self.original_max_position, 1)
        if self.attention_factor is not None:
            check_positive("attention_factor", self.attention_factor)
        for name in ("mscale", "mscale_all_dim"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), least=0)
        check_flag("truncate", self.truncate)

    def frequencies(self, rotary_dim: int, theta: float) -> list[float]:
        """Returns the radians per position of each pair. theta: the base of the unscaled frequencies."""
        low, high = (self._dimension(turns, rotary_dim, theta) for turns in (self.beta_fast, self.beta_slow))
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, rotary_dim - 1)
        if low == high:
            high += 0.001
        blended = []
        for i, frequency in enumerate(base_frequencies(rotary_dim, theta)):
            ramp = min(max((i - low) / (high - low), 0.0), 1.0)
            blended.append(frequency / self.factor * ramp + frequency * (1 - ramp))
        return blended

    def _dimension(self, turns: float, rotary_dim: int, theta: float) -> float:
        """Returns the index of the pair, as a fraction, whose frequency makes ``turns`` turns within the trained
        context.
        """
        return rotary_dim * math.log(self.original_max_position / (turns * TURN)) / (2 * math.log(theta))

    def amplitude(self) -> float:
        """Returns the factor of cosines and sines."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._mscale(self.mscale) / self._mscale(self.mscale_all_dim)
        return self._mscale(1.0)

    def _mscale(self, mscale: float) -> float:
        return 1.0 if self.factor <= 1 else 0.1 * mscale * math.log(self.factor) + 1.0


Scaling = LinearScaling | NtkScaling | Llama3Scaling | YarnScaling
_SCALINGS = {kind.__name__: kind for kind in (LinearScaling, NtkScaling, Llama3Scaling, YarnScaling)}
_FIELDS = {name: tuple(kind.__dataclass_fields__) for name, kind in _SCALINGS.items()}


def base_frequencies(rotary_dim: int, theta: float) -> list[float]:
    """Returns the radians per position of each pair: theta**(-2i / rotary_dim)."""
    return [theta ** (-2 * i / rotary_dim) for i in range(rotary_dim // 2)]


@dataclass(frozen=True)
class Rope:
    """Rotary embedding of a head's first ``rotary_dim`` columns. Other columns pass through.

    Args:
        rotary_dim: number of columns that are rotated; even, at most head_dim.
        theta: base of the frequencies, as in `base_frequencies`.
        interleaved: whether pairs are columns (2i, 2i + 1) (GPT-J, GLM) instead of (i, i + rotary_dim / 2) (Llama,
            NeoX).
        scaling: context extension, or None.

    ``text`` is the whole object as a string, which `rope_of` reads.
    """

    rotary_dim: int
    theta: float = 10000.0
    interleaved: bool = False
    scaling: Scaling | None = None
    text: str = field(default="", init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.rotary_dim, int) or self.rotary_dim < 2 or self.rotary_dim % 2:
            raise ValueError(f"rotary_dim: got {self.rotary_dim!r}, want a positive even int")
        check_positive("theta", self.theta)
        if not self.theta > 1:
            raise ValueError(f"theta: got {self.theta}, want a number above 1")
        check_flag("interleaved", self.interleaved)
        if self.scaling is not None and not isinstance(self.scaling, tuple(_SCALINGS.values())):
            raise TypeError(f"scaling: got {type(self.scaling).__name__}, want one of {', '.join(_SCALINGS)}")
        # A plain attribute, so that tracing torch.compile reads a constant.
        object.__setattr__(self, "text", _to_text(self))

    @property
    def style(self) -> str:
        """The positions of the two columns of a pair: "interleaved" or "half"."""
        return "interleaved" if self.interleaved else "half"

    @property
    def attention_factor(self) -> float:
        """The factor of cosines and sines."""
        return self.scaling.amplitude() if isinstance(self.scaling, YarnScaling) else 1.0

    def frequencies(self) -> list[float]:
        """Returns the radians per position of each pair, in double precision."""
        if self.scaling is None:
            return base_frequencies(self.rotary_dim, self.theta)
        return self.scaling.frequencies(self.rotary_dim, self.theta)

    def phase_steps(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """Returns, for each pair, the turns per position in units of 2**-64: int64 [rotary_dim / 2] on ``device``. The
        tensor is cached per device."""
        return _phase_steps(self, torch.device(device))

    def rotation(
        self, positions: torch.Tensor, dtype: torch.dtype = torch.float64
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (cosines, sines) times the attention factor of the scaling, each rounded once to ``dtype``.

        positions: int32 or int64, of any shape. Returns two tensors [*positions.shape, rotary_dim / 2].
        """
        phase = positions.to(torch.int64).unsqueeze(-1) * self.phase_steps(positions.device)
        angle = (phase >> 32).double() * (TURN / 2**32)
        factor = self.attention_factor
        return (angle.cos() * factor).to(dtype), (angle.sin() * factor).to(dtype)

    def apply(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotates x [tokens, heads, head_dim] to ``positions`` [tokens], in x's dtype (float32 or float64)."""
        cos, sin = (value.unsqueeze(-2) for value in self.rotation(positions, x.dtype))
        rotated, rest = x[..., : self.rotary_dim], x[..., self.rotary_dim :]
        first, second = rotated.unflatten(-1, (-1, 2)).unbind(-1) if self.interleaved else rotated.chunk(2, dim=-1)
        pairs = (first * cos - second * sin, second * cos + first * sin)
        turned = torch.stack(pairs, dim=-1).flatten(-2) if self.interleaved else torch.cat(pairs, dim=-1)
        return torch.cat((turned, rest), dim=-1)


def _to_text(rope: Rope) -> str:
    """Formats a Rope as a Python literal. It uses formatting alone, so that torch.compile can trace a function that
    makes a Rope. It uses no `repr`, which for NumPy's numbers is no literal."""
    scaling = ""
    if rope.scaling is not None:
        values = [f"{getattr(rope.scaling, name)}, " for name in _FIELDS[type(rope.scaling).__name__]]
        scaling = f"{type(rope.scaling).__name__!r}, {''.join(values)}"
    return f"({rope.rotary_dim}, {rope.theta}, {rope.interleaved}, ({scaling}))"


@functools.lru_cache(maxsize=256)
def rope_of(text: str) -> Rope:
    """Returns the Rope whose ``text`` is given. A Rope passes through an operator's schema as text."""
    rotary_dim, theta, interleaved, scaling = ast.literal_eval(text)
    made = _SCALINGS[scaling[0]](*scaling[1:]) if scaling else None
    return Rope(rotary_dim, theta, interleaved, made)


@functools.lru_cache(maxsize=256)
def _phase_steps(rope: Rope, device: torch.device) -> torch.Tensor:
    steps = []
    for frequency in rope.frequencies():
        turns = frequency / TURN
        step = round((turns % 1.0) * 2**PHASE_BITS) % 2**PHASE_BITS
        steps.append(step - 2**PHASE_BITS if step >= 2 ** (PHASE_BITS - 1) else step)
    return torch.tensor(steps, dtype=torch.int64, device=device)
