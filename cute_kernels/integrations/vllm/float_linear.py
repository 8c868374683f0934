"""Linear layers of vLLM with FP8, MXFP4 or NVFP4 weights.

A method of vLLM passes loaded weights to the kernel that it chose. In this module, the weights are packed instead, and
the products of this module become the method's kernel. Each part of a fused layer keeps its own scale; vLLM keeps only
the largest scale.

Activations stay in 16 bits. If vLLM rounds them to FP8, as the checkpoint declares, the environment must ask for 16
bits. Activations declared in FP4 stay in 16 bits in vLLM on Hopper, too.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable

import torch
from vllm import envs
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor import utils as model_executor_utils
from vllm.model_executor.layers.quantization.utils import replace_parameter
from vllm.model_executor.layers.quantization.utils.quant_utils import FP4_DTYPE
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from cute_kernels.integrations import engine_linear
from cute_kernels.integrations.checkpoints.float_codes import Names, from_float_codes
from cute_kernels.integrations.engine_linear import Form, LayerTensors
from cute_kernels.integrations.objects import Foreign
from cute_kernels.integrations.vllm import environment, prepare
from cute_kernels.integrations.vllm.linear import Products, problem_of
from cute_kernels.integrations.vllm.plugin import note_served
from cute_kernels.integrations.vllm.seams import packs_here, refusal, replace_once
from cute_kernels.integrations.vllm.versions import Interface

READ_BY_MODELS = ("is_bmm", "_retain_weight_for_gather")
"""Attributes of layers whose weights a model's own kernels read: DeepSeek V4's, and drafts of Qwen3 DSpark."""
PACKED_DIMS = 3  # of packed codes: tiles, k blocks, bytes
is_pre_processed: Callable[[], bool] = getattr(model_executor_utils, "is_weights_pre_processed", bool)
"""Returns whether weights come from vLLM's weight cache, as kernels read them; False in versions without one."""


class FloatProducts(Products):
    """The products that replace a kernel of vLLM's.

    Attributes:
        config: the ``config`` of the replaced kernel.
        names: the names of the layer's codes and scales.
    """

    def __init__(self, form: Form, names: Names, config: object) -> None:
        self.names, self.config = names, config
        self.note(form)

    def apply_weights(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        codes, scales = (getattr(layer, name) for name in (self.names.codes, self.names.scales))
        return self.multiply(x, LayerTensors(codes, scales, None, None), bias)


def serve(kernel: str, key: str, method: Foreign, layer: Foreign) -> str | None:
    """Packs a loaded layer and makes its method multiply by `FloatProducts`. If that is not possible, changes nothing
    and returns why.

    kernel, key: as in `Interface.float_linear`.

    Raises:
        ValueError: the layer was packed before, and is loaded again with weights that do not fit; or vLLM's weight
            cache has packed weights, which its engines cannot tell from their own.
    """
    before = getattr(method, kernel)
    if is_pre_processed() and _was_packed(layer):
        wanted = f"a vllm preload with {environment.SWITCH}=0"
        raise ValueError(f"--load-format ipc_cache: got weights that this plug-in has packed, want those of {wanted}")
    reason = _reason_of_engine(operator.attrgetter(key)(method) if key else None, method, layer)
    if reason is None:
        try:
            reason = _pack(kernel, method, layer)
        except (TypeError, ValueError) as error:
            reason = str(error)
            note_served(f"linear left {getattr(layer, 'prefix', '')}")  # by values, which graphs do not show
    if reason is not None and isinstance(before, FloatProducts):
        raise ValueError(f"{getattr(layer, 'prefix', 'layer')}: got weights loaded again that do not fit: {reason}")
    return reason


def _reason_of_engine(key: Foreign | None, method: Foreign, layer: Foreign) -> str | None:
    if (left := prepare.why_left("float_linear")) is not None:
        return left
    rounded = key is not None and key.dtype != FP4_DTYPE
    wanted = f"{environment.ACTIVATIONS}={environment.IN_16_BITS}"
    has_lora = getattr(get_current_vllm_config_or_none(), "lora_config", None) is not None
    dequantised = envs.VLLM_BATCH_INVARIANT and hasattr(method, "block_quant") and not method.block_quant
    wrong = {
        "--linear-backend": _names_backend(),
        f"activations in FP8 (in 16 bits with {wanted})": rounded and not environment.keeps_activations(),
        "VLLM_BATCH_INVARIANT, under which vLLM dequantises such layers": dequantised,
        "weights that the model's own kernels read": any(getattr(layer, name, False) for name in READ_BY_MODELS),
        "--load-format ipc_cache": is_pre_processed(),
        "LoRA, which reads an output layer's weight": has_lora and isinstance(layer, ParallelLMHead),
    }
    return refusal(wrong)


def _was_packed(layer: Foreign) -> bool:
    """Returns whether a layer's codes are packed as this package's kernels read them."""
    there = (getattr(layer, name, None) for name in ("weight_packed", "weight"))
    return any(codes is not None and codes.dim() == PACKED_DIMS for codes in there) and not getattr(
        layer, "is_bmm", False
    )


def _names_backend() -> bool:
    """Returns whether the command line names kernels of linear layers."""
    config = getattr(get_current_vllm_config_or_none(), "kernel_config", None)
    by_scheme = getattr(config, "linear_backend_per_quant", None) or {}
    return {getattr(config, "linear_backend", "auto"), *by_scheme.values()} != {"auto"}


def _pack(kernel: str, method: Foreign, layer: Foreign) -> str | None:
    """Packs a layer, or returns why its kernels are not ready. Raises TypeError or ValueError for a weight that does
    not fit; the message says why."""
    names, tensors = engine_linear.float_tensors(layer)
    form = engine_linear.float_form(names, tensors, getattr(layer, "params_dtype", torch.get_default_dtype()))
    device = tensors[names.codes].device
    if device.type == "cuda":
        reason = prepare.linear_reason(problem_of(form), prepare.engine_rows(), prepare.index_of(device))
        if reason is not None:
            return reason
    products = FloatProducts(form, names, getattr(method, kernel).config)
    weight = products.settled(layer, from_float_codes(tensors, names, dtype=form.dtype))
    for name, tensor in ((names.codes, weight.codes), (names.scales, weight.scales)):
        replace_parameter(layer, name, torch.nn.Parameter(tensor, requires_grad=False))
    if device.type == "cuda":
        prepare.load_noted(device)
    vars(layer).pop("_input_quant_key", None)  # nobody quantises activations for it beforehand
    setattr(method, kernel, products)
    if hasattr(method, "use_marlin"):
        method.use_marlin = True  # who wants the weight as it was (MLA) multiplies with the identity then
    return None


# -- the seam ---------------------------------------------------------------------------------------------------------


def replace(interface: Interface) -> str:
    """Makes vLLM's methods for layers with floating codes use `FloatProducts`. Returns a line for the log."""
    for module, name, *how in interface.float_linear:
        made = functools.partial(packs_here, "FP8, MXFP4 or NVFP4 layers", functools.partial(serve, *how))
        replace_once(module, f"{name}.process_weights_after_loading", made)
    return "linear layers in FP8, MXFP4 and NVFP4 run here, with activations in 16 bits"
