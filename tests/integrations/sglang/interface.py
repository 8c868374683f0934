"""Checks the plug-in against SGLang's Python, without a GPU: `python -m tests.integrations.sglang.interface FOLDER`.

FOLDER holds the package sglang, as tools/fetch_engine.py leaves it. A process of its own, as it stands in for what
SGLang needs and is not here. Prints a JSON object: of each check "ok" or what went wrong.
"""

# SGLang is not installed where types are checked.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import argparse
import importlib
import json
import os
import pkgutil
import sys
import tempfile
import traceback
import types
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from cute_kernels.integrations.sglang import linear, plugin, register, rows, seams, versions
from tests.integrations.sglang import layers, seam_attention, seam_float_linear, seam_gpt_oss, seam_mla, seam_moe
from tests.integrations.sglang.checks import CHECKS, check, lines
from tests.integrations.sglang.layers import Checkpoint
from tests.integrations.vllm import stubs

SEAMS = (seam_attention, seam_float_linear, seam_gpt_oss, seam_mla, seam_moe)
"""Modules that put their checks on the list."""
QUANTIZATION = "sglang.srt.layers.quantization"
COMPRESSED_TENSORS = f"{QUANTIZATION}.compressed_tensors.schemes"
BARE = (
    "sglang",
    "sglang.srt",
    QUANTIZATION,
    *(f"{QUANTIZATION}.{name}" for name in ("awq", "awq.schemes", "gptq", "gptq.schemes", "compressed_tensors")),
    COMPRESSED_TENSORS,
)
"""Packages whose own imports are the whole of SGLang: their modules are found, and nothing is run."""
PARTS = (
    "sglang.kernels",
    "sglang.srt.batch_invariant_ops",
    "sglang.srt.distributed",
    "sglang.srt.mem_cache.layout",
    "sglang.srt.server_args",
    "sglang.srt.layers.moe.fused_moe_triton",
    "sglang.srt.layers.moe.token_dispatcher",
    "sglang.srt.configs",
    *(f"sglang.srt.layers.{name}" for name in ("linear", "logits_processor", "vocab_parallel_embedding")),
    *(f"sglang.srt.{name}" for name in ("layers.layer_boundary", "lora.layers", "model_loader", "models.utils")),
    f"{QUANTIZATION}.unquant",
    "sglang.srt.speculative.spec_utils",
)
"""What is stood in for."""
WANTED = (*stubs.WANTED, "orjson", "psutil", "setproctitle", "torchao", "triton")
VERSION = "0.5.23"


def as_it_is(function: Any = None, **_: object) -> Any:
    """A decorator that changes nothing, given options or not."""
    return function or (lambda decorated: decorated)


def set_up(folder: Path) -> None:
    """The plug-in, loaded by SGLang's own loader, on what passes for a Hopper."""
    stubs.install(WANTED, PARTS)
    torch.compile = as_it_is  # type: ignore[assignment]
    triton = importlib.import_module("triton")
    triton.jit, triton.autotune, triton.heuristics = as_it_is, lambda *_, **__: as_it_is, lambda *_, **__: as_it_is
    sys.path.insert(0, str(folder))
    importlib.import_module("sglang.kernels.kernel_api_logging").debug_kernel_api = as_it_is
    for name in BARE:
        module = sys.modules[name] = types.ModuleType(name)
        module.__path__ = [str(folder.joinpath(*name.split(".")))]
    sys.modules["sglang"].__version__ = VERSION
    operators = types.ModuleType("sglang.srt.utils.custom_op")  # operators of kernels that are not here
    operators.register_custom_op = operators.register_custom_op_from_extern = as_it_is
    sys.modules[operators.__name__] = operators
    scheme = importlib.import_module(f"{COMPRESSED_TENSORS}.compressed_tensors_scheme")
    schemes = sys.modules[COMPRESSED_TENSORS]
    schemes.CompressedTensorsLinearScheme = scheme.CompressedTensorsLinearScheme
    schemes.CompressedTensorsMoEScheme = scheme.CompressedTensorsMoEScheme
    schemes.WNA16_SUPPORTED_BITS = [4, 8]
    seams.capability_of = lambda device: (9, 0)
    from sglang.srt import plugins

    entry = SimpleNamespace(name="cute_kernels", value="", load=lambda: register, dist=None)
    with mock.patch.object(plugins, "entry_points", lambda group: [entry] if group == "sglang.srt.plugins" else []):
        plugins.load_plugins()


INTERFACE = versions.INTERFACES[VERSION]


def targets() -> list[str]:
    return list(linear.SEAM.hooks(INTERFACE))


