"""Checks of routers of layers of experts: vLLM's own gates, routers and runners, on the CPU."""

# vLLM is not installed where types are checked.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import itertools
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch.nn import functional

from cute_kernels.gemm.experts.router.reference import route_reference
from cute_kernels.gemm.experts.router.routing import Routing
from tests.integrations.vllm.checks import check, hopper

EXPERTS, HIDDEN, NAME = 16, 64, "model.layers.0.mlp.experts"
FUSED_MOE = "vllm.model_executor.layers.fused_moe"


@contextmanager
def engine() -> Iterator[dict[str, Any]]:
    """An engine whose layers are made within the block; gives the layers that vLLM's operators find, by name."""
    from vllm.model_executor.layers.fused_moe.router import gate_linear, router_factory
    from vllm.model_executor.layers.fused_moe.runner import moe_runner

    from cute_kernels.gemm.experts.router import plan
    from cute_kernels.integrations.vllm import fused_layers, prepare, routers

    layers: dict[str, Any] = {}
    ranks = ("vllm.model_executor.parameter", "vllm.model_executor.layers.linear")
    context = SimpleNamespace(dp_metadata=None, is_padding=None, no_compile_layers=layers, all_moe_layers=None)
    with ExitStack() as stack:
        enter = stack.enter_context
        for module, (name, value) in itertools.product(ranks, {"rank": 0, "world_size": 1}.items()):
            enter(mock.patch(f"{module}.get_tensor_model_parallel_{name}", lambda value=value: value))
        gpu = SimpleNamespace(**vars(hopper()), is_rocm=lambda: False, is_cpu=lambda: False)
        gpu.is_device_capability_family = lambda family: False
        gpu.is_device_capability = lambda capability: False  # of kernels that are not here
        enter(mock.patch.object(gate_linear, "current_platform", gpu))
        enter(mock.patch.object(router_factory, "current_platform", gpu, create=True))
        enter(mock.patch.object(moe_runner, "get_current_vllm_config", lambda: None))
        enter(mock.patch.object(moe_runner, "get_forward_context", lambda: context))
        enter(mock.patch.object(moe_runner.MoERunner, "_select_forward", lambda runner: None))
        enter(mock.patch.object(moe_runner, "register_layer_for_moe_forward_op", lambda config, layer: None))
        enter(mock.patch.object(prepare, "layer_named", layers.get))
        enter(mock.patch.object(prepare, "why_left", lambda seam: None))
        enter(mock.patch.object(routers, "wanted", lambda: fused_layers.Fused(sums=True)))
        enter(mock.patch.object(plan, "is_supported", lambda index: True))
        yield layers


class Chosen(torch.nn.Module):
    """Stands for routed experts: keeps what the router chose."""

    layer_name = NAME

    def __init__(self) -> None:
        super().__init__()
        self.packed = torch.nn.Parameter(torch.empty(0))
        self.quant_method = SimpleNamespace(
            is_monolithic=False, topk_indices_dtype=None, supports_internal_mk=True, moe_kernel=None
        )
        self.quant_method.mk_owns_shared_expert = self.quant_method.mk_can_overlap_shared_experts = False

    def _ensure_moe_quant_config_init(self) -> None:
        pass

    def forward_modular(self, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, **_: Any) -> Any:
        self.weights, self.ids = topk_weights, topk_ids
        return x.clone()


