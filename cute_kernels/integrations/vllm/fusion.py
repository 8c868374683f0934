"""Fusion of a model's small operations into the products before them, in the graphs that vLLM compiles.

vLLM traces a model and lets passes rewrite it before Inductor makes kernels. This pass comes last. `fused_graph` fuses
SwiGLU and residual sums into this package's products, and replaces norms, so that launches overlap or disappear.
Without torch.compile nothing is fused.

`fused_layers` says which layers take part.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from vllm import envs
from vllm.compilation.passes.inductor_pass import InductorPass

from cute_kernels._version import __version__
from cute_kernels.integrations.objects import Foreign
from cute_kernels.integrations.vllm import fused_graph, fused_layers, fused_routers, plugin
from cute_kernels.integrations.vllm.routers import routers_in_code
from cute_kernels.integrations.vllm.seams import replace_once, say_once
from cute_kernels.integrations.vllm.versions import Interface


class FusionPass(InductorPass):
    """The fusion as a pass of vLLM. layers: the engine's layers by name."""

    def __init__(self, layers: Mapping[str, object]) -> None:
        self.layers = layers

    def __call__(self, graph: fx.Graph) -> None:
        found = fused_graph.fuse(graph, _sums())
        found["routers"] = fused_routers.fuse(graph, routers_in_code(self.layers.values()))
        if any(found.values()):
            say_once(
                f"in a part of the model {found['gates']} gates and {found['residuals']} residual sums "
                f"are fused into products, {found['norms']} norms run here, {found['left']} of them in products around "
                f"them where kernels can, and all products of {found['whole']} layers are one launch where a kernel "
                f"can; {found['routers']} routers run here"
            )

    def uuid(self) -> str:
        sources = InductorPass.hash_source("".join(map(inspect.getsource, (fused_graph, fused_routers))))
        return f"cute-kernels {__version__} {sources} {sorted(routers_in_code(self.layers.values()))}"


@functools.cache
def _sums() -> fused_graph.Sums | None:
    """Returns the `Sums` of vLLM's operators of norms; None if this vLLM has none with these names."""
    operators = torch.ops.vllm_ir
    try:
        add_norm, norm = operators.fused_add_rms_norm.default, operators.rms_norm.default
    except AttributeError:
        return None
    return fused_graph.Sums(add_norm, norm, fused_layers.is_norm_ready)


# -- the seam ---------------------------------------------------------------------------------------------------------


def replace(interface: Interface) -> str:
    """Appends `FusionPass` to vLLM's passes. Returns a line for the log."""
    module, name = interface.pass_manager
    replace_once(module, f"{name}.configure", _ends_with_fusion)
    return "gates, residual sums and norms are fused into quantised products in compiled graphs"


def _ends_with_fusion(original: Any) -> Any:
    def configure(self: Foreign, config: Foreign) -> None:
        original(self, config)
        if plugin.is_replaced("fusion") and not envs.VLLM_BATCH_INVARIANT:
            self.passes.append(FusionPass(config.compilation_config.static_forward_context))

    return configure
