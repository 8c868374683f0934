"""Checks of layers of experts."""

# vLLM is not installed where types are checked.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from tests.integrations.vllm.checks import check, hopper


@check
def experts_of_every_checkpoint_give_what_it_says() -> None:
    from cute_kernels.integrations.vllm import moe
    from tests.integrations.vllm import layers

    moe.current_platform = hopper()
    for checkpoint, bits, group_size, zero_point, dtype in layers.EXPERTS:
        form = layers.Checkpoint(checkpoint, bits, group_size, zero_point, dtype=dtype, n=96, k=128)
        layer, made = layers.serve_experts(form, "cpu")
        for expert_map in (None, torch.tensor([-1, 0, 1, -1, 2], dtype=torch.int32)):
            error = layers.error_of_experts(layer, made, 7, dtype, expert_map)
            assert error < (2**-6 if dtype == torch.bfloat16 else 2**-9), (str(form), error)
        assert layer.layer.w13_weight.dtype == torch.uint8


@check
def biases_and_limits_are_part_of_the_products() -> None:
    """Of gates before ups, and of gpt-oss's, which come in turn; limits are reached."""
    from cute_kernels.integrations.vllm import moe
    from tests.integrations.vllm import layers

    moe.current_platform = hopper()
    oai = {name: SimpleNamespace(value=name) for name in ("swigluoai", "swigluoai_uninterleave")}
    numbers = {"swiglu_limit": 0.5, "swiglu_alpha": 1.702, "swiglu_beta": 1.0}
    for checkpoint in ("ct", "gptq"):
        form = layers.Checkpoint(checkpoint, 4, 32, n=96, k=128)
        for attributes in (
            {"swiglu_limit": 0.5},
            {"activation": oai["swigluoai"]},
            {"activation": oai["swigluoai_uninterleave"], **numbers},
        ):
            for biased in (False, True):
                layer, made = layers.serve_experts(form, "cpu", biased, **attributes)
                assert layers.error_of_experts(layer, made, 7, form.dtype) < 2**-6, (str(form), attributes, biased)
        layer, made = layers.serve_experts(form, "cpu", True)
        assert (
            made.epilogues.activation.name == "swiglu" and layers.error_of_experts(layer, made, 7, form.dtype) < 2**-6
        )


@check
def experts_without_gates_have_the_activation_that_vllm_names() -> None:
    """Nemotron-H's squared ReLU, and others of one operand."""
    from cute_kernels.integrations.vllm import moe
    from tests.integrations.vllm import layers

    moe.current_platform = hopper()
    for name, bits in (("relu2_no_mul", 4), ("gelu_no_mul", 8), ("silu_no_mul", 4)):
        for biased in (False, True):
            form = layers.Checkpoint("ct", bits, 32, n=64, k=128)
            activation = SimpleNamespace(value=name)
            layer, made = layers.serve_experts(form, "cpu", biased, activation=activation)
            assert made.gate_up.out_features == 64 and f"{made.epilogues.activation.name}_no_mul" == name
            assert layers.error_of_experts(layer, made, 7, form.dtype) < 2**-6, (name, biased)
    for checkpoint, said in (("gptq", "without gates in"), ("awq", "without gates in"), ("ct", "of 96 features")):
        form = layers.Checkpoint(checkpoint, 4, 32, checkpoint == "awq", n=96, k=128)
        experts = layers.make_experts(form, "cpu", gated=False)
        experts.layer.activation = activation  # type: ignore[assignment]
        found = str(moe.reason_against(experts.method, experts.layer, layers.expert_source(form)))
        assert f"experts {said}" in found, found


