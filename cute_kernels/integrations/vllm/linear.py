"""Weight-only linear layers of vLLM, for AWQ, GPTQ and compressed-tensors checkpoints with 4 and 8 bits.

vLLM asks a list of kernels, in turn, whether they can run a layer. This kernel is put first; layers that it cannot run
get one of vLLM's own kernels. A layer is one registered operator, opaque to torch.compile.

The traced graph depends only on a layer's configuration, never on the values of its weights. This is necessary since
vLLM keeps compiled graphs from one start to the next, and may use them for another checkpoint with the same
configuration.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from typing import Any

import torch
from vllm import envs
from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import MPLinearKernel, MPLinearLayerConfig
from vllm.model_executor.layers.quantization.utils import replace_parameter
from vllm.platforms import PlatformEnum, current_platform
from vllm.scalar_type import scalar_types

from cute_kernels.gemm import PackedWeight, interleave_weights, slice_outputs
from cute_kernels.gemm.problem import LinearProblem
from cute_kernels.integrations import engine_linear
from cute_kernels.integrations.engine_linear import Form, LayerTensors
from cute_kernels.integrations.objects import Foreign
from cute_kernels.integrations.vllm import fused_layers, prepare
from cute_kernels.integrations.vllm.plugin import note_served
from cute_kernels.integrations.vllm.seams import replace_once
from cute_kernels.integrations.vllm.versions import Interface
from cute_kernels.runtime.gpu import GPU

WEIGHT_TYPES = {
    scalar_types.uint4b8: (4, False),
    scalar_types.uint8b128: (8, False),
    scalar_types.uint4: (4, True),
    scalar_types.uint8: (8, True),
}
"""(bits, whether there are zero points) by vLLM's names of weight types."""


def form_of(c: MPLinearLayerConfig) -> Form:
    """Returns the form of a layer. Raises ValueError, with the reason, for an unsupported layer."""
    if c.weight_type not in WEIGHT_TYPES or WEIGHT_TYPES[c.weight_type][1] != c.zero_points:
        wanted = "uint4b8 or uint8b128, or uint4 or uint8 with zero points"
        raise ValueError(f"weights of type {c.weight_type}, zero points {c.zero_points}; supported: {wanted}")
    if c.out_type not in (None, c.act_type):
        raise ValueError(f"results in {c.out_type} of activations in {c.act_type}; supported: the same")
    return engine_linear.checked_form(c, WEIGHT_TYPES[c.weight_type][0])


