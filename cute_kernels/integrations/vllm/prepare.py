"""What `ready` needs to know about the vLLM of this process: its row counts, its log, and which seams are replaced."""

from __future__ import annotations

import functools

from cute_kernels.integrations import ready
from cute_kernels.integrations.objects import Foreign
from cute_kernels.integrations.ready import DEFAULT_ROWS, RowCounts, index_of, note, outlasting, specs_for
from cute_kernels.integrations.vllm import environment, plugin
from cute_kernels.integrations.vllm.seams import logger

__all__ = ["RowCounts", "index_of", "note", "outlasting", "specs_for"]

WANTED = "wanted_by_vllm.json"
"""A file in the kernel cache's directory. It lists kernels that were requested, are in no bundle, and cannot be
compiled here."""

why_not_ready = functools.partial(ready.why_not_ready, file_name=WANTED)
linear_reason = functools.partial(ready.linear_reason, file_name=WANTED)
load = functools.partial(ready.load, logger=logger)
load_noted = functools.partial(ready.load_noted, load_all=load)
make_ready = functools.partial(ready.make_ready, logger=logger, file_name=WANTED)


def engine_rows() -> RowCounts:
    """Returns the row counts of this process's engine."""
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    if config is None:
        return DEFAULT_ROWS
    captured = config.compilation_config.cudagraph_capture_sizes or ()
    return RowCounts(tuple(sorted(captured)), config.scheduler_config.max_num_batched_tokens)


def engine_has(part: str, option: str) -> bool:
    """Returns whether an option is on in a part of the configuration of this process's engine."""
    from vllm.config import get_current_vllm_config_or_none

    return bool(getattr(getattr(get_current_vllm_config_or_none(), part, None), option, False))


def layer_named(name: str | None) -> Foreign | None:
    """Returns the layer that vLLM's operators find by a name in this process's engine; None if there is none."""
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    return None if config is None else config.compilation_config.static_forward_context.get(name)


def why_left(seam: str) -> str | None:
    """Returns why layers of the engine that is being made may not use a seam; None if they may."""
    return None if plugin.is_replaced(seam) else f"{environment.SWITCH}={environment.switch()}"