@check
def other_experts_are_left_to_vllm_with_a_reason() -> None:
    from cute_kernels.integrations.vllm import moe
    from tests.integrations.vllm import layers

    moe.current_platform = hopper()

    def reason(form: Any, **changes: Any) -> str:
        experts, source = layers.make_experts(form, "cpu"), layers.expert_source(form)
        for name, value in changes.items():
            setattr(experts.layer, name, value)
        return str(moe.reason_against(experts.method, experts.layer, source))

    usual = {"checkpoint": "ct", "group_size": 32, "n": 96, "k": 128}
    assert reason(layers.Checkpoint(**usual)) == "None"
    assert "act-order" in reason(layers.Checkpoint(**usual, act_order=True))
    assert "experts of 80 features" in reason(layers.Checkpoint(**{**usual, "n": 80, "group_size": 0}))
    assert "the activation" in reason(layers.Checkpoint(**usual), activation=SimpleNamespace(value="gelu"))
    assert "a bias of one product" in reason(layers.Checkpoint(**usual), w13_bias=torch.zeros(1))
    loaded = {"w13_bias": torch.zeros(1), "_loaded_expert_biases": {"w13_bias"}}
    assert "a bias of one product" in reason(layers.Checkpoint(**usual), **loaded)
    assert "or its numbers" in reason(layers.Checkpoint(**usual), swiglu_limit=7.0, swiglu_alpha=1.5)
    experts = layers.make_experts(layers.Checkpoint(**usual), "cpu")
    form = layers.Checkpoint(**usual)
    experts.method.is_transposed = True
    turned = str(moe.reason_against(experts.method, experts.layer, layers.expert_source(form)))
    assert ("weights laid out for" in turned) is layers.expert_source(form).outputs_first
    experts.method.wna16_backend.value, experts.method.moe.moe_backend = "TRITON", "triton"
    experts.method.input_dtype = torch.int8  # as VLLM_MARLIN_INPUT_DTYPE does
    found = moe.reason_against(experts.method, experts.layer, layers.expert_source(layers.Checkpoint(**usual)))
    assert "weights laid out for TRITON, --moe-backend triton, quantised activations not supported" in str(found), found
    assert "weights on the input" in reason(layers.Checkpoint(**usual), apply_router_weight_on_input=True)


@check
def experts_with_lora_are_vllms_own_and_nothing_of_them_is_touched() -> None:
    """vLLM's layer with adapters wants the result of each product, which kernels here keep to themselves."""
    from cute_kernels.integrations.vllm import moe, seams
    from tests.integrations.vllm import layers

    moe.current_platform = hopper()
    for checkpoint in ("ct", "gptq", "awq"):
        form = layers.Checkpoint(checkpoint, 4, 32, checkpoint == "awq", n=96, k=128)
        experts, source = layers.make_experts(form, "cpu"), layers.expert_source(form)
        experts.method.moe.is_lora_enabled = True
        method, parameters = dict(vars(experts.method)), dict(experts.layer.named_parameters())
        values = {name: parameter.clone() for name, parameter in parameters.items()}
        original = mock.Mock()
        serve = lambda method, layer, source=source: (  # noqa: E731
            moe.reason_against(method, layer, source) or moe.process(method, layer, source)
        )
        with mock.patch.object(seams, "say_once") as said:
            seams.packs_here("experts", serve, original)(experts.method, experts.layer)
        original.assert_called_once_with(experts.method, experts.layer)
        said.assert_called_once_with("experts are left to vLLM: LoRA not supported")
        assert vars(experts.method) == method
        assert all(parameters[name] is now for name, now in experts.layer.named_parameters())
        assert all(torch.equal(values[name], parameter) for name, parameter in parameters.items())