class Products:
    """The product of a layer, with the operations around it that are fused into it."""

    is_interleaved = False  # until the layer is known

    def note(self, form: Form) -> None:
        """Sets the layer's form and registers its kernels for loading. It is called when the layer is made or
        loaded."""
        self.form = form
        self.batch_invariant = bool(envs.VLLM_BATCH_INVARIANT)
        self.fused = fused_layers.wanted()
        note_served(f"linear {form}")
        prepare.note(problem_of(form), prepare.engine_rows())

    def settled(self, layer: Foreign, weight: PackedWeight) -> PackedWeight:
        """Decides which operations around a layer are fused into it, and makes their kernels ready.

        It must be called before vLLM compiles or captures graphs, since graphs keep the decision.

        Returns the weight. If the fusion needs it, the weight's rows of gate and up alternate.
        """
        form = self.form
        self.is_interleaved = self.fused.gates and fused_layers.is_gated(layer)
        if self.is_interleaved:
            note_served(f"linear {form}, rows in turn")
        if self.fused.sums and fused_layers.ends_block(layer):
            fused_layers.settle_norms(form.n, form.dtype)
        if self.fused.sums and fused_layers.reads_norm(layer):
            fused_layers.settle_norms(form.k, form.dtype)
        side = fused_layers.side_of_norm(layer) if self.fused.sums and not form.act_order else None
        if side is not None and form.dtype == torch.bfloat16:
            problem = problem_of(form)
            fused_layers.make_ready(problem, prepare.engine_rows(), side)
            if fused_layers.ends_layer(layer):
                fused_layers.make_whole_ready(problem, prepare.engine_rows())
        if not self.is_interleaved:
            return weight
        gate, up = (slice_outputs(weight, start, start + form.n // 2) for start in (0, form.n // 2))
        return interleave_weights(gate, up)

    def multiply(self, x: torch.Tensor, tensors: LayerTensors, bias: torch.Tensor | None) -> torch.Tensor:
        """Returns the result [..., n] of x [..., k]."""
        out = engine_linear.product(self.form, x, tensors, bias, self.batch_invariant)
        if self.is_interleaved:
            out = fused_layers.in_order(out)
        return out.reshape(*x.shape[:-1], self.form.n)


class CuteKernelsLinearKernel(MPLinearKernel, Products):
    """The kernel as vLLM sees it: a linear layer with quantised weights and 16-bit activations."""

    @classmethod
    def get_min_capability(cls) -> int:
        return 90

    @classmethod
    def can_implement(cls, c: MPLinearLayerConfig) -> tuple[bool, str | None]:
        if not (current_platform.is_cuda() and current_platform.is_device_capability(90)):
            return False, "cute-kernels serves compute capability 9.0 (Hopper)"
        try:
            form = form_of(c)
        except ValueError as reason:
            return False, str(reason)
        if (left := prepare.why_left("linear")) is not None:
            return False, left
        index = torch.cuda.current_device()
        reason = prepare.linear_reason(problem_of(form), prepare.engine_rows(), index)
        return reason is None, reason

    def __init__(self, c: MPLinearLayerConfig, *names: object, **more_names: object) -> None:
        super().__init__(c, *names, **more_names)
        self.note(form_of(c))

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        prepare.load_noted(torch.device("cuda", torch.cuda.current_device()))
        fields = self.packed(layer)
        for name, tensor in fields.items():
            replace_parameter(layer, name, torch.nn.Parameter(tensor, requires_grad=False))

    def packed(self, layer: torch.nn.Module) -> dict[str, torch.Tensor]:
        """Returns the tensors of the packed weight, by the names of the parameters that they replace."""
        form = self.form
        weight = self.settled(layer, engine_linear.packed(form, *self._tensors(layer)))
        tensors = engine_linear.tensors_of(form, weight)
        both = zip(self._names(), tensors, strict=True)
        return {name: one for name, one in both if name is not None and one is not None}

    def _names(self) -> tuple[str | None, ...]:
        """Returns the names of the parameters of codes, scales, zero points and input order; None instead of the name
        of a missing parameter.
        """
        return self.w_q_name, self.w_s_name, self.w_zp_name, getattr(self, "w_gidx_name", None)

    def _tensors(self, layer: torch.nn.Module) -> list[Any]:
        return [getattr(layer, name or "", None) for name in self._names()]

    def apply_weights(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return self.multiply(x, LayerTensors(*self._tensors(layer)), bias)


def replace(interface: Interface) -> str:
    """Puts the kernel before vLLM's own. Returns a line for the log."""
    module, name = interface.linear_kernels
    kernels = getattr(importlib.import_module(module), name)[PlatformEnum.CUDA]
    if CuteKernelsLinearKernel not in kernels:
        kernels.insert(0, CuteKernelsLinearKernel)
    module, name = interface.linear_scheme
    replace_once(module, f"{name}.create_weights", _chooses_for_invariance)
    return "weight-only linear layers (AWQ, GPTQ, compressed-tensors; 4 and 8 bits) run here first"


def _chooses_for_invariance(original: Callable[..., None]) -> Callable[..., None]:
    """Makes compressed-tensors layers choose a kernel under VLLM_BATCH_INVARIANT too. vLLM 0.33 itself chooses no
    kernel for them in this mode.

    Without a kernel, vLLM dequantises these layers in every step. It still does so for layers that this package does
    not support.
    """

    def create_weights(self: Foreign, layer: torch.nn.Module, *arguments: object, **named: object) -> None:
        if getattr(self, "use_batch_invariant", False):
            self.use_batch_invariant = False
            with contextlib.suppress(ValueError):  # vLLM has no kernel
                original(self, layer, *arguments, **named)
            if isinstance(self.kernel, CuteKernelsLinearKernel):
                return
            self.use_batch_invariant, self.kernel = True, None
        original(self, layer, *arguments, **named)

    return create_weights


def _num_sms(device_index: int) -> int:
    return GPU.num_sms(device_index)


def problem_of(form: Form) -> LinearProblem:
    """Returns the `LinearProblem` of a layer for one row of x, on the GPU of this process."""
    return form.problem(_num_sms(torch.cuda.current_device()), bool(envs.VLLM_BATCH_INVARIANT))
