"""Other libraries' products with 4-bit and 8-bit weights, as data: whether each is here, how it takes the weights."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.random_weights import TORCH_DTYPES
from bench.why_not import module_missing, short

GROUP_SIZE = 128  # of the weights that libraries have in common
Product = Callable[[torch.Tensor], torch.Tensor]  # x [M, K] -> [M, N]


@dataclass(frozen=True)
class Weights:
    """codes: uint8 [N, K] below 2**bits. scales: bf16 or fp16 [N, groups of K]; zeros: uint8 of that shape, or None.

    W = (codes - zeros) * scales, with 2**(bits - 1) for zeros if there are none. group_size: 0 for one scale a row.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    bits: int
    group_size: int = GROUP_SIZE
    zeros: torch.Tensor | None = None

    @property
    def by_row(self) -> Weights:
        """The same codes with one scale for each output feature, that of its first group."""
        return Weights(self.codes, self.scales[:, :1].contiguous(), self.bits, group_size=0)

    @property
    def dense(self) -> torch.Tensor:
        """W in the dtype of the scales: each weight rounded once, as differences of bytes are exact there."""
        n, k = self.codes.shape
        dtype, groups = self.scales.dtype, self.codes.view(n, self.scales.shape[1], -1)
        zeros = 1 << (self.bits - 1) if self.zeros is None else self.zeros[:, :, None].to(dtype)
        return (groups.to(dtype) - zeros).mul_(self.scales[:, :, None]).view(n, k)


@dataclass(frozen=True)
class LinearPeer:
    """`missing` says why the peer is not here (None: it is); `prepare` packs weights once and returns the product.

    by_row: whether it knows only one scale for each output feature. It is then given, and held to, `Weights.by_row`:
    as many codes and fewer scales than everybody else reads.
    dtypes: of scales and activations. any_format: whether zero points and every size of groups are the same to it; if
    not, it is given symmetric weights in groups of GROUP_SIZE alone.
    """

    name: str
    bits: tuple[int, ...]
    missing: Callable[[], str | None]
    prepare: Callable[[Weights], Product]
    by_row: bool = False
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16,)
    any_format: bool = False

    def takes(self, weights: Weights) -> bool:
        """Whether it is compared with at all."""
        common = weights.zeros is None and weights.group_size == GROUP_SIZE
        return weights.bits in self.bits and weights.scales.dtype in self.dtypes and (common or self.any_format)


def _cublas(weights: Weights) -> Product:
    dense = weights.dense
    return lambda x: torch.matmul(x, dense.T)


# -- vLLM's Marlin and Machete, from its build ------------------------------------------------------------------------


def vllm_roots() -> list[Path]:
    """Where vLLM's extensions may lie: under $PEERS_DIR, or where it is installed."""
    roots = [Path(os.environ["PEERS_DIR"]) / "vllm"] if "PEERS_DIR" in os.environ else []
    with contextlib.suppress(ImportError):
        roots += [Path(place) for place in importlib.import_module("vllm").__path__]
    return list(dict.fromkeys(roots))


@functools.cache
def vllm_missing() -> str | None:
    """Loads vLLM's extension for dense layers and says why it cannot."""
    found = [path for root in vllm_roots() for path in sorted(root.glob("_C*.so"))]
    if not found:
        return "not installed: no vllm package, and no vllm/_C*.so under $PEERS_DIR"
    try:
        for library in found:
            torch.ops.load_library(str(library))
        importlib.import_module("vllm.scalar_type")
    except (OSError, ImportError) as error:
        return f"not loadable: {short(error)}"
    missing = [name for name in ("marlin_gemm", "machete_mm") if not hasattr(torch.ops._C, name)]
    return f"no operator {', '.join(missing)} in {found[0].name}" if missing else None


def type_id(bits: int) -> int:
    types = importlib.import_module("vllm.scalar_type").scalar_types
    return {4: types.uint4b8, 8: types.uint8b128}[bits].id