@check
def experts_whose_zero_points_are_all_symmetric_are_packed_without() -> None:
    """A checkpoint of AWQ has zero points in any case; kernels that are looked for are those of the packed weights."""
    from cute_kernels.gemm.activations import Swiglu
    from cute_kernels.integrations.vllm import moe
    from tests.integrations.vllm import layers

    moe.current_platform = hopper()
    for bits, symmetric in ((4, False), (4, True), (8, True)):
        form = layers.Checkpoint("awq", bits, 32, not symmetric, dtype=torch.float16, n=96, k=128)
        if bits == 8:  # as compressed-tensors has it
            form = replace(form, checkpoint="ct")
        source = layers.expert_source(form)
        experts = layers.make_experts(form, "cpu")
        experts.method.quant_config.zero_point, experts.method.symmetric = True, False
        no_hand_out = mock.patch.object(all2all_utils(), "maybe_make_prepare_finalize", lambda **_: None)
        kernel = mock.patch.object(moe.modular_kernel, "FusedMoEKernel", lambda hand_out, made: made)
        made_ready = mock.patch.object(moe.prepare, "make_ready", lambda device, specs: specs())
        with no_hand_out, kernel, made_ready, mock.patch.object(moe, "_asked", return_value=None) as asked:
            assert moe.process(experts.method, experts.layer, source) is None
        made = experts.method.moe_kernel
        asked.assert_called_once_with(experts.method, made.gate_up.form, made.down.form, Swiglu())
        assert (made.gate_up.zeros is None) is symmetric


@check
def experts_whose_kernels_are_in_no_bundle_keep_their_parameters() -> None:
    from cute_kernels.integrations.vllm import moe
    from tests.integrations.vllm import layers

    moe.current_platform = hopper()
    experts = layers.make_experts(layers.Checkpoint("ct", 4, 32, n=96, k=128), "cpu")
    before = dict(experts.layer.named_parameters())
    with mock.patch.object(moe.prepare, "make_ready", return_value="7 kernels are in no bundle"):
        found = moe.process(experts.method, experts.layer, layers.expert_source(layers.Checkpoint("ct")))
    assert found == "7 kernels are in no bundle" and not hasattr(experts.method, "moe_kernel")
    after = dict(experts.layer.named_parameters())
    assert after.keys() == before.keys() and all(after[name] is before[name] for name in before)


@check
def experts_that_are_loaded_again_lie_where_they_were_or_are_refused() -> None:
    """Captured graphs go on with the kernels and the memory that they have."""
    from cute_kernels.integrations.vllm import moe
    from tests.integrations.vllm import layers

    moe.current_platform = hopper()
    source = moe.SOURCES["AutoAWQMoEMethod"]
    form = layers.Checkpoint("awq", 4, 32, True, dtype=torch.float16, n=96, k=128)
    first, _ = layers.serve_experts(form, "cpu")
    again, symmetric = (
        layers.make_experts(form, "cpu", seed=1),
        layers.make_experts(replace(form, zero_point=False), "cpu"),
    )
    no_hand_out = mock.patch.object(all2all_utils(), "maybe_make_prepare_finalize", lambda **_: None)
    with no_hand_out, mock.patch.object(moe.modular_kernel, "FusedMoEKernel", lambda hand_out, made: made):
        before = _tensors(first.method.moe_kernel)
        moe.process(first.method, again.layer, source)
        made = first.method.moe_kernel
        assert [x.data_ptr() for x in _tensors(made)] == [x.data_ptr() for x in before]  # as graphs read them; once
        assert dict(again.layer.named_parameters())["w13_qweight"].data_ptr() == made.gate_up.codes.data_ptr()
        assert layers.error_of_experts(again, made, 7, torch.float16) < 2**-9
        try:
            moe.process(first.method, symmetric.layer, source)
        except ValueError as error:
            assert "experts: got weights loaded again in" in str(error), error
        else:
            raise AssertionError("weights of another form were taken")


def _tensors(made: Any) -> list[torch.Tensor]:
    return [x for one in (made.gate_up, made.down) for x in (one.codes, one.scales, one.zeros)]


def all2all_utils() -> Any:
    from vllm.model_executor.layers.fused_moe import all2all_utils

    return all2all_utils