def make_runner(
    layers: dict[str, Any], dtype: torch.dtype = torch.bfloat16, gate: Any = None, in_code: bool = False, **router: Any
) -> Any:
    """A runner with a random gate, or without one where the model's own code has it, and a router that vLLM makes."""
    from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear
    from vllm.model_executor.layers.fused_moe.router.router_factory import create_fused_moe_router
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

    generator = torch.Generator().manual_seed(0)
    gate = None if in_code else gate or GateLinear(HIDDEN, EXPERTS, params_dtype=dtype, prefix="gate")
    if gate is not None:
        gate.weight.data.normal_(generator=generator)
    parallel = SimpleNamespace(dp_size=1, pcp_size=1, is_sequence_parallel=False, use_all2all_kernels=False)
    config = mock.MagicMock(moe_parallel_config=parallel, in_dtype=torch.bfloat16, pcp_size=1, dp_size=1)
    config.is_sequence_parallel, config.sp_size = False, 1
    made = create_fused_moe_router(top_k=4, global_num_experts=EXPERTS, **router)
    layers[NAME] = runner = MoERunner(NAME, config, made, Chosen(), gate=gate)
    return runner


def run(runner: Any, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(hidden states, ids, weights) of a step of a runner, which a model gives hidden states instead of logits."""
    hidden = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(tokens)).bfloat16()
    runner._forward_impl(hidden, hidden, None, None)
    return hidden, runner.routed_experts.ids, runner.routed_experts.weights


def reason(runner: Any) -> str:
    from cute_kernels.integrations.vllm import routers

    return str(routers.reason_against(runner, torch.device("cpu")))


CORRECTION = torch.linspace(-0.2, 0.2, EXPERTS)
GROUPED = {"use_grouped_topk": True, "num_expert_group": 4, "topk_group": 2}
SERVED: tuple[tuple[dict[str, Any], Routing, bool], ...] = (
    ({"renormalize": True}, Routing(4, renormalize=True), False),  # Qwen3-MoE
    ({"renormalize": False}, Routing(4), False),
    ({"renormalize": False, "scoring_func": "sigmoid"}, Routing(4, "sigmoid"), False),
    (
        {"scoring_func": "sigmoid", "routed_scaling_factor": 2.5, **GROUPED},  # DeepSeek V3
        Routing(4, "sigmoid", True, 2.5, 4, 2),
        True,
    ),
    ({"scoring_func": "sigmoid", "routed_scaling_factor": 1.5}, Routing(4, "sigmoid", True, 1.5), True),
    ({"scoring_func": "softmax", **GROUPED}, Routing(4, "softmax", True, 1.0, 4, 2), True),
    ({"scoring_func": "sqrtsoftplus"}, Routing(4, "sqrtsoftplus", True), True),  # DeepSeek V4
)
"""Arguments of vLLM's routers, what they compute, and whether with a correction."""


@check
def routers_of_models_choose_what_the_reference_chooses() -> None:
    from cute_kernels.integrations.vllm import routers

    for (arguments, routing, corrected), dtype in itertools.product(SERVED, (torch.bfloat16, torch.float32)):
        correction = CORRECTION if corrected else None
        with engine() as layers:
            runner = make_runner(layers, dtype, **arguments, e_score_correction_bias=correction)
            assert reason(runner) == "None", (arguments, reason(runner))
            parameters = dict(runner.named_parameters())
            routers.connect(runner.routed_experts)
            assert routers.router_of(runner).routing == routing, arguments
            with mock.patch.object(type(runner.router), "_compute_routing", side_effect=AssertionError("vLLM's")):
                for tokens in (1, 7, 64):
                    hidden, ids, weights = run(runner, tokens)
                    wanted = route_reference(hidden, runner.gate.__self__.gate.weight, routing, correction=correction)
                    assert torch.equal(ids, wanted[0]) and ids.dtype == torch.int32, arguments
                    assert torch.allclose(weights, wanted[1]) and weights.dtype == torch.float32, arguments
        after = dict(runner.named_parameters())
        assert after.keys() == parameters.keys() and all(after[name] is parameters[name] for name in after)


@check
def many_tokens_take_vllms_gate_and_router() -> None:
    """Two launches choose their experts in any case."""
    from cute_kernels.integrations.vllm import routers

    with engine() as layers:
        runner = make_runner(layers)
        gate = runner.gate
        routers.connect(runner.routed_experts)
        given = torch.rand(65, 4), torch.zeros(65, 4, dtype=torch.int32)
        with mock.patch.object(type(runner.router), "_compute_routing", autospec=True, return_value=given) as own:
            hidden, ids, weights = run(runner, 65)
        router, states, logits, _ = own.call_args.args
        assert router is runner.router and states is hidden and torch.equal(logits, gate(hidden)[0])
        assert ids is given[1] and weights is given[0]


@check
def experts_that_moved_and_their_records_are_vllms_as_before() -> None:
    """EPLB maps ids to places, and a recorder gets them before that."""
    from vllm.model_executor.layers.fused_moe.router import base_router

    from cute_kernels.integrations.vllm import routers

    recorded: list[torch.Tensor] = []
    with engine() as layers:
        runner = make_runner(layers)
        routers.connect(runner.routed_experts)
        runner.router.set_capture_fn(recorded.append)
        mapped = mock.patch.object(base_router.BaseRouter, "_apply_eplb_mapping", lambda router, ids: ids + 100)
        with mapped:
            _, ids, _ = run(runner, 7)
    assert torch.equal(ids, recorded[0] + 100) and int(recorded[0].max()) < EXPERTS


@check
def padding_has_no_experts_where_vllms_router_gives_it_none() -> None:
    from cute_kernels.integrations.vllm import routers

    rows = torch.arange(64) >= 5
    with engine() as layers:
        runner = make_runner(layers)
        routers.connect(runner.routed_experts)
        module = sys.modules[type(runner.router).__module__]
        with mock.patch.object(module, routers.PADDING, lambda tokens: rows[:tokens], create=True):
            _, ids, _ = run(runner, 7)
        with mock.patch.object(module, routers.PADDING, lambda tokens: rows[:3], create=True):
            _, others, _ = run(runner, 7)  # a drafting model's step, beside the context of another
    assert bool((ids[5:] == -1).all()) and int(ids[:5].min()) >= 0
    assert torch.equal(others[:5], ids[:5]) and int(others.min()) >= 0
    with engine() as layers:
        runner = make_runner(layers, scoring_func="sigmoid", e_score_correction_bias=CORRECTION, **GROUPED)
        routers.connect(runner.routed_experts)
        assert not hasattr(sys.modules[type(runner.router).__module__], routers.PADDING)
        assert int(run(runner, 7)[1].min()) >= 0


@check
def other_routers_are_left_to_vllm_with_a_reason() -> None:
    from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear

    from cute_kernels.integrations.vllm import fused_layers, routers

    def refused(wanted: str, change: Any = None, **arguments: Any) -> None:
        with engine() as layers:
            runner = make_runner(layers, **arguments)
            if change is not None:
                change(runner)
            assert wanted in reason(runner), (wanted, reason(runner))
            gate, own = runner.gate, runner.router._compute_routing
            with mock.patch.object(routers, "say_once") as said:
                routers.connect(runner.routed_experts)
            said.assert_called_once_with(f"routers of experts are left to vLLM: {reason(runner)}")
            assert runner.gate is gate and runner.router._compute_routing == own
            assert vars(runner).get("gate") is None and "_compute_routing" not in vars(runner.router)

    def setting(*path: str, value: Any) -> Any:
        def change(runner: Any) -> None:
            *owners, name = path
            for owner in owners:
                runner = getattr(runner, owner)
            setattr(runner, name, value)

        return change

    corrected: dict[str, Any] = {"scoring_func": "sigmoid", "e_score_correction_bias": CORRECTION}
    with engine() as layers, mock.patch.object(routers, "wanted", fused_layers.Fused):
        assert "a gate in the model's own code without fusion" in reason(make_runner(layers, in_code=True))
    refused("CustomRoutingRouter", custom_routing_function=lambda **_: None)
    refused("a quantised gate", setting("gate", "quant_method", value=SimpleNamespace()))
    refused("hooks of a gate", lambda runner: runner.gate.register_forward_hook(lambda *_: None))
    refused("a gate with a shared expert's", setting("shared_expert_gate", value=torch.nn.Linear(HIDDEN, 1)))
    for name in ("dp_size", "pcp_size", "is_sequence_parallel"):
        refused("tokens of several GPUs", setting("moe_config", "moe_parallel_config", name, value=2))
    refused("experts by token", setting("router", "_hash_indices_table", value=CORRECTION), **corrected)
    refused("a bias for images", setting("router", "bias_vl", value=CORRECTION), **corrected)
    refused("shared experts among the others", setting("router", "num_fused_shared_experts", value=1), **corrected)
    refused("padding left out of groups", setting("router", "skip_padding", value=True), **corrected, **GROUPED)
    refused("groups ranked by their best expert", **GROUPED)
    odd = {**GROUPED, "num_expert_group": 3}
    refused("3 groups of 16 experts", **corrected, **odd)
    refused(
        "correction: got dtype", setting("router", "e_score_correction_bias", value=CORRECTION.double()), **corrected
    )
    refused("in torch.float32", setting("moe_config", "in_dtype", value=torch.float32))
    with mock.patch.object(routers.envs, "VLLM_BATCH_INVARIANT", True, create=True):
        refused("VLLM_BATCH_INVARIANT")
    with engine() as layers:
        gate = GateLinear(HIDDEN, HIDDEN, params_dtype=torch.bfloat16, prefix="gate")
        assert f"{HIDDEN} experts of {HIDDEN} features" in reason(make_runner(layers, gate=gate))
    for attribute, owner in (("router", "runner"), ("moe_config", "runner"), ("renormalize", "router")):
        with engine() as layers:  # another version's
            runner = make_runner(layers)
            delattr(runner if owner == "runner" else runner.router, attribute)
            with mock.patch.object(routers, "say_once") as said:
                routers.connect(runner.routed_experts)
            assert "left to vLLM" in said.call_args.args[0] and attribute in said.call_args.args[0]
    with engine() as layers:
        runner = make_runner(layers)
        with mock.patch.object(routers.prepare, "make_ready", return_value="2 kernels are in no bundle"):
            routers.connect(runner.routed_experts)
        assert "gate" not in vars(runner) and "_compute_routing" not in vars(runner.router)


@check
def layers_of_experts_connect_their_routers_once_they_are_packed() -> None:
    """And weights that are loaded again leave the router where it was."""
    import importlib

    import vllm

    from cute_kernels.integrations.vllm import moe, routers, versions
    from tests.integrations.vllm import layers as experts

    moe.current_platform = hopper()
    interface = versions.interface_of(vllm.__version__)
    assert interface is not None
    module, name = interface.expert_methods[1]
    method: Any = object.__new__(getattr(importlib.import_module(module), name))
    layer = experts.make_experts(experts.Checkpoint("gptq", 4, 32, n=96, k=128), "cpu")
    layer.layer.layer_name = NAME  # type: ignore[assignment]
    with engine() as layers, mock.patch.object(moe, "process", return_value=None):
        vars(method).update(vars(layer.method))
        runner = make_runner(layers)
        gate = runner.gate
        for _ in range(2):
            method.process_weights_after_loading(layer.layer)
            assert vars(runner)["gate"].__self__.gate is gate
        assert isinstance(runner.router._compute_routing.__self__, routers.Router)


def rewritten(model: Callable[..., Any], experts: set[int], *arguments: torch.Tensor) -> set[str]:
    """Compiles a model for any number of rows, and runs it. Returns the operators of its graph after the pass."""
    from torch._inductor import config
    from torch._inductor.custom_graph_pass import CustomGraphPass

    from cute_kernels.integrations.vllm import fused_routers

    names: set[str] = set()

    class Pass(CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            fused_routers.fuse(graph, experts)
            graph.eliminate_dead_code()
            names.update(str(node.target) for node in graph.nodes)

        def uuid(self) -> None:
            """No graph is kept."""

    torch._dynamo.reset()
    torch._dynamo.mark_dynamic(arguments[0], 0)
    as_vllm = {"post_grad_custom_post_pass": Pass(), "enable_auto_functionalized_v2": False, "fx_graph_cache": False}
    with torch.no_grad(), config.patch(as_vllm):
        torch.compile(model, fullgraph=True)(*arguments)
    return names


@check
def graphs_choose_experts_where_a_models_own_code_multiplies_by_the_gate() -> None:
    """As gpt-oss and Mixtral do."""
    from vllm.model_executor.layers.fused_moe.runner import moe_runner

    from cute_kernels.integrations.vllm import routers

    if shutil.which(os.environ.get("CXX", "g++")) is None:  # Inductor's code for a CPU is C++
        return
    name = moe_runner.LayerName(NAME) if getattr(moe_runner, "_USE_LAYERNAME", False) else NAME
    weight = torch.randn(EXPERTS, HIDDEN, generator=torch.Generator().manual_seed(4)).bfloat16()
    bias, padding = torch.randn(EXPERTS).bfloat16(), torch.arange(70) >= 60
    kinds = (None, {}), (bias, {}), (None, {"scoring_func": "sigmoid", "e_score_correction_bias": CORRECTION})
    for (bias, arguments), (reader, tokens) in itertools.product(kinds, ((False, 64), (False, 70), (True, 64))):
        hidden = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(3)).bfloat16()
        with engine() as layers:
            runner = make_runner(layers, in_code=True, **arguments)
            for _ in range(2):  # weights are loaded again
                routers.connect(runner.routed_experts)
                assert runner.gate is None

            def model(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = bias) -> tuple[Any, ...]:
                logits = functional.linear(x, weight, bias)
                out = torch.ops.vllm.moe_forward(x, logits, None, None, name, 0)
                return (out, logits) if reader else (out,)  # noqa: B023

            experts = routers.routers_in_code(layers.values())
            assert experts == {EXPERTS}
            given = torch.rand(tokens, 4), torch.zeros(tokens, 4, dtype=torch.int32)
            module = sys.modules[type(runner.router).__module__]
            with (
                mock.patch.object(type(runner.router), "_compute_routing", autospec=True, return_value=given) as own,
                mock.patch.object(module, routers.PADDING, lambda tokens: padding[:tokens], create=True),
            ):
                names = rewritten(model, experts, hidden, weight)
            multiplies = bool(names & {"aten.mm.default", "aten.addmm.default"})
            assert multiplies is reader, names  # logits that others read stay
            assert own.called is (reader or tokens > 64)
            if own.called:
                logits = own.call_args.args[2]
                assert torch.allclose(
                    logits.float(), functional.linear(hidden, weight, bias).float(), rtol=0.02, atol=0.1
                )
            else:
                added = {"bias": bias, "correction": arguments.get("e_score_correction_bias")}
                routing = routers.router_of(runner).routing
                ids, weights = route_reference(hidden, weight, routing, **added, padding=padding[:tokens])
                assert torch.equal(runner.routed_experts.ids, ids)
                assert torch.allclose(runner.routed_experts.weights, weights)


@check
def graphs_stay_where_one_router_of_a_model_cannot_be_given_its_choice() -> None:
    from cute_kernels.integrations.vllm import routers

    other: dict[str, Any] = {"custom_routing_function": lambda **_: None}
    with engine() as layers:
        first, second = make_runner(layers, in_code=True), make_runner(layers, in_code=True, **other)
        for runner in (first, second):
            layers[NAME] = runner
            routers.connect(runner.routed_experts)
        others_of_an_engine = object(), SimpleNamespace(router=None)
        assert routers.routers_in_code([first, *others_of_an_engine]) == {EXPERTS}
        assert routers.routers_in_code([first, second]) == set()
