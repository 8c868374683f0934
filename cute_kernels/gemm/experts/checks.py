"""What the arguments of layers of experts may look like; errors name the argument, what came and what is wanted."""

from __future__ import annotations

import itertools

import torch

from cute_kernels.arguments import check_tensors
from cute_kernels.gemm.experts.schedule import MAX_EXPERTS
from cute_kernels.gemm.packed_experts import PackedExperts

ID_DTYPES = (torch.int32, torch.int64)
WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_TOKENS = 65535  # of a layer: the second dimension of the grid that adds up


def check_experts(name: str, weight: object) -> None:
    if not isinstance(weight, PackedExperts):
        raise TypeError(f"{name}: got {type(weight).__name__}, want PackedExperts")
    if len(weight) > MAX_EXPERTS:
        raise ValueError(f"{name}: got {len(weight)} experts, want at most {MAX_EXPERTS}")


def check_rows_of(x: torch.Tensor, k: int, dtype: torch.dtype, device: torch.device) -> None:
    """Raises TypeError or ValueError unless x is ``dtype`` [rows, K] where the weight is."""
    check_tensors(x=x)
    if x.dtype != dtype:
        raise TypeError(f"x: got dtype {x.dtype}, want {dtype}, that of the weight's scales")
    if x.dim() != 2 or x.shape[1] != k:
        raise ValueError(f"x: got shape {list(x.shape)}, want [rows, {k}]")
    if x.device != device:
        raise ValueError(f"x: got a tensor on {x.device}, want it on {device}, where the weight is")


def check_tokens(x: torch.Tensor) -> None:
    if x.shape[0] > MAX_TOKENS:
        raise ValueError(f"x: got {x.shape[0]} rows, want at most {MAX_TOKENS}")


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    dtypes: tuple[torch.dtype, ...],
    shape: tuple[int | None, ...],
    device: torch.device,
    *,
    contiguous: bool = False,
) -> None:
    """Raises TypeError or ValueError unless the tensor has one of ``dtypes`` and ``shape``, None being any size."""
    check_tensors(**{name: tensor})
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name}: got dtype {tensor.dtype}, want {' or '.join(map(str, dtypes))}")
    if tensor.dim() != len(shape) or any(b not in (None, a) for a, b in zip(tensor.shape, shape, strict=True)):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name}: got shape {list(tensor.shape)}, want [{wanted}]")
    if tensor.device != device:
        raise ValueError(f"{name}: got a tensor on {tensor.device}, want it on {device}, where x is")
    if contiguous and not tensor.is_contiguous():
        raise ValueError(f"{name}: got strides {tensor.stride()}, want a contiguous tensor")


def check_routing(expert_offsets: torch.Tensor, rows: torch.Tensor | None, x_rows: int) -> None:
    """Raises ValueError unless the values are places and rows that there are; waits for a GPU."""
    places = x_rows if rows is None else rows.shape[0]
    ends = expert_offsets.tolist()
    if ends[0] != 0 or ends[-1] > places or any(a > b for a, b in itertools.pairwise(ends)):
        raise ValueError(f"expert_offsets: got {ends}, want them to rise from 0 to at most {places}")
    if rows is not None and rows.numel() and not (0 <= int(rows.min()) and int(rows.max()) < x_rows):
        wanted = f"0 to {x_rows - 1}" if x_rows else "none, as x has no rows"
        raise ValueError(f"rows: got {int(rows.min())} to {int(rows.max())}, want {wanted}")


def check_pair(gate_up: PackedExperts, down: PackedExperts) -> None:
    """Raises TypeError or ValueError unless the two are the products of one layer."""
    if len(down) != len(gate_up):
        raise ValueError(f"down: got {len(down)} experts, want {len(gate_up)}, as many as gate_up has")
    if gate_up.out_features % 2:
        raise ValueError(f"gate_up: got {gate_up.out_features} rows, want an even number: gate and up in turn")
    if down.in_features != gate_up.out_features // 2:
        wanted = gate_up.out_features // 2
        raise ValueError(f"down: got shape {list(down.shape)}, want [.., {wanted}], half of gate_up's rows")
    if down.dtype != gate_up.dtype:
        raise TypeError(f"down: got dtype {down.dtype}, want {gate_up.dtype}, that of gate_up")
    if down.device != gate_up.device:
        raise ValueError(f"down: got a weight on {down.device}, want it on {gate_up.device}, where gate_up is")