@check
def experts_have_the_parameters_that_vllm_makes() -> None:
    """Those that these checks pack are of the shapes that vLLM's methods load checkpoints into."""
    import importlib

    import vllm

    from cute_kernels.integrations.vllm import versions
    from tests.integrations.vllm import layers

    interface = versions.interface_of(vllm.__version__)
    assert interface is not None
    methods: dict[str, tuple[str, str]] = dict(zip(layers.EXPERT_METHODS, interface.expert_methods[:3], strict=True))
    for checkpoint, bits, group_size, zero_point, dtype in layers.EXPERTS:
        if checkpoint == "ct" and zero_point and vllm.__version__.startswith("0.30."):
            continue  # it loads them for Marlin alone, with which it keeps them
        form = layers.Checkpoint(checkpoint, bits, group_size, zero_point, dtype=dtype, n=96, k=128)
        module, name = methods[checkpoint]
        there = importlib.import_module(module)
        method: Any = object.__new__(getattr(there, name))
        pack = 32 // bits
        fields = {"num_bits": bits, "packed_factor": pack, "symmetric": not zero_point, "group_size": group_size or -1}
        fields |= {"strategy": "group" if group_size else "channel", "actorder": None, "input_dtype": None}
        fields["is_transposed"] = False  # as 0.30 has it for Humming
        fields["wna16_backend"] = mock.MagicMock(value=layers.expert_source(form).backends[-1])
        fields["experts_cls"] = None
        fields["moe"] = mock.MagicMock(is_act_and_mul=True, w13_num_shards=2, has_bias=False)
        config = {"group_size": group_size or -1, "pack_factor": pack, "desc_act": False, "weight_bits": bits}
        fields["quant_config"] = SimpleNamespace(**config, is_sym=not zero_point, zero_point=zero_point)
        for field, value in fields.items():
            setattr(method, field, value)
        layer = torch.nn.Module()
        more = {} if checkpoint == "ct" and not layers.has_act_order() else {"intermediate_size_full": form.n}
        with mock.patch.object(there, "marlin_make_workspace_new", create=True):  # of a GPU's SMs, up to 0.26
            method.create_weights(layer, layers.NUM_EXPERTS, form.k, form.n, dtype, **more)
        made = {name: (tuple(each.shape), each.dtype) for name, each in layer.named_parameters()}
        ours = dict(layers.make_experts(form, "cpu").layer.named_parameters())
        source = layers.expert_source(form)
        wanted = (source.words, source.scales, *([source.zeros] if zero_point else []))
        for each in (text.format(part) for text in wanted for part in ("w13", "w2")):
            assert made[each] == (tuple(ours[each].shape), ours[each].dtype), (str(form), each, made[each])


@check
def experts_move_between_gpus_as_vllm_moves_them() -> None:
    """EPLB copies rows of a layer's parameters, and asks for experts by the places where they lie then."""
    from vllm.model_executor.layers.fused_moe import routed_experts

    from cute_kernels.integrations.vllm import moe
    from tests.integrations.vllm import layers

    moe.current_platform = hopper()
    order = torch.tensor([3, 0, 4, 1, 2])
    for checkpoint, biased in (("ct", False), ("gptq", True)):
        layer, made = layers.serve_experts(layers.Checkpoint(checkpoint, 4, 32, n=96, k=128), "cpu", biased)
        before = layers.error_of_experts(layer, made, 7, torch.bfloat16)
        layer.layer.local_num_experts = layers.NUM_EXPERTS  # type: ignore[assignment]
        for rows in routed_experts.RoutedExperts.get_expert_weights(layer.layer):
            rows.copy_(rows[order])
        places = order.argsort().int()  # of each expert
        assert layers.error_of_experts(layer, made, 7, torch.bfloat16) > 0.1
        x, ids = torch.randn(7, 128).bfloat16(), torch.rand(7, 5).argsort(1)[:, :2].int()
        weights, output = torch.rand(7, 2), torch.empty(7, 128, dtype=torch.bfloat16)
        rest = (None, None, torch.empty(0), torch.empty(0), None, False)
        made.apply(output, x, None, None, weights, places[ids.long()], layer.layer.activation, 5, None, *rest)
        expected = layer.expected(x, ids, weights)
        error = float((output.double() - expected).abs().max() / expected.abs().max())
        assert error < 2**-6 and before < 2**-6, (checkpoint, error)


