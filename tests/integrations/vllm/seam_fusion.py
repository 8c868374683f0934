"""Checks of what is fused in traced graphs."""

# vLLM is not installed where types are checked.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch.nn import functional

from tests.integrations.vllm.checks import check, check_once

HIDDEN, MIDDLE, EPS = 256, 384, 1e-5


def product(k: int, n: int, seed: int) -> Callable[..., torch.Tensor]:
    """x W^T of a W4 layer, by the operator that the plugin's layers call."""
    from cute_kernels.gemm import quantize_weight

    weight = quantize_weight(torch.randn(n, k, generator=torch.Generator().manual_seed(seed)).bfloat16() / k**0.5)
    fields = weight.codes, weight.scales

    def call(x: torch.Tensor, out_dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        given = (None, None, None, weight.format.key, n, k, None, out_dtype)
        out = torch.ops.cute_kernels.weight_only_linear(x.reshape(-1, k).contiguous(), *fields, *given)
        return out.reshape(*x.shape[:-1], n)

    return call


def rewritten(
    model: Callable[..., Any], *arguments: torch.Tensor, ready: bool = True
) -> tuple[Counter[str], dict[str, int]]:
    """(operators of the model's rewritten graph, what was found); the graph gives what the model does.

    The graph is as a pass of vLLM's sees it: of any number of rows, with operations decomposed. ready: whether norms
    of this package can be launched.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.decomposition import select_decomp_table

    from cute_kernels.integrations.vllm import fused_graph, fusion

    sums = fusion._sums()
    assert sums is not None
    names: Counter[str] = Counter()
    found: dict[str, int] = {}

    def rewrite(graph: fx.GraphModule, _: Any) -> fx.GraphModule:
        found.update(fused_graph.fuse(graph.graph, fused_graph.Sums(sums.add_norm, sums.norm, lambda *_: ready)))
        graph.graph.eliminate_dead_code()
        graph.graph.lint()
        names.update(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        graph.recompile()
        return graph

    torch._dynamo.reset()
    for argument in arguments:
        torch._dynamo.mark_dynamic(argument, 0)
    backend = aot_autograd(fw_compiler=rewrite, decompositions=select_decomp_table())
    with torch.no_grad():
        results = torch.compile(model, backend=backend, fullgraph=True)(*arguments)
        for one, other in zip(results, model(*arguments), strict=True):
            assert one.shape == other.shape and one.dtype == other.dtype
            error = (one.float() - other.float()).norm() / other.float().norm()
            assert error < 0.01, float(error)
    return names, found


LINEAR, NORM = "cute_kernels.weight_only_linear.default", "cute_kernels.norm.default"
GIVING = "cute_kernels.weight_only_linear_norm.default"
TAKING = "cute_kernels.weight_only_linear_of_normed.default"
LAYER = "cute_kernels.layer_products.default"


def rows(*columns: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(6, count, generator=generator).bfloat16() for count in columns]


@check
def a_block_becomes_three_launches() -> None:
    """o, the sum with its norm, gate and up, down, the sum with its norm, as vLLM's Llama has them."""
    from vllm.ir import ops

    from cute_kernels.integrations.vllm import fused_layers

    attended, both, down = product(HIDDEN, HIDDEN, 0), product(HIDDEN, 2 * MIDDLE, 1), product(MIDDLE, HIDDEN, 2)
    weight = torch.rand(HIDDEN, generator=torch.Generator().manual_seed(3)).bfloat16()

    def block(x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = ops.fused_add_rms_norm(attended(x), residual, weight, EPS)
        x = fused_layers.in_order(both(x))
        x = functional.silu(x[..., :MIDDLE]) * x[..., MIDDLE:]
        return ops.fused_add_rms_norm(down(x), residual, weight, EPS)

    names, found = rewritten(block, *rows(HIDDEN, HIDDEN))  # the second norm goes to nobody here
    assert found == {"gates": 1, "residuals": 2, "norms": 2, "left": 1, "whole": 0}, found
    assert _ours(names) == {GIVING: 1, TAKING: 1, LINEAR: 1, NORM: 1}, names
    assert not any("sigmoid" in name or "add" in name for name in names), names
    names, found = rewritten(block, *rows(HIDDEN, HIDDEN), ready=False)
    assert found == {"gates": 1, "residuals": 2, "norms": 0, "left": 0, "whole": 0}, found
    assert NORM not in names, names


def _ours(names: Counter[str]) -> dict[str, int]:
    return {name: count for name, count in names.items() if name.startswith("cute")}


@check_once
def norms_between_products_are_left_to_them() -> None:
    """What lies between two attentions: o, gate and up, down, the next layer's q, k and v."""
    from vllm.ir import ops

    from cute_kernels.integrations.vllm import fused_layers

    attended, both, down = product(HIDDEN, HIDDEN, 0), product(HIDDEN, 2 * MIDDLE, 1), product(MIDDLE, HIDDEN, 2)
    qkv, more = product(HIDDEN, 2 * HIDDEN, 4), product(HIDDEN, HIDDEN, 5)
    weight = torch.rand(HIDDEN, generator=torch.Generator().manual_seed(3)).bfloat16()
    order = torch.randperm(HIDDEN, generator=torch.Generator().manual_seed(4))

    def layer(taken: Callable[[torch.Tensor], tuple[torch.Tensor, ...]], weight: torch.Tensor = weight) -> Any:
        def run(x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, ...]:
            x, residual = ops.fused_add_rms_norm(attended(x), residual, weight, EPS)
            x = fused_layers.in_order(both(x))
            x = functional.silu(x[..., :MIDDLE]) * x[..., MIDDLE:]
            x, residual = ops.fused_add_rms_norm(down(x), residual, weight, EPS)
            return (*taken(x), residual)

        return run

    names, found = rewritten(layer(lambda x: (qkv(x),)), *rows(HIDDEN, HIDDEN))
    assert found == {"gates": 1, "residuals": 2, "norms": 2, "left": 2, "whole": 0}, found
    assert _ours(names) == {GIVING: 2, TAKING: 2}, names
    others: dict[str, Callable[[torch.Tensor], tuple[torch.Tensor, ...]]] = {
        "two products": lambda x: (qkv(x), more(x)),
        "an adapter beside it": lambda x: (qkv(x) + x.sum(1, keepdim=True),),
        "act order": lambda x: (qkv(x.index_select(1, order)),),
        "another dtype": lambda x: (qkv(x, torch.float32),),
        "nobody": lambda x: (x,),
    }
    for name, taken in others.items():
        names, found = rewritten(layer(taken), *rows(HIDDEN, HIDDEN))
        assert found["left"] == 1 and names[NORM] == 1, (name, names, found)
    assert rewritten(layer(lambda x: (qkv(x),), weight.float()), *rows(HIDDEN, HIDDEN))[1]["left"] == 0


@check_once
def what_lies_between_two_attentions_is_one_operator() -> None:
    """Where its weights are such that one launch may serve it."""
    from vllm.ir import ops

    from cute_kernels.integrations.vllm import fused_layers

    middle = 2 * MIDDLE - HIDDEN  # in whole tiles of inputs
    attended, both, down = product(HIDDEN, HIDDEN, 0), product(HIDDEN, 2 * middle, 1), product(middle, HIDDEN, 2)
    qkv, odd = product(HIDDEN, 2 * HIDDEN, 4), product(HIDDEN, 2 * HIDDEN + 32, 5)
    before, after = (torch.rand(HIDDEN, generator=torch.Generator().manual_seed(i)).bfloat16() for i in (3, 6))

    def layer(last: Callable[[torch.Tensor], torch.Tensor] = qkv, eps: float = EPS, seen: str = "") -> Any:
        def run(x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, ...]:
            x, residual = ops.fused_add_rms_norm(attended(x), residual, before, EPS)
            rows = residual
            x = fused_layers.in_order(both(x))
            gated = functional.silu(x[..., :middle]) * x[..., middle:]
            x, residual = ops.fused_add_rms_norm(down(gated), residual, after, eps)
            q, k = last(x).split([HIDDEN, HIDDEN + (32 if last is odd else 0)], dim=-1)
            return q, k * 2, residual, *[one + 1 for name, one in (("rows", rows), ("gated", gated)) if name == seen]

        return run

    names, found = rewritten(layer(), *rows(HIDDEN, HIDDEN))
    assert found == {"gates": 1, "residuals": 2, "norms": 2, "left": 2, "whole": 1}, found
    assert _ours(names) == {LAYER: 1}, names
    others = {"tiles": layer(odd), "another epsilon": layer(eps=1e-6)}
    others |= {name: layer(seen=name) for name in ("rows", "gated")}
    for name, run in others.items():
        names, found = rewritten(run, *rows(HIDDEN, HIDDEN))
        assert (found["left"], found["whole"]) == (2, 0) and _ours(names) == {GIVING: 2, TAKING: 2}, (name, names)


@check
def rewritten_graphs_are_lowered_by_inductor() -> None:
    """As vLLM has it: what a node says of its arguments must be of its own operator."""
    for middle in (MIDDLE, 2 * MIDDLE - HIDDEN):
        _lower_layer(middle)


def _lower_layer(middle: int) -> None:
    from torch._inductor import config
    from torch._inductor.custom_graph_pass import CustomGraphPass
    from vllm.ir import ops

    from cute_kernels.integrations.vllm import fused_graph, fused_layers, fusion

    if shutil.which(os.environ.get("CXX", "g++")) is None:  # Inductor's code for a CPU is C++
        return
    sums = fusion._sums()
    assert sums is not None
    attended, both, down = product(HIDDEN, HIDDEN, 0), product(HIDDEN, 2 * middle, 1), product(middle, HIDDEN, 2)
    qkv, found = product(HIDDEN, 2 * HIDDEN, 4), {}
    weight = torch.rand(HIDDEN, generator=torch.Generator().manual_seed(3)).bfloat16()

    class Pass(CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            found.update(fused_graph.fuse(graph, fused_graph.Sums(sums.add_norm, sums.norm, lambda *_: True)))
            graph.eliminate_dead_code()

        def uuid(self) -> None:
            """No graph is kept."""

    def layer(x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x, residual = ops.fused_add_rms_norm(attended(x), residual, weight, EPS)
        x = fused_layers.in_order(both(x))
        x = functional.silu(x[..., :middle]) * x[..., middle:]
        x, residual = ops.fused_add_rms_norm(down(x), residual, weight, EPS)
        return qkv(x), residual

    arguments = rows(HIDDEN, HIDDEN)
    for argument in arguments:
        torch._dynamo.mark_dynamic(argument, 0)
    torch._dynamo.reset()
    with torch.no_grad(), config.patch(post_grad_custom_post_pass=Pass(), fx_graph_cache=False):
        results = torch.compile(layer, fullgraph=True)(*arguments)
    assert found == {"gates": 1, "residuals": 2, "norms": 2, "left": 2, "whole": int(middle % 256 == 0)}, found
    for one, other in zip(results, layer(*arguments), strict=True):
        assert (one.float() - other.float()).norm() < 0.01 * other.float().norm()


@check
def sums_over_gpus_keep_their_norms() -> None:
    """What lies between a product and its sum is another operator: the norm adds the residual."""
    from vllm.ir import ops

    attended, qkv = product(HIDDEN, HIDDEN, 0), product(HIDDEN, 2 * HIDDEN, 4)
    weight = torch.rand(HIDDEN, generator=torch.Generator().manual_seed(3)).bfloat16()

    def block(x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x, residual = ops.fused_add_rms_norm(attended(x) * 2, residual, weight, EPS)
        return qkv(x), residual

    names, found = rewritten(block, *rows(HIDDEN, HIDDEN))
    assert found == {"gates": 0, "residuals": 0, "norms": 1, "left": 0, "whole": 0}, found
    assert _ours(names) == {LINEAR: 2, NORM: 1}, names


@check_once
def what_only_looks_like_it_is_left_alone() -> None:
    from vllm.ir import ops

    from cute_kernels.integrations.vllm import fused_layers

    both, wide = product(HIDDEN, 2 * MIDDLE, 1), product(HIDDEN, HIDDEN, 0)
    weight = torch.rand(HIDDEN, generator=torch.Generator().manual_seed(3)).bfloat16()

    def gate(act: Callable[[torch.Tensor], torch.Tensor], sort: bool = True, more: bool = False) -> Any:
        def mlp(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            y = both(x)
            ordered = fused_layers.in_order(y) if sort else y
            gated = act(ordered[..., :MIDDLE]) * ordered[..., MIDDLE:]
            return (gated, y.sum(1)) if more else (gated,)

        return mlp

    assert rewritten(gate(functional.silu), *rows(HIDDEN))[1]["gates"] == 1
    assert rewritten(gate(functional.gelu), *rows(HIDDEN))[1]["gates"] == 0
    assert rewritten(gate(functional.silu, sort=False), *rows(HIDDEN))[1]["gates"] == 0
    assert rewritten(gate(functional.silu, more=True), *rows(HIDDEN))[1]["gates"] == 0

    def twice(x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = wide(x)  # used again
        return (*ops.fused_add_rms_norm(y, residual, weight, EPS), y * 2)

    assert rewritten(twice, *rows(HIDDEN, HIDDEN))[1] == {"gates": 0, "residuals": 0, "norms": 1, "left": 0, "whole": 0}

    def part(x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return ops.fused_add_rms_norm(wide(x), residual, weight, EPS, 128)  # the norm of some columns

    assert rewritten(part, *rows(HIDDEN, HIDDEN))[1] == {"gates": 0, "residuals": 0, "norms": 0, "left": 0, "whole": 0}

    def wider(x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return ops.fused_add_rms_norm(wide(x, torch.float32), residual.float(), weight.float(), EPS)

    assert rewritten(wider, *rows(HIDDEN, HIDDEN))[1] == {"gates": 0, "residuals": 0, "norms": 0, "left": 0, "whole": 0}


@check
def other_products_norms_are_fused_with_their_sums() -> None:
    """Of experts, whose results no epilogue adds to: the norm takes the sum."""
    from vllm.ir import ops

    weight = torch.rand(HIDDEN, generator=torch.Generator().manual_seed(3)).bfloat16()
    after = product(HIDDEN, HIDDEN, 0)

    def block(x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = ops.fused_add_rms_norm(x * 2, residual, weight, EPS)
        return after(x), residual

    assert rewritten(block, *rows(HIDDEN, HIDDEN))[1] == {"gates": 0, "residuals": 0, "norms": 1, "left": 0, "whole": 0}
    assert rewritten(block, *rows(HIDDEN, HIDDEN), ready=False)[1] == {
        "gates": 0,
        "residuals": 0,
        "norms": 0,
        "left": 0,
        "whole": 0,
    }


@check
def norms_without_a_product_beside_them_are_left_alone() -> None:
    """Of bf16 layers and of others that quantise: Inductor fuses those norms with what it has there."""
    from vllm.ir import ops

    ours, weight = product(HIDDEN, HIDDEN, 0), torch.rand(HIDDEN).bfloat16()
    dense = torch.randn(HIDDEN, HIDDEN).bfloat16()

    def block(before: Any, after: Any) -> Any:
        def run(x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, ...]:
            x, residual = ops.fused_add_rms_norm(before(x), residual, weight, EPS)
            return after(x), residual

        return run

    def bf16(x: torch.Tensor) -> torch.Tensor:
        return x @ dense

    def fp8(x: torch.Tensor) -> torch.Tensor:
        return x.clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype) @ dense

    for before, after, norms in ((bf16, bf16, 0), (bf16, fp8, 0), (ours, bf16, 1), (bf16, ours, 1)):
        names, found = rewritten(block(before, after), *rows(HIDDEN, HIDDEN))
        assert found["norms"] == norms == names[NORM], (before, after, names)

    def far(x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x, residual = ops.fused_add_rms_norm(x @ dense, residual, weight, EPS)
        return ours(x @ dense), residual  # in the same part of the model

    assert rewritten(far, *rows(HIDDEN, HIDDEN))[1]["norms"] == 0


@check
def norms_that_a_graph_asks_for_are_settled_before_it_is_kept() -> None:
    """vLLM keeps graphs from one start to the next: with other kernels there it must make another one."""
    from cute_kernels.integrations.vllm import fused_layers, plugin

    class Cache:
        def __init__(self, *residuals: bool) -> None:
            self.residuals = residuals

        def has(self, spec: Any, arch: str) -> bool:
            return spec.config.has_residual in self.residuals

    def settled(*there: bool, columns: int = 512) -> tuple[str, list[bool]]:
        fused_layers.settle_norms.cache_clear()
        plugin._served.clear()
        with (
            mock.patch.multiple(fused_layers, compiler_version=lambda: None, default_cache=lambda: Cache(*there)),
            mock.patch.multiple(fused_layers, arch_of=lambda index: "sm_90a"),
            mock.patch.object(fused_layers.prepare, "load") as load,
        ):
            fused_layers.settle_norms(columns, torch.bfloat16)
        assert [spec.config.has_residual for spec in load.call_args[0][1]] == list(there)
        return plugin.fingerprint(), [fused_layers.is_norm_ready(columns, torch.bfloat16, one) for one in (False, True)]

    assert not fused_layers.is_norm_ready(768, torch.bfloat16, True)  # of layers that are not ours
    found = [settled(), settled(False), settled(False, True)]
    assert [ready for _, ready in found] == [[False, False], [True, False], [True, True]]
    assert len({kept for kept, _ in found}) == 3


@check
def passes_end_with_the_fusion() -> None:
    from vllm.compilation.passes.pass_manager import PostGradPassManager

    from cute_kernels.integrations.vllm import fusion, versions

    def configure(self: Any, config: Any) -> None:
        self.passes.append("vLLM's")

    with mock.patch.object(PostGradPassManager, "configure", configure):
        said = [fusion.replace(versions.INTERFACES[0, 26]) for _ in range(2)]
        assert said[0] == said[1]
        manager: Any = SimpleNamespace(passes=[])
        config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context={}))
        PostGradPassManager.configure(manager, config)
    assert [str(type(one).__name__) for one in manager.passes] == ["str", "FusionPass"]
    one, other = manager.passes[1].uuid(), fusion.FusionPass({}).uuid()
    assert one == other and "cute-kernels" in one


@check
def the_launch_of_a_layers_products_is_compiled_beside_the_engine() -> None:
    """The compiler would take as long to be imported as the kernel to be compiled."""
    from cute_kernels.formats.weights import integers
    from cute_kernels.gemm.problem import LinearProblem
    from cute_kernels.integrations.vllm import fused_layers, prepare

    down = LinearProblem(1, 4096, 14336, 14336, integers(4), "bf16")
    with mock.patch.multiple(fused_layers, _load_those_there=mock.DEFAULT, kernel_of=mock.DEFAULT) as made:
        fused_layers.make_whole_ready.__wrapped__(down, prepare.RowCounts((1, 2), 8))
    (asked,) = made["_load_those_there"].call_args.args
    assert [spec.family for spec in asked] == ["linear"]
    made["kernel_of"].assert_called_once_with(14336, 0)


@check
def layers_are_made_for_it_where_graphs_are_compiled() -> None:
    from cute_kernels.integrations.vllm import fused_layers

    def asked(mode: int = 3, backend: str = "inductor", act: str = "silu", lora: Any = None) -> fused_layers.Fused:
        config = SimpleNamespace(
            compilation_config=SimpleNamespace(mode=mode, backend=backend),
            model_config=SimpleNamespace(hf_text_config=SimpleNamespace(hidden_act=act)),
            lora_config=lora,
        )
        with mock.patch.object(fused_layers, "get_current_vllm_config_or_none", lambda: config):
            return fused_layers.wanted()

    assert asked() == fused_layers.Fused(gates=True, sums=True)
    assert asked(act="gelu") == asked(lora=SimpleNamespace()) == fused_layers.Fused(sums=True)
    assert asked(mode=0) == asked(backend="eager") == fused_layers.Fused()
    with mock.patch.object(fused_layers, "envs", SimpleNamespace(VLLM_BATCH_INVARIANT=True)):
        assert asked() == fused_layers.Fused()
    with mock.patch.object(fused_layers.plugin, "is_replaced", lambda seam: False):
        assert asked() == fused_layers.Fused()

    def layer(prefix: str = "model.layers.0.mlp.gate_up_proj", sizes: Any = (64, 64), bias: Any = None) -> Any:
        return SimpleNamespace(prefix=prefix, output_partition_sizes=sizes, bias=bias)

    two, unknown = {"num_hidden_layers": 2}, {}
    # Of two layers with experts, norms are between products no more.
    for experts, known, side in ((0, two, "takes"), (1, two, "takes"), (2, two, None), (2, unknown, "takes")):
        config = SimpleNamespace(
            compilation_config=SimpleNamespace(static_all_moe_layers=["experts"] * experts),
            model_config=SimpleNamespace(hf_text_config=SimpleNamespace(**known)),
        )
        with mock.patch.object(fused_layers, "get_current_vllm_config_or_none", lambda config=config: config):
            assert fused_layers.side_of_norm(layer()) == side

    assert fused_layers.is_gated(layer())
    assert not fused_layers.is_gated(layer("model.layers.0.self_attn.qkv_proj"))
    assert not fused_layers.is_gated(layer(sizes=(64, 32))) and not fused_layers.is_gated(layer(sizes=(64,)))
    assert not fused_layers.is_gated(layer(bias=torch.zeros(128)))


@check
def gated_layers_of_every_checkpoint_give_their_results_in_order() -> None:
    """Whether anything is fused behind them or not."""
    from cute_kernels.integrations.vllm import fused_layers
    from tests.integrations.vllm import layers

    with mock.patch.object(fused_layers, "wanted", lambda: fused_layers.Fused(gates=True)):
        for form in layers.checkpoints():
            parts = [form.n // 2, form.n // 2]
            layer = layers.make(form, "cpu", prefix="model.layers.3.mlp.gate_up_proj", output_partition_sizes=parts)
            assert layer.kernel.is_interleaved, str(form)
            x = torch.randn(5, form.k, dtype=form.dtype)
            expected = x.double() @ layer.weight.T
            error = (layer.apply(x).double() - expected).abs().max() / expected.abs().max()
            assert error < (2**-7 if form.dtype == torch.bfloat16 else 2**-9), (str(form), float(error))
            plain = layers.make(form, "cpu", prefix="model.layers.3.self_attn.qkv_proj", output_partition_sizes=parts)
            assert not plain.kernel.is_interleaved
