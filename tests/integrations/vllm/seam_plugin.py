"""Checks of what the plugin registers."""

# vLLM is not installed where types are checked.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import logging
import os
from types import SimpleNamespace
from typing import Any
from unittest import mock

from tests.integrations.vllm.checks import check, hopper


@check
def every_seam_is_replaced() -> None:
    import vllm

    from cute_kernels.integrations.vllm import plugin

    outcomes = {outcome.seam: outcome.reason for outcome in plugin.outcomes()}
    of_floats = outcomes.pop("float_linear")
    assert outcomes == {"linear": None, "attention": None, "moe": None, "mla": None, "fusion": None}, outcomes
    if vllm.__version__.startswith("0.26"):
        assert "has nothing that could be replaced there" in str(of_floats)
    else:
        assert of_floats is None, of_floats


@check
def registering_again_changes_nothing() -> None:
    import vllm.model_executor.kernels.linear as kernels
    from vllm.platforms import PlatformEnum

    from cute_kernels.integrations.vllm import register

    before = list(kernels._POSSIBLE_KERNELS[PlatformEnum.CUDA])
    register()
    assert kernels._POSSIBLE_KERNELS[PlatformEnum.CUDA] == before
    assert [kernel.__name__ for kernel in before].count("CuteKernelsLinearKernel") == 1
    assert before[0].__name__ == "CuteKernelsLinearKernel"


@check
def the_compile_cache_tells_plugins_apart() -> None:
    from vllm import envs

    from cute_kernels.integrations.vllm import environment, plugin
    from tests.integrations.vllm import layers

    def factor() -> str:
        return str(envs.compile_factors()["CUTE_KERNELS_VLLM_PLUGIN"])

    plugin._served.clear()
    before = factor()
    assert ",".join(sorted(filter(plugin.is_replaced, environment.SEAMS))) in before, before
    # Whether a layer is served may change from one start to the next, with the bundles that are there.
    layers.make(layers.Checkpoint("ct", 4, 128), "cpu")
    one = factor()
    layers.make(layers.Checkpoint("ct", 4, 128), "cpu")
    assert factor() == one != before
    layers.make(layers.Checkpoint("gptq", 4, 128, n=64), "cpu")
    assert factor() not in (one, before)


@check
def doctor_says_what_would_keep_vllm_from_starting() -> None:
    from cute_kernels.integrations.vllm import doctor, environment, versions

    def said(**given: str) -> str:
        usual = {environment.SWITCH: "1", environment.KV_FORMAT: "", environment.CONSTANTS: ""}
        given = {f"{environment.SWITCH}{name}": value for name, value in given.items()}
        with (
            mock.patch.dict(os.environ, {**usual, **given}),
            mock.patch.object(versions, "installed", lambda: "0.26.0"),
        ):
            finding = doctor.examine()
        return f"{finding.status}: {finding.detail}"

    assert "ok: 0.26.0, replaced" in said() and "KV caches in int4_g4 with" in said(_KV_FORMAT="int4_g4")
    assert "limited: CUTE_KERNELS_VLLM_KV_FORMAT: got 'int5'" in said(_KV_FORMAT="int5")
    assert "got 'int8_channel'" in said(_KV_FORMAT="int8_channel")
    assert "int4_channel32 wait beside the pages" in said(_KV_FORMAT="int4_channel32,int4_g4")
    assert "want the seam attention" in said(_KV_FORMAT="int4_g4", **{"": "linear"})
    assert "limited: CUTE_KERNELS_VLLM_CONSTANTS: got" in said(_CONSTANTS="/there")
    assert "/there is no file" in said(_KV_FORMAT="int4_g4", _CONSTANTS="/there")
    # vLLM's own switch may leave the plug-in out, whatever the others say.
    with mock.patch.dict(os.environ, {environment.VLLMS_PLUGINS: "another,cute_kernels"}):
        assert "ok: 0.26.0, replaced" in said()
    with mock.patch.dict(os.environ, {environment.VLLMS_PLUGINS: "another"}):
        assert "limited: VLLM_PLUGINS does not name cute_kernels" in said(_KV_FORMAT="int4_g4")


@check
def what_lasts_while_an_engine_sleeps_is_allocated_by_another_thread() -> None:
    """vLLM's pools, which sleep throws away, are those of the thread that makes weights and caches."""
    import threading

    import torch

    from cute_kernels.integrations import ready
    from cute_kernels.integrations.vllm import kv_constants, prepare

    threads: list[threading.Thread] = []

    def note(what: object) -> Any:
        threads.append(threading.current_thread())
        return what

    with (
        mock.patch.multiple(ready, POOL=mock.Mock(prepare=note), COUNTERS=mock.Mock(prepare=note)),
        mock.patch.multiple(ready, default_cache=mock.DEFAULT, arch_of=mock.DEFAULT),
        mock.patch.object(torch.cuda, "synchronize") as synchronize,
    ):
        prepare.load(torch.device("cuda", 0), [])
        assert kv_constants.kept(mock.Mock(to=note), torch.device("cuda", 0)) == torch.device("cuda", 0)
        assert synchronize.call_count == 2
    assert len(threads) == 3 and threading.current_thread() not in threads


@check
def engines_that_may_sleep_are_served() -> None:
    import vllm.config

    from cute_kernels.integrations.vllm import attention, prepare
    from tests.integrations.vllm.seam_attention import reasons_against

    config = SimpleNamespace(
        model_config=SimpleNamespace(enable_sleep_mode=True, rswa_window=None, is_hybrid=False),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        cache_config=SimpleNamespace(kv_cache_dtype_skip_layers=[], kv_sharing_fast_prefill=False),
        speculative_config=None,
        compilation_config=SimpleNamespace(cudagraph_capture_sizes=[1, 2]),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=512),
    )
    with (
        mock.patch.object(vllm.config, "get_current_vllm_config_or_none", lambda: config),
        mock.patch.object(attention, "get_current_vllm_config_or_none", lambda: config),
    ):
        assert prepare.why_left("linear") is None and not reasons_against()