@check
def methods_of_experts_take_part_in_eplb_where_layers_are_served() -> None:
    import importlib

    import vllm

    from cute_kernels.integrations.vllm import moe, plugin, prepare, versions
    from tests.integrations.vllm import layers

    moe.current_platform = hopper()
    interface = versions.interface_of(vllm.__version__)
    assert interface is not None
    form = layers.Checkpoint("gptq", 4, 32, n=96, k=128)
    module, name = interface.expert_methods[1]
    method: Any = object.__new__(getattr(importlib.import_module(module), name))
    assert method.supports_eplb
    with mock.patch.object(plugin, "is_replaced", lambda seam: False):
        assert not method.supports_eplb
    experts, source = layers.make_experts(form, "cpu"), layers.expert_source(form)
    experts.method.moe.moe_parallel_config.enable_eplb = True
    assert moe.reason_against(experts.method, experts.layer, source) is None
    with mock.patch.object(prepare, "engine_has", lambda part, option: option == "enable_elastic_ep"):
        assert "GPUs that come and go" in str(moe.reason_against(experts.method, experts.layer, source))
    awq = layers.Checkpoint("awq", 4, 32, True, dtype=torch.float16, n=96, k=128)
    other = layers.make_experts(awq, "cpu")
    other.method.moe.moe_parallel_config.enable_eplb = True
    found = moe.reason_against(other.method, other.layer, layers.expert_source(awq))
    assert "zero points of experts that move between GPUs" in str(found), found
    vars(method).update(vars(experts.method))
    experts.layer.activation = SimpleNamespace(value="gelu")  # type: ignore[assignment]
    try:
        method.process_weights_after_loading(experts.layer)
    except NotImplementedError as error:
        assert f"--enable-eplb: {name}: want another method" in str(error), error
    else:
        raise AssertionError("experts would be moved that vLLM's own method does not move")


def gpt_oss_layer(most: int = 124) -> tuple[Any, Any, dict[str, torch.Tensor]]:
    """(method, layer, weights in fp64 and biases) of a random checkpoint in the parameters that vLLM makes."""
    from vllm.model_executor.layers.quantization import mxfp4

    from cute_kernels.formats.weights import MXFP4
    from cute_kernels.gemm import pack_experts

    method: Any = object.__new__(mxfp4.GptOssMxfp4MoEMethod)
    layer: Any = torch.nn.Module()
    parallel = SimpleNamespace(use_all2all_kernels=False, enable_eplb=False)
    method.moe = mock.MagicMock(
        moe_parallel_config=parallel,
        moe_backend="auto",
        is_lora_enabled=False,
        experts_per_token=2,
        has_bias=True,
        w13_num_shards=2,
    )
    method.mxfp4_backend = SimpleNamespace(value="TRITON")  # vLLM's choice on Hopper
    method.create_weights(layer, 5, 128, 96, torch.bfloat16, weight_loader=lambda *_, **__: None)
    layer.activation, layer.apply_router_weight_on_input = SimpleNamespace(value="swigluoai"), False
    layer._expert_routing_tables = lambda: None
    generator, exact = torch.Generator().manual_seed(0), {}
    for name in ("w13", "w2"):
        codes, scales = getattr(layer, f"{name}_weight"), getattr(layer, f"{name}_weight_scale")
        codes.data.random_(0, 256, generator=generator)
        scales.data.random_(118, most, generator=generator)
        getattr(layer, f"{name}_bias").data.normal_(generator=generator)
        given = codes.data, scales.data.view(torch.float8_e8m0fnu)
        exact[name] = pack_experts(MXFP4, *given, dtype=torch.bfloat16).dequantize(torch.float64)
        exact[f"{name}_bias"] = getattr(layer, f"{name}_bias").data.double()
    return method, layer, exact


