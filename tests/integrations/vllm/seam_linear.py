"""Checks of linear layers."""

# vLLM is not installed where types are checked.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import torch

from tests.integrations.vllm.checks import check


@check
def layers_of_every_checkpoint_give_what_it_says() -> None:
    from tests.integrations.vllm import layers

    for form in layers.checkpoints():
        layer = layers.make(form, "cpu")
        assert type(layer.kernel).__name__ == "CuteKernelsLinearKernel", form
        x = torch.randn(5, form.k, dtype=form.dtype)
        expected = x.double() @ layer.weight.T
        error = (layer.apply(x).double() - expected).abs().max() / expected.abs().max()
        assert error < (2**-7 if form.dtype == torch.bfloat16 else 2**-9), (str(form), float(error))


@check
def what_is_traced_does_not_depend_on_the_values_of_weights() -> None:
    """Zero points that are all symmetric, and an act-order that moves nothing, keep their tensors."""
    from tests.integrations.vllm import layers

    plain = layers.Checkpoint("ct", zero_point=True, act_order=layers.has_act_order())
    symmetric = mock.patch.object(torch, "randperm", lambda n, generator: torch.arange(n))
    with symmetric:
        layer = layers.make(plain, "cpu")
    assert layer.kernel.w_zp_name in dict(layer.layer.named_parameters())
    x = torch.randn(3, plain.k, dtype=plain.dtype)
    expected = x.double() @ layer.weight.T
    assert (layer.apply(x).double() - expected).abs().max() < expected.abs().max() * 2**-7


@check
def layers_that_are_loaded_again_lie_where_they_were() -> None:
    """By vLLM's own code for weights that are updated, or thrown away by a sleeping engine: graphs read them there."""
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
    from vllm.model_executor.model_loader import reload

    from tests.integrations.vllm import layers

    def load(param: torch.nn.Parameter, loaded_weight: torch.Tensor) -> None:
        param.data.copy_(loaded_weight)

    rank = "vllm.model_executor.parameter.get_tensor_model_parallel"
    one_gpu = mock.patch(f"{rank}_rank", lambda: 0), mock.patch(f"{rank}_world_size", lambda: 1)
    for form in (layers.Checkpoint(name, zero_point=name == "awq") for name in ("ct", "gptq", "awq")):
        layer = torch.nn.Module()
        with one_gpu[0], one_gpu[1], mock.patch.object(layers, "_no_loader", load):
            method = layers._METHODS[form.checkpoint](form, layer, "cpu")
            layer.quant_method = mock.Mock(spec=QuantizeMethodBase)
            layer.quant_method.process_weights_after_loading = method.process_weights_after_loading
            reload.record_metadata_for_reloading(layer)
            places = []
            for seed in range(2):
                drawn = layers.draw(form, seed)
                for name, tensor in layers.tensors_of(form, drawn, layers.has_act_order()).items():
                    parameter = getattr(layer, name)
                    parameter.weight_loader(parameter, tensor)
                if not seed:
                    method.process_weights_after_loading(layer)
                    places = [x.data_ptr() for x in layer.parameters()]
                    reload.initialize_layerwise_reload(layer)
            reload.finalize_layerwise_reload(layer, mock.Mock(dtype=form.dtype))
        assert [x.data_ptr() for x in layer.parameters()] == places != []
        x = torch.randn(5, form.k, dtype=form.dtype)
        expected = x.double() @ drawn.weight.T
        apply = getattr(method, "apply_weights", None) or method.apply
        assert (apply(layer, x, None).double() - expected).abs().max() < expected.abs().max() * 2**-7, str(form)


