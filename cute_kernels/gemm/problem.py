"""`LinearProblem` and `GroupedProblem`, which have all properties that decide how a product is computed. Plain Python,
no GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

from cute_kernels.formats.weights import WeightFormat
from cute_kernels.gemm.activations.base import ActivationFunction
from cute_kernels.gemm.stream.config import StreamConfig
from layouts.weights.hopper import TILE_N


@dataclass(frozen=True)
class LinearProblem:
    """Everything that decides how a product is computed.

    Attributes:
        m: number of rows of x, at least 1.
        n, k: output features and inputs of the weight, without padding.
        k_pad: k with the padding of the packed weight.
        format, dtype: as in :class:`StreamConfig`.
        num_sms: number of SMs of the GPU.
        batch_invariant: whether a row's result must not depend on the number of rows.
        activation: the activation that a kernel is compiled for; None for a standard one, or none.
    """

    m: int
    n: int
    k: int
    k_pad: int
    format: WeightFormat
    dtype: str
    num_sms: int = StreamConfig.limits.num_sms
    batch_invariant: bool = False
    activation: ActivationFunction | None = None

    @property
    def num_tiles(self) -> int:
        return -(-self.n // TILE_N)


@dataclass(frozen=True)
class GroupedProblem:
    """Everything that decides how a grouped product is computed.

    Attributes:
        places: rows of the result, at least 1.
        num_experts: 1 to `cute_kernels.gemm.experts.schedule.MAX_EXPERTS`.
        n, k, k_pad, format, dtype, num_sms, batch_invariant, activation: as in `LinearProblem`; n
            and k of one expert.
    """

    places: int
    num_experts: int
    n: int
    k: int
    k_pad: int
    format: WeightFormat
    dtype: str
    num_sms: int = StreamConfig.limits.num_sms
    batch_invariant: bool = False
    activation: ActivationFunction | None = None

    def max_entries(self, capacity: int) -> int:
        """Returns how many tiles, of up to ``capacity`` rows each, the worst distribution of rows among experts
        needs.
        """
        active = min(self.num_experts, self.places)
        return (self.places + active * (capacity - 1)) // capacity
