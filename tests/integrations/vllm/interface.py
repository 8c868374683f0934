"""Checks the plugin against vLLM's Python, without a GPU: `python -m tests.integrations.vllm.interface FOLDER [WHICH]`.

FOLDER holds the package vllm, as tools/fetch_engine.py leaves it. A process of its own, as it stands in for what vLLM
needs and is not here. Prints a JSON object: of each check "ok" or what went wrong. WHICH: "short" leaves out what sees
hardly anything of vLLM; "any" tries a version that is not supported as if it were.
"""

# vLLM is not installed where types are checked.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from collections.abc import Sequence
from types import SimpleNamespace

import torch

from cute_kernels.integrations.vllm import environment, versions
from tests.integrations.vllm import (
    seam_attention,
    seam_attention_choice,
    seam_attention_ranks,
    seam_attention_steps,
    seam_float_linear,
    seam_fusion,
    seam_linear,
    seam_mla,
    seam_moe,
    seam_plugin,
    seam_router,
    stubs,
)
from tests.integrations.vllm.checks import CHECKS, ONCE, hopper

SEAMS = (
    seam_plugin,
    seam_linear,
    seam_attention,
    seam_attention_choice,
    seam_attention_ranks,
    seam_attention_steps,
    seam_moe,
    seam_router,
    seam_mla,
    seam_float_linear,
    seam_fusion,
)
"""Modules that put their checks on the list."""


def set_up() -> None:
    """The plugin, registered, in a vLLM that believes to be on a Hopper."""
    os.environ["CUTE_KERNELS_VLLM_KV_FORMAT"] = "int4_g4"
    os.environ["CUTE_KERNELS_VLLM"] = ",".join(environment.SEAMS)
    sys.modules["vllm._C_stable_libtorch"] = SimpleNamespace()  # type: ignore[assignment]
    flash = SimpleNamespace(flash_attn_varlen_func=None, get_scheduler_metadata=None)  # of kernels that are not here
    sys.modules["vllm.vllm_flash_attn"] = flash  # type: ignore[assignment]
    from vllm.v1.attention.backends import fa_utils

    vars(fa_utils).update({name: None for name in vars(flash) if not hasattr(fa_utils, name)})
    from cute_kernels.integrations.vllm import linear, plugin, prepare, register

    plugin._platform = hopper
    register()
    import vllm.model_executor.kernels.linear as kernels

    torch.cuda.current_device = lambda: 0  # type: ignore[assignment]
    linear.current_platform = kernels.current_platform = hopper()
    linear._num_sms = lambda index: 132
    prepare.original_linear_reason = prepare.linear_reason
    prepare.linear_reason = lambda *_: None
    prepare.load_noted = lambda device: None


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", metavar="FOLDER")
    parser.add_argument("which", nargs="?", choices=["any", "short"], metavar="WHICH")
    options = parser.parse_args(arguments)
    stubs.install()
    sys.path.insert(0, options.folder)
    if options.which == "any":
        tried = versions.INTERFACES[max(versions.INTERFACES)]
        versions.interface_of = lambda version: tried
    outcomes: dict[str, str] = {}
    try:
        set_up()
    except Exception:
        print(json.dumps({name: f"set_up: {traceback.format_exc()}" for name in CHECKS}))
        return 0
    for name, function in CHECKS.items():
        if options.which == "short" and name in ONCE:
            continue
        try:
            function()
            outcomes[name] = "ok"
        except Exception:
            outcomes[name] = traceback.format_exc()
    print(json.dumps(outcomes))
    return 0


if __name__ == "__main__":
    sys.exit(main())
