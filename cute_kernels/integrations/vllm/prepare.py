"""The facts about the vLLM of this process that `ready` needs: its rows, its log, and whether a seam may serve its
layers."""

from __future__ import annotations

import functools

from cute_kernels.integrations import ready
from cute_kernels.integrations.objects import Foreign
from cute_kernels.integrations.ready import DEFAULT_ROWS, RowCounts, index_of, note, outlasting, specs_for
from cute_kernels.integrations.vllm import environment, plugin
from cute_kernels.integrations.vllm.seams import logger

__all__ = ["RowCounts", "index_of", "note", "outlasting", "specs_for"]

WANTED = "wanted_by_vllm.json"
"""In the directory of the kernel cache: kernels that were asked for, are in no bundle, and cannot be compiled here."""

why_not_ready = functools.partial(ready.why_not_ready, file_name=WANTED)
linear_reason = functools.partial(ready.linear_reason, file_name=WANTED)
load = functools.partial(ready.load, logger=logger)
load_noted = functools.partial(ready.load_noted, load_all=load)
make_ready = functools.partial(ready.make_ready, logger=logger, file_name=WANTED)


def engine_rows() -> RowCounts:
    """Numbers of rows that the engine of this process runs."""
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    if config is None:
        return DEFAULT_ROWS
    captured = config.compilation_config.cudagraph_capture_sizes or ()
    return RowCounts(tuple(sorted(captured)), config.scheduler_config.max_num_batched_tokens)


def engine_has(part: str, option: str) -> bool:
    """Whether an option of a part of the configuration of this process's engine is on."""
    from vllm.config import get_current_vllm_config_or_none

    return bool(getattr(getattr(get_current_vllm_config_or_none(), part, None), option, False))


def layer_named(name: str | None) -> Foreign | None:
    """The layer of this process's engine that vLLM's operators find by a name; None without one."""
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    return None if config is None else config.compilation_config.static_forward_context.get(name)


def why_left(seam: str) -> str | None:
    """Returns why a seam serves no layer of the engine that is being made; None if it may."""
    return None if plugin.is_replaced(seam) else f"{environment.SWITCH}={environment.switch()}"