@check
def experts_of_gpt_oss_are_served() -> None:
    import vllm

    from cute_kernels.gemm.activations import ClampedSwiglu
    from cute_kernels.integrations.vllm import moe

    moe.current_platform = hopper()
    if vllm.__version__.startswith("0.26"):
        return  # which loads them otherwise
    method, layer, exact = gpt_oss_layer()
    source = moe.SOURCES[type(method).__name__]
    no_hand_out = mock.patch.object(all2all_utils(), "maybe_make_prepare_finalize", lambda **_: None)
    with no_hand_out, mock.patch.object(moe.modular_kernel, "FusedMoEKernel", lambda hand_out, made: made):
        method.process_weights_after_loading(layer)
    made, x = method.moe_kernel, torch.randn(7, 128).bfloat16()
    ids, weights = torch.rand(7, 5).argsort(1)[:, :2].int(), torch.rand(7, 2)
    output = torch.empty_like(x)
    rest = (None, None, torch.empty(0), torch.empty(0), None, False)
    made.apply(output, x, None, None, weights, ids, layer.activation, 5, None, *rest)
    expected = torch.zeros(7, 128, dtype=torch.float64)
    for token in range(7):
        for expert, weight in zip(ids[token].tolist(), weights[token].double(), strict=True):
            both = exact["w13"][expert] @ x[token].double() + exact["w13_bias"][expert]
            middle = ClampedSwiglu().reference(both[::2], both[1::2])
            expected[token] += weight * (exact["w2"][expert] @ middle + exact["w2_bias"][expert])
    assert (output.double() - expected).abs().max() / expected.abs().max() < 2**-6
    assert layer.w13_weight.dtype == torch.uint8 and len(made.gate_up) == 5
    fresh, other, _ = gpt_oss_layer()
    fresh.mxfp4_backend = SimpleNamespace(value="FLASHINFER_CUTLASS_MXFP4_BF16")
    assert "weights laid out for FLASHINFER" in str(moe.reason_against(fresh, other, source))


@check
def scales_of_gpt_oss_beyond_2_are_loaded_again_with_others_and_move_nowhere() -> None:
    """Graphs captured with kernels of small scales cannot go on with large ones, nor can a GPU that gets an expert."""
    import vllm

    from cute_kernels.integrations.vllm import moe

    moe.current_platform = hopper()
    if vllm.__version__.startswith("0.26"):
        return
    no_hand_out = mock.patch.object(all2all_utils(), "maybe_make_prepare_finalize", lambda **_: None)
    with no_hand_out, mock.patch.object(moe.modular_kernel, "FusedMoEKernel", lambda hand_out, made: made):
        for first, again, moves, wanted in (
            (140, 124, False, ""),
            (
                124,
                140,
                False,
                "experts: got weights loaded again in e2m1_g32e8m0any and e2m1_g32e8m0any, want e2m1_g32e8m0 ",
            ),
            (140, 140, True, "--enable-eplb: got MXFP4 scales beyond 2"),
        ):
            (method, layer, _), (_, other, exact) = gpt_oss_layer(first), gpt_oss_layer(again)
            method.moe.moe_parallel_config.enable_eplb = moves
            source, found = moe.SOURCES[type(method).__name__], ""
            try:
                moe.process(method, layer, source)
                moe.process(method, other, source)
            except (NotImplementedError, ValueError) as error:
                found = str(error)
            assert found.startswith(wanted) and bool(found) == bool(wanted), found
            made = None if found else method.moe_kernel.gate_up
            assert made is None or torch.equal(made.dequantize(torch.float64), exact["w13"])
