"""Machine code of decode attention by warpgroups: what is written is what runs, in registers."""

from __future__ import annotations

import pytest

pytest.importorskip("cutlass")

from cute_kernels.attention.candidates import candidate_configs
from cute_kernels.attention.compile import DecodeSpec
from cute_kernels.attention.features import Features
from cute_kernels.attention.problem import DecodeProblem
from cute_kernels.runtime import default_cache
from cute_kernels.runtime.resources import ToolMissingError, find_tool, resource_report

HEAD_DIM, TOKENS, QUERIES = 128, 128, 32


def test_products_are_not_put_one_after_the_other_and_nothing_is_spilled():
    try:
        find_tool("nvdisasm")
    except ToolMissingError as error:
        pytest.skip(str(error))
    features = Features(queries=True, causal=True)
    (config,) = candidate_configs(
        DecodeProblem.uniform(128, 8192, 8, 1, HEAD_DIM, "int4_g1", "bf16", q_len=4, features=features)
    )
    assert config.warpgroups
    # In a process of its own: tracing leaves functions changed that other tests run as plain Python.
    (artifact,) = default_cache().artifacts([DecodeSpec(config)], "sm_90a")
    (resources,) = resource_report(artifact)
    assert resources.spill_store_bytes == resources.spill_load_bytes == resources.stack_bytes == 0