def left(form: Checkpoint, full_k: int | None = None) -> str:
    """The one line that says why a layer is left to SGLang, whose own method has it then."""
    seams.say_once.cache_clear()
    made = layers.make(form, full_k)
    kind = next(kind for kind in linear.KINDS if kind.owner.startswith(form.checkpoint.replace("ct", "comp")))
    before, original = dict(made.layer.named_parameters()), mock.Mock()
    with mock.patch.object(seams, "logger") as said:
        linear.LAYERS.load(kind, original, made.owner, made.layer)
        linear.LAYERS.load(kind, original, made.owner, made.layer)
    assert original.call_args_list == [mock.call(made.owner, made.layer)] * 2
    assert all(before[name] is now for name, now in made.layer.named_parameters())
    linear.LAYERS.product(original, made.owner, made.layer, "x", None)
    assert original.call_args == mock.call(made.owner, made.layer, "x", None)
    (line,) = lines(said)
    return line


def close(made: layers.Layer, form: Checkpoint) -> None:
    x, bias = torch.randn(2, 3, form.k, dtype=form.dtype), torch.randn(form.n, dtype=form.dtype)
    expected = x.double() @ made.drawn.weight.T
    bound = expected.abs().max() * (2**-7 if form.dtype == torch.bfloat16 else 2**-9)
    assert (made.apply(x).double() - expected).abs().max() < bound, form
    assert (made.apply(x, bias).double() - expected - bias.double()).abs().max() < 2 * bound, form
    assert made.apply(x[:, :0]).shape == (2, 0, form.n)


@check
def every_hook_took_effect_and_stands_around_sglangs_own_method() -> None:
    assert {seam.what for seam in plugin.SEAMS} == seams.IN_PLACE and len(targets()) == 6
    for target in (target for seam in plugin.SEAMS for target in seam.hooks(INTERFACE)):
        assert target.endswith(f".{pkgutil.resolve_name(target).__wrapped__.__qualname__}")


@check
def registering_again_hooks_nothing_again() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry

    def hooked() -> tuple[dict[str, int], object]:
        return {target: len(hooks) for target, hooks in HookRegistry._hooks.items()}, HookRegistry.apply_hooks

    before = hooked()
    register()
    assert hooked() == before
    HookRegistry.apply_hooks()
    assert {seam.what for seam in plugin.SEAMS} == seams.IN_PLACE


@check
def layers_of_every_checkpoint_give_what_it_says() -> None:
    for form in layers.CHECKPOINTS:
        made = layers.make(form)
        made.process()
        assert getattr(made.layer, seams.SERVED).form.act_order == form.act_order, form
        close(made, form)
        made.process()  # nothing was loaded since
        close(made, form)


