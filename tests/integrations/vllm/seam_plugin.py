"""Checks of what the plugin registers."""

# vLLM is not installed where types are checked.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import os
from unittest import mock

from tests.integrations.vllm.checks import check


@check
def every_seam_is_replaced() -> None:
    from cute_kernels.integrations.vllm import plugin

    outcomes = {outcome.seam: outcome.reason for outcome in plugin.outcomes()}
    assert outcomes == {"linear": None, "attention": None, "moe": None, "mla": None, "fusion": None}, outcomes


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

    from cute_kernels.integrations.vllm import plugin
    from tests.integrations.vllm import layers

    def factor() -> str:
        return str(envs.compile_factors()["CUTE_KERNELS_VLLM_PLUGIN"])

    plugin._served.clear()
    before = factor()
    assert "attention,fusion,linear,mla,moe" in before, before
    # Whether a layer is served may change from one start to the next, with the bundles that are there.
    layers.make(layers.Checkpoint("ct", 4, 128), "cpu")
    one = factor()
    layers.make(layers.Checkpoint("ct", 4, 128), "cpu")
    assert factor() == one != before
    layers.make(layers.Checkpoint("gptq", 4, 128, n=64), "cpu")
    assert factor() not in (one, before)


@check
def other_versions_and_seams_that_do_not_fit_are_left_to_vllm_with_a_line() -> None:
    from cute_kernels.integrations.vllm import plugin, versions

    with mock.patch.object(versions, "interface_of", lambda version: None):
        left = plugin._replace("linear")
    assert left.what == "" and "is not supported; supported: 0.26" in str(left.reason), left
    moved = versions.Interface("moved", linear_kernels=("vllm.model_executor.kernels.moved", "_POSSIBLE_KERNELS"))
    with mock.patch.object(versions, "interface_of", lambda version: moved):
        left = plugin._replace("linear")
    assert left.what == "" and "it does not fit vLLM" in str(left.reason), left
    with mock.patch.dict(plugin._outcomes, {"linear": left}), mock.patch.object(plugin, "_logger") as logger:
        plugin._log(["linear"])
    assert logger().warning.call_count == 1 and not logger().info.called


@check
def fusion_is_replaced_only_where_it_is_asked_for() -> None:
    from cute_kernels.integrations.vllm import doctor, environment, versions

    def seams(text: str | None) -> tuple[str, ...]:
        with mock.patch.dict("os.environ", {} if text is None else {environment.SWITCH: text}):
            if text is None:
                os.environ.pop(environment.SWITCH, None)
            found = environment.wanted_seams()
            with mock.patch.object(versions, "installed", lambda: "0.26.0"):
                said = doctor.examine().detail
            for seam, what in doctor.REPLACED.items():
                assert (what in said) == (seam in found), said
            return found

    assert seams(None) == seams("1") == ("linear", "attention", "moe", "mla")
    assert seams("0") == ()
    assert seams("fusion,linear") == ("linear", "fusion")
    try:
        seams("everything")
    except ValueError as error:
        assert "got 'everything', want 0, 1 or a list of linear" in str(error)
    else:
        raise AssertionError("a seam that there is not was taken")