def words_of(weights: Weights) -> torch.Tensor:
    """int32 [K / (32 / bits), N]: consecutive inputs of an output feature in a word, the first one lowest."""
    bits, rows = weights.bits, weights.codes.T
    words = torch.zeros((rows.shape[0] * bits // 32, rows.shape[1]), dtype=torch.int32, device=rows.device)
    for i in range(32 // bits):
        words |= rows[i :: 32 // bits].to(torch.int32) << (bits * i)
    return words


def marlin_weights(weights: Weights) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes int32 and scales [groups, N] in Marlin's order."""
    return marlin_codes(weights), in_fragments(weights.scales)


def marlin_codes(weights: Weights) -> torch.Tensor:
    """Codes int32 in Marlin's order."""
    n, k = weights.codes.shape
    nothing = torch.empty(0, dtype=torch.int32, device=weights.codes.device)
    return torch.ops._C.gptq_marlin_repack(words_of(weights), nothing, k, n, weights.bits, False)


def in_fragments(scales: torch.Tensor, of_rows: bool = False) -> torch.Tensor:
    """Scales [N, groups] as [groups, N], those of 64 neighbouring features in the order of Marlin's fragments.

    of_rows: whether there is one for each feature, which meets the sums.
    """
    order = [i + 8 * j for i in range(8) for j in range(8)]
    if of_rows:  # other fragments, of 32 features
        order = [2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)]
    return scales.T.reshape(-1, len(order))[:, order].reshape(-1, len(scales)).contiguous()


def _marlin(weights: Weights) -> Product:
    return marlin_call(*marlin_weights(weights), type_id(weights.bits), weights.codes.shape)


def marlin_call(
    packed: torch.Tensor, scales: torch.Tensor, kind: int, shape: torch.Size, **more: torch.Tensor
) -> Product:
    """The product of a weight [N, K] in Marlin's order."""
    num_sms = torch.cuda.get_device_properties(packed.device).multi_processor_count
    workspace = torch.zeros(num_sms, dtype=torch.int32, device=packed.device)
    call = functools.partial(by_name, torch.ops._C.marlin_gemm.default)
    given = {
        "b_q_weight": packed,
        "b_scales": scales,
        "workspace": workspace,
        "b_type_id": kind,
        "size_n": shape[0],
        "size_k": shape[1],
        "is_k_full": True,
        "use_atomic_add": False,
        "use_fp32_reduce": True,
        "is_zp_float": False,
        **more,
    }
    return lambda x: call(a=x, size_m=x.shape[0], **given)


def by_name(operator, **given: object) -> torch.Tensor:
    """Calls an operator whose schema grew over releases: what is not named here is optional and stays None."""
    return operator(*(given.get(argument.name) for argument in operator._schema.arguments))


def machete(weights: Weights) -> Product:
    operators, dtype = torch.ops._C, weights.scales.dtype
    columns = words_of(weights).T.contiguous().T
    kind = type_id(weights.bits)
    packed, scales = operators.machete_prepack_B(columns, dtype, kind, dtype), weights.scales.T.contiguous()
    return lambda x: operators.machete_mm(x, packed, kind, dtype, scales, None, GROUP_SIZE, None, None, None)


# -- QuACK ------------------------------------------------------------------------------------------------------------


quack_missing = module_missing("quack.gemm_w4")


def _quack(weights: Weights) -> Product:
    quack = importlib.import_module("quack.gemm_w4")
    nibbles = weights.codes[:, 0::2] | (weights.codes[:, 1::2] << 4)
    blob, scales = quack.prepare_w4_weight(nibbles.contiguous(), weights.scales, "int4")
    return lambda x: quack.gemm_w4a16(x, blob, scales, wformat="int4")


def _quack_by_row(weights: Weights) -> Product:
    module = importlib.import_module("bench.quack_by_row")  # which imports QuACK
    return module.prepare((weights.codes ^ (1 << (weights.bits - 1))).view(torch.int8), weights.scales[:, 0])


def cublas_name(dtype: str) -> str:
    """Of the product with W in the dtype of x."""
    return f"cuBLAS {dtype}"


BOTH = tuple(TORCH_DTYPES.values())
DENSE = tuple(  # which are always there
    LinearPeer(cublas_name(name), (4, 8), lambda: None, _cublas, dtypes=(dtype,), any_format=True)
    for name, dtype in TORCH_DTYPES.items()
)
PEERS = (
    *DENSE,
    LinearPeer("Marlin", (4, 8), vllm_missing, _marlin, dtypes=BOTH),
    LinearPeer("Machete", (4, 8), vllm_missing, machete, dtypes=BOTH),
    LinearPeer("QuACK", (4,), quack_missing, _quack),
    LinearPeer("QuACK by row", (8,), quack_missing, _quack_by_row, by_row=True),
)