@check
def parameters_are_replaced_and_what_has_no_meaning_is_emptied() -> None:
    made = layers.make(Checkpoint("gptq"))
    made.process()
    sizes = {name: tensor.numel() for name, tensor in made.layer.named_parameters()}
    assert sizes == {"qweight": 192 * 512 // 2, "scales": 192 * 4, "qzeros": 0, "g_idx": 0}, sizes


@check
def a_gpus_part_of_the_inputs_is_served_but_in_act_order() -> None:
    for form in (
        Checkpoint("ct"),
        Checkpoint("ct", zero_point=True),
        Checkpoint("ct", 4, 0),
        Checkpoint("gptq"),
        Checkpoint("gptq", 4, 0),
        Checkpoint("awq", zero_point=True),
    ):
        made = layers.make(form, full_k=1024)
        made.process()
        assert getattr(made.layer, seams.SERVED, None) is not None, form
        close(made, form)
    for checkpoint in ("ct", "gptq"):
        line = left(Checkpoint(checkpoint, act_order=True), full_k=1024)
        assert "act-order with the inputs shared out among GPUs" in line, line


@check
def what_is_not_served_is_left_by_name() -> None:
    assert "groups of 8 of 512 inputs" in left(Checkpoint("ct", 4, 8))
    assert "awq: codes of 8 bits; supported: 4" in left(Checkpoint("awq", 8, 128, zero_point=True))
    with mock.patch.object(seams, "capability_of", lambda device: (8, 0)):
        assert "compute capability (8, 0); supported: (9, 0)" in left(Checkpoint("ct"))
    with mock.patch.object(rows, "saves_memory", lambda: True):
        assert "--enable-memory-saver is not supported" in left(Checkpoint("gptq"))
    owner = layers.make(Checkpoint("ct"))
    owner.layer.weight_scale.data[0] = float("nan")
    with mock.patch.object(layers, "make", lambda *_: owner):
        assert "scale" in left(Checkpoint("ct"))


@check
def activations_of_another_dtype_are_refused() -> None:
    made = layers.make(Checkpoint("awq", zero_point=True))
    made.process()
    try:
        made.apply(torch.zeros(1, 512, dtype=torch.float16))
    except TypeError as error:
        assert "got torch.float16, None, want torch.bfloat16" in str(error)
    else:
        raise AssertionError("fp16 was taken by a bf16 layer")


@check
def a_hook_that_did_not_take_effect_is_said_and_nothing_is_served() -> None:
    original = pkgutil.resolve_name(targets()[0])
    with mock.patch.object(plugin, "logger") as said:
        plugin._then_look(lambda: None, linear.SEAM, INTERFACE, {targets()[0]: original})()
        assert linear.SEAM.what not in seams.IN_PLACE
        (line,) = lines(said)
        assert "not hooked" in line and targets()[0] in line and said.error.called
        assert "hooks were not seen to take effect" in left(Checkpoint("ct"))
    seams.IN_PLACE.add(linear.SEAM.what)


@check
def nothing_is_hooked_where_it_is_not_wanted_or_nothing_is_known() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry

    def line(switch: str | None = None, version: str = VERSION, **environment: str) -> str:
        seams.say_once.cache_clear()
        environment |= {} if switch is None else {plugin.SWITCH: switch}
        with (
            mock.patch.dict(os.environ, environment),
            mock.patch.object(sys.modules["sglang"], "__version__", version),
            mock.patch.object(HookRegistry, "register") as hooked,
            mock.patch.object(HookRegistry, "apply_hooks", lambda: None),
            mock.patch.object(seams, "logger") as said,
        ):
            register()
            register()
        assert not {call.args[0] for call in hooked.call_args_list} & set(targets())
        (only,) = lines(said)
        return only

    assert "SGLang 0.5.24 is not supported; supported: 0.5.23" in line(version="0.5.24")
    assert "nothing is replaced: CUTE_KERNELS_SGLANG=0" in line("0")
    assert "got 'linear', want 0 or 1" in line("linear")
    assert "CUTE_KERNELS_SGLANG_KV_FORMAT is not looked at" in line("0", CUTE_KERNELS_SGLANG_KV_FORMAT="int4_g4")
    known = versions.INTERFACES[VERSION]
    with mock.patch.dict(versions.INTERFACES, {VERSION: replace(known, awq="sglang.srt.plugins.AWQ")}):
        assert f"linear layers left to SGLang {VERSION}" in line()
    other = "sglang.srt.layers.quantization.marlin_utils.MarlinLinearLayerConfig"
    with mock.patch.dict(versions.INTERFACES, {VERSION: replace(known, awq=other)}):
        assert f"linear layers left to SGLang {VERSION}" in line()


@check
def a_module_that_cannot_be_imported_is_named_with_what_it_lacks_and_keeps_no_other_seam() -> None:
    known = versions.INTERFACES[VERSION]
    others = {target for each in plugin.SEAMS if each is not linear.SEAM for target in each.hooks(INTERFACE)}
    for name, text, wanted in (
        ("awq_that_lacks", "import a_package_that_nobody_has", "No module named 'a_package_that_nobody_has'"),
        ("awq_that_fails", "raise RuntimeError('no driver')", "RuntimeError: no driver"),
    ):
        away = replace(known, awq=f"{QUANTIZATION}.{name}.Kernel")
        package = sys.modules[QUANTIZATION]
        with (
            tempfile.TemporaryDirectory() as folder,
            mock.patch.object(seams, "logger") as said,
            mock.patch.dict(versions.INTERFACES, {VERSION: away}),
            mock.patch.object(package, "__path__", [*package.__path__, folder]),
            mock.patch("sglang.srt.plugins.hook_registry.HookRegistry.register") as hooked,
            mock.patch("sglang.srt.plugins.hook_registry.HookRegistry.apply_hooks", lambda: None),
        ):
            Path(folder, f"{name}.py").write_text(text)
            register()
        (line,) = lines(said)
        assert wanted in line, line
        assert {call.args[0] for call in hooked.call_args_list} == others


@check
def rows_are_those_of_the_servers_graphs_drafts_and_chunks() -> None:
    from sglang.srt import runtime_context
    from sglang.srt.model_executor.cuda_graph_config import CudaGraphConfig, PhaseConfig

    from cute_kernels.integrations.ready import DEFAULT_ROWS

    assert rows.engine_rows() == DEFAULT_ROWS and not rows.is_deterministic() and not rows.saves_memory()
    graphs = CudaGraphConfig(decode=PhaseConfig(bs=[1, 8]), prefill=PhaseConfig(bs=[64]))
    switches = SimpleNamespace(enable_deterministic_inference=True, enable_memory_saver=True)
    exec_ = SimpleNamespace(graph=SimpleNamespace(cuda_graph_config=graphs), deterministic=switches, features=switches)
    schedule = SimpleNamespace(chunked_prefill_size=-1, max_prefill_tokens=4096)
    with mock.patch.multiple(
        runtime_context,
        get_exec=lambda: exec_,
        get_schedule=lambda: schedule,
        get_spec=lambda: SimpleNamespace(speculative_num_draft_tokens=4),
    ):
        assert rows.engine_rows() == rows.RowCounts((1, 4, 8, 32, 64), 4096)
        assert rows.is_deterministic() and rows.saves_memory()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="the folder that holds SGLang's Python")
    source = parser.parse_args(arguments).source
    outcomes: dict[str, str] = {}
    try:
        set_up(source)
    except Exception:
        print(json.dumps({name: f"set_up: {traceback.format_exc()}" for name in CHECKS}))
        return 0
    for name, function in CHECKS.items():
        try:
            function()
            outcomes[name] = "ok"
        except Exception:
            outcomes[name] = traceback.format_exc()
    print(json.dumps(outcomes))
    return 0


if __name__ == "__main__":
    sys.exit(main())
