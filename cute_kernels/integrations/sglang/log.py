"""Lines of SGLang's log."""

from __future__ import annotations

import functools
import logging

logger = logging.getLogger("sglang.cute_kernels")


@functools.cache
def say_once(line: str, level: int = logging.INFO) -> None:
    """Writes a line to SGLang's log, unless this process wrote it already."""
    logger.log(level, "cute-kernels: %s", line)