@check
def beside_other_versions_and_gpus_nothing_is_touched_and_one_line_says_so() -> None:
    from cute_kernels.integrations.vllm import environment, plugin, register, seams, versions

    def other(*capability: int) -> Any:
        return SimpleNamespace(
            is_device_capability=lambda asked: asked == 10 * capability[0] + capability[1],
            get_device_capability=lambda: ".".join(map(str, capability)),
        )

    def line(platform: Any = None, **more: Any) -> str:
        seams.said.clear()
        touched = mock.Mock()
        with (
            mock.patch.object(plugin, "_platform", lambda: platform),
            mock.patch.multiple(plugin, _outcomes={}, _replace=touched, _mark_compile_cache=touched),
            mock.patch.multiple(plugin, POOL=touched, COUNTERS=touched),
            mock.patch.object(versions, "interface_of", lambda version: more.get("interface", versions.Interface(""))),
            mock.patch.dict(os.environ, more.get("environment", {})),
            mock.patch.object(seams, "logger") as logger,
        ):
            register()
            register()  # by a program, and by vLLM
            assert plugin.outcomes() == [] and not touched.mock_calls
        ((call, *others),) = (logger.method_calls,)
        level, text, *values = call.args
        assert level == logging.WARNING and not others
        return text % tuple(values)

    for capability in ((8, 0), (8, 9), (10, 0), (12, 0)):
        said = line(other(*capability))
        assert "nothing is replaced: compute capability " + ".".join(map(str, capability)) in said, said
    silent = SimpleNamespace(is_device_capability=mock.Mock(side_effect=OSError("no driver")))
    assert "the GPU is not known (OSError: no driver)" in line(silent)
    assert "another device than a CUDA GPU; CUTE_KERNELS_VLLM_KV_FORMAT is not looked at" in line()
    assert "is not supported; supported: 0.26" in line(other(9, 0), interface=None)
    assert "nothing is replaced: CUTE_KERNELS_VLLM=0" in line(other(9, 0), environment={environment.SWITCH: "0"})
    # Asking for what means nothing is no reason to fail where nothing is served.
    assert "compute capability 8.0" in line(other(8, 0), environment={environment.SWITCH: "everything"})


@check
def another_engine_of_a_process_may_ask_for_less() -> None:
    from cute_kernels.integrations.vllm import environment, fused_layers, linear, mla, moe, plugin
    from tests.integrations.vllm import layers
    from tests.integrations.vllm.seam_attention import reasons_against

    moe.current_platform = hopper()
    experts = layers.make_experts(layers.Checkpoint("ct", group_size=32, n=96, k=128), "cpu")
    layer = layers.make(layers.Checkpoint("ct", 4, 128), "cpu")
    impl = SimpleNamespace(kv_cache_dtype="auto", head_size=576, kv_lora_rank=512, num_heads=16, dcp_world_size=1)
    before = plugin.fingerprint()
    with mock.patch.dict(os.environ, {environment.SWITCH: "0", environment.KV_FORMAT: ""}):
        reasons = (
            linear.CuteKernelsLinearKernel.can_implement(layer.kernel.config)[1],
            "; ".join(reasons_against()),
            moe.reason_against(experts.method, experts.layer, layers.expert_source(layers.Checkpoint("ct"))),
            mla.reason_against(impl, "mla_bf16"),
        )
        assert all("CUTE_KERNELS_VLLM=0" in str(reason) for reason in reasons), reasons
        assert fused_layers.wanted() == fused_layers.Fused() and plugin.fingerprint() != before
    assert plugin.fingerprint() == before


@check
def seams_that_do_not_fit_are_left_to_vllm_with_a_line() -> None:
    from cute_kernels.integrations.vllm import plugin, versions

    moved = versions.Interface("moved", linear_kernels=("vllm.model_executor.kernels.moved", "_POSSIBLE_KERNELS"))
    with mock.patch.object(versions, "interface_of", lambda version: moved):
        left = plugin._replace("linear")
    assert left.what == "" and "it does not fit vLLM" in str(left.reason), left
    with mock.patch.dict(plugin._outcomes, {"linear": left}), mock.patch.object(plugin, "logger") as logger:
        plugin._log(["linear"])
    assert logger.warning.call_count == 1 and not logger.info.called


@check
def seams_are_replaced_unless_the_switch_leaves_them_out() -> None:
    from cute_kernels.integrations.vllm import doctor, environment, versions

    def seams(text: str | None) -> tuple[str, ...]:
        switch = {} if text is None else {environment.SWITCH: text}
        with mock.patch.dict("os.environ", {environment.KV_FORMAT: "", **switch}):
            if text is None:
                os.environ.pop(environment.SWITCH, None)
            found = environment.wanted_seams()
            for version, lacks in (("0.33.0", ""), ("0.26.0", "float_linear")):
                with mock.patch.object(versions, "installed", lambda number=version: number):
                    said = doctor.examine().detail
                for seam, what in doctor.REPLACED.items():
                    assert (what in said) == (seam in found and seam != lacks), said
            return found

    assert seams(None) == seams("1") == (
        "linear", "attention", "moe", "mla", "fusion", "float_linear",
    )  # fmt: skip
    assert seams("0") == ()
    assert seams("fusion,linear") == ("linear", "fusion")
    try:
        seams("everything")
    except ValueError as error:
        assert "got 'everything', want 0, 1 or a list of linear" in str(error)
    else:
        raise AssertionError("a seam that there is not was taken")