@check
def layers_are_served_under_batch_invariance() -> None:
    """vLLM 0.33 asks no kernel then; what is not served here is dequantised by it, as ever."""
    from vllm.model_executor.layers.quantization.compressed_tensors.schemes import compressed_tensors_wNa16 as scheme

    from tests.integrations.vllm import layers

    asked = hasattr(scheme, "matmul_batch_invariant")
    with mock.patch.dict(os.environ, {"VLLM_BATCH_INVARIANT": "1"}):
        form = layers.Checkpoint("ct", 4, 128)
        layer = layers.make(form, "cpu")
        assert type(layer.kernel).__name__ == "CuteKernelsLinearKernel" and layer.kernel.batch_invariant
        x = torch.randn(3, form.k, dtype=form.dtype)
        expected = x.double() @ layer.weight.T
        assert (layer.apply(x).double() - expected).abs().max() < expected.abs().max() * 2**-7
        if not asked:
            return
        with mock.patch.object(scheme, "choose_mp_linear_kernel", side_effect=ValueError("no kernel")):
            left = layers.make(form, "cpu")
        assert left.kernel is None


@check
def other_layers_are_left_to_vllm_with_a_reason() -> None:
    from vllm.scalar_type import scalar_types

    from cute_kernels.integrations.vllm.linear import CuteKernelsLinearKernel
    from tests.integrations.vllm.layers import has_act_order
    from tests.integrations.vllm.layers import linear_config as config

    assert CuteKernelsLinearKernel.can_implement(config()) == (True, None)
    assert CuteKernelsLinearKernel.can_implement(config(group_size=-1)) == (True, None)
    assert CuteKernelsLinearKernel.can_implement(config(group_size=512)) == (True, None)
    unlike: tuple[tuple[dict[str, Any], str], ...] = (
        ({"weight_type": scalar_types.int4}, "weights of type"),
        ({"weight_type": scalar_types.uint4}, "weights of type"),
        ({"zero_points": True}, "zero points True"),
        ({"act_type": torch.float8_e4m3fn}, "activations in torch.float8_e4m3fn"),
        ({"out_type": torch.float32}, "results in torch.float32"),
        ({"group_size": 96}, "groups of 96"),
        ({"group_size": 512, "partition_weight_shape": (256, 256)}, "groups of 512"),
        ({"full_weight_shape": (1152, 256), "partition_weight_shape": (576, 256)}, "groups of 128 of 576 inputs"),
        *([({"has_g_idx": True, "partition_weight_shape": (256, 256)}, "act-order")] if has_act_order() else []),
    )
    for changes, words in unlike:
        able, reason = CuteKernelsLinearKernel.can_implement(config(**changes))
        assert not able and words in str(reason), (changes, reason)


@check
def two_gpus_have_what_one_has() -> None:
    """A block's layers, loaded by vLLM as each of two GPUs loads them: outputs side by side, or sums, are one GPU's.

    What a layer of one GPU gives is compared with its checkpoint elsewhere. Keys and values of the one KV head are on
    both GPUs.
    """
    from tests.integrations.vllm import layers

    one, ranks = layers.block_of(0, 1), [layers.block_of(rank, 2) for rank in range(2)]
    for block in (one, *ranks):
        assert {type(kernel).__name__ for kernel in block.kernels} == {"CuteKernelsLinearKernel"}
    x = torch.randn(7, layers.HIDDEN, generator=torch.Generator().manual_seed(1)).bfloat16()

    def parts(block: Any, heads: int) -> list[torch.Tensor]:
        own = layers.KV_HEADS * layers.HEAD_SIZE
        return list(block.qkv(x).split([heads * layers.HEAD_SIZE, own, own], dim=-1))

    q, k, v = parts(one, layers.HEADS)
    halves = [parts(block, layers.HEADS // 2) for block in ranks]
    assert torch.equal(torch.cat([half[0] for half in halves], dim=-1), q)
    assert all(torch.equal(half[1], k) and torch.equal(half[2], v) for half in halves)
    gates = [block.gate_up(x).chunk(2, dim=-1) for block in ranks]
    gate, up = one.gate_up(x).chunk(2, dim=-1)
    assert torch.equal(torch.cat([part for part, _ in gates], dim=-1), gate)
    assert torch.equal(torch.cat([part for _, part in gates], dim=-1), up)
    for whole, shares, rows in (
        (one.o, [block.o for block in ranks], q),
        (one.down, [block.down for block in ranks], gate),
    ):
        expected = whole(rows).double()
        total = sum(share(part).double() for share, part in zip(shares, rows.chunk(2, dim=-1), strict=True))
        error = (total - expected).abs().max() / expected.abs().max()
        assert error < 2**-7, float(error)
