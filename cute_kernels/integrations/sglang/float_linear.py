"""Linear layers of SGLang with FP8 or NVFP4 weights, whose activations SGLang keeps in 16 bits on Hopper.

These are layers with FP8 weights and 16-bit activations (W8A16), and all NVFP4 layers, even if a checkpoint declares
other activations. SGLang itself runs these layers with Marlin. Layers with FP8 activations (W8A8) stay with SGLang.
Each part of a fused layer keeps its own scale.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cute_kernels.integrations import engine_linear
from cute_kernels.integrations.checkpoints.float_codes import from_float_codes
from cute_kernels.integrations.objects import Foreign
from cute_kernels.integrations.sglang import linear, rows
from cute_kernels.integrations.sglang.seams import Layers, Seam, refuse


@dataclass(frozen=True)
class Kind:
    """The layers of one kind of checkpoint.

    Attributes:
        owner, product: as in `linear.Kind`.
        is_fp4: whether `--fp4-gemm-backend` selects the kernels of these layers.
    """

    owner: str
    product: str
    is_fp4: bool = True

    def reasons(self) -> list[str]:
        """Returns the reasons why SGLang's command line keeps these layers with SGLang."""
        from sglang.srt.layers.quantization.fp4_utils import get_fp4_gemm_runner_backend

        if not self.is_fp4 or (backend := get_fp4_gemm_runner_backend()).is_marlin():
            return []
        return [f"--fp4-gemm-backend {backend.value}"]


def _pack(kind: Kind, owner: Foreign, layer: Foreign) -> tuple[dict[str, torch.Tensor | None], linear.Served]:
    """Packs a loaded layer, as `Layers.pack` describes."""
    names, tensors = engine_linear.float_tensors(layer)
    dtype = layer.params_dtype if hasattr(layer, "params_dtype") else layer.orig_dtype
    form, invariant = engine_linear.float_form(names, tensors, dtype), rows.is_deterministic()
    reasons = ["inputs scaled by AWQ's factors"] if "pre_quant_scale" in tensors else []
    refuse([*reasons, *kind.reasons()] or linear.make_ready(form, tensors[names.codes].device, invariant))
    weight = from_float_codes(tensors, names, dtype=form.dtype)
    new = {names.codes: weight.codes, names.scales: weight.scales, names.second: None}
    return new, linear.Served(form, (names.codes, names.scales, "", ""), invariant)


KINDS = (
    Kind("compressed_tensors_fp8", "apply_weights", is_fp4=False),
    Kind("compressed_tensors_fp4", "apply_weights"),
    Kind("modelopt_fp4", "apply"),
    Kind("modelopt_fp4_a16", "apply"),
)
LAYERS = Layers("FP8 and NVFP4 layers of 16-bit activations", KINDS, _pack, linear.multiply, ("x", "bias"))
SEAM = Seam(LAYERS.what, LAYERS.hooks)
