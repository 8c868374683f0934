"""The numbers of rows and the options of this process's server, from SGLang's resolved configuration and the
environment."""

from __future__ import annotations

import operator
import os

from cute_kernels.integrations.engine_cache import Formats, formats_named
from cute_kernels.integrations.ready import DEFAULT_ROWS, RowCounts


def engine_rows() -> RowCounts:
    """Returns the row counts of this process's server; `DEFAULT_ROWS` if no server has published them.

    Captured counts are those of prefill graphs, those of decode graphs, and those of decode graphs times the number of
    draft tokens. The largest count is the number of tokens in the largest chunk of a prompt.
    """
    from sglang.srt.runtime_context import get_exec, get_schedule, get_spec

    try:
        graphs, schedule = get_exec().graph.cuda_graph_config, get_schedule()
        width = get_spec().speculative_num_draft_tokens or 1
    except ValueError:  # no server has published it
        return DEFAULT_ROWS
    requests, chunk = graphs.decode.bs or (), schedule.chunked_prefill_size
    captured = {*requests, *(width * each for each in requests), *(graphs.prefill.bs or ())}
    most = chunk if chunk and chunk > 0 else schedule.max_prefill_tokens
    return RowCounts(tuple(sorted(captured)), max(most, *captured) if captured else most)


def published(part: str, option: str) -> bool:
    """Returns whether an option of the server's configuration is True or an integer above 1; False if no configuration
    is published.
    """
    from sglang.srt import runtime_context

    try:
        found = operator.attrgetter(option)(getattr(runtime_context, part)())
    except ValueError:
        return False
    return found > 1 if type(found) is int else bool(found)


def is_deterministic() -> bool:
    """Returns whether a row's result must not depend on other rows of its batch
    (`--enable-deterministic-inference`)."""
    return published("get_exec", "deterministic.enable_deterministic_inference")


def saves_memory() -> bool:
    """Returns whether SGLang may release memory and map it again (`--enable-memory-saver`). No layer here supports
    this.

    Kernels wait for words of workspaces to change. If a workspace's contents are lost, results are wrong.
    """
    return published("get_exec", "features.enable_memory_saver")


KV_FORMAT = "CUTE_KERNELS_SGLANG_KV_FORMAT"
"""Environment variable that names one of this package's cache formats, or one for K and one for V. It replaces SGLang's
FP8 format."""


def wanted_formats() -> Formats | None:
    """Returns K's and V's formats that the environment asks for; None for SGLang's own.

    Raises:
        ValueError: the variable does not name supported formats.
    """
    text = os.environ.get(KV_FORMAT, "").strip()
    return formats_named(text, KV_FORMAT) if text else None
