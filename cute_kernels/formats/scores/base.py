"""`ScoreOption`, an option that changes attention's scores between q K^T and the softmax.

An option has a name, tensors that a call gives, a formula for the reference, and device code. Kernels' names contain
the option's name. The device code is a class like those of :mod:`.terms`. It is named as "module:attribute" and
imported when a kernel is compiled.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from cute_kernels.arguments import check_aligned, check_contiguous, check_dtype, check_place, check_shape, check_tensors
from cute_kernels.formats.scores.features import Features

TERMS = "cute_kernels.formats.scores.terms"
"""The module with the device code of the shipped options."""

SIZES = ("batch", "q_len", "num_q_heads", "num_kv_heads", "head_dim", "max_seq_len")
ALIGNMENT = 4  # bytes, of a tensor's start


@dataclass(frozen=True)
class OptionTensor:
    """A tensor that a call gives an option; its address is an argument of the launch.

    Attributes:
        name: the key in ``score_options``, and the name of the launch argument.
        shape: numbers, and names of `SIZES`. The tensor is contiguous.
        dtype: of its elements.
    """

    name: str
    shape: tuple[int | str, ...]
    dtype: torch.dtype = torch.float32

    def shape_of(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Returns the tensor's shape in a call. sizes: the values of the names in `SIZES`."""
        return tuple(sizes[size] if isinstance(size, str) else size for size in self.shape)

    def check(self, tensor: torch.Tensor, q: torch.Tensor, sizes: Mapping[str, int]) -> None:
        """Raises TypeError or ValueError unless ``tensor`` fits a call of ``sizes``; the message says what came."""
        check_tensors(**{self.name: tensor})
        check_place(self.name, tensor, q.device)
        names = ", ".join(map(str, self.shape))
        check_shape(self.name, tensor, *self.shape_of(sizes), why=f", [{names}]" if names else "")
        check_dtype(self.name, tensor, self.dtype)
        check_contiguous(self.name, tensor)
        check_aligned(self.name, tensor, ALIGNMENT)


@dataclass(frozen=True)
class KeyBlock:
    """The block of scores that the reference computes at a time: all queries, some keys.

    Attributes:
        call: the call, as a `cute_kernels.attention.call.AttentionCall`.
        keys_at: int64 [tokens]: the keys' positions in their requests.
        query_positions: int64 [batch, q_len]: the queries' positions in their requests.
    """

    call: Any
    keys_at: torch.Tensor
    query_positions: torch.Tensor

    @property
    def distances(self) -> torch.Tensor:
        """int64 [batch, q_len, 1, 1, tokens]: the key's position minus the query's."""
        return (self.keys_at - self.query_positions[:, :, None])[:, :, None, None, :]

    def by_head(self, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Reshapes a tensor [num_q_heads] to [num_kv_heads, group, 1], which broadcasts over scores."""
        return values.to(dtype).reshape(self.call.num_kv_heads, self.call.group, 1)


class ScoreOption(ABC):
    """The base of score options. A subclass is registered as an object without state.

    Attributes:
        name: the name in the registry and in kernels' names; an identifier.
        term: import path of its device code.
        tensors: the tensors that a call gives in ``score_options``; empty for options that are keywords of attention's
            functions.
        fits_four_blocks: whether a warp with four blocks of queries has registers for the option.
    """

    name: ClassVar[str]
    term: ClassVar[str]
    tensors: ClassVar[tuple[OptionTensor, ...]] = ()
    fits_four_blocks: ClassVar[bool] = False

    def is_in(self, features: Features) -> bool:
        """Returns whether a compiled variant with these features has the option."""
        return self.name in features.terms

    @abstractmethod
    def reference(self, scores: torch.Tensor, block: KeyBlock) -> torch.Tensor:
        """Returns the changed scores [batch, q_len, num_kv_heads, group, tokens], in natural units (not powers of
        two)."""

    def sample(self, sizes: Mapping[str, int], generator: torch.Generator) -> dict[str, torch.Tensor]:
        """Makes the option's tensors for a call of ``sizes``, for tests: standard normal, on the generator's device."""
        shapes = {tensor.name: tensor.shape_of(sizes) for tensor in self.tensors}
        return {
            name: torch.randn(shape, generator=generator, device=generator.device) for name, shape in shapes.items()
        }
