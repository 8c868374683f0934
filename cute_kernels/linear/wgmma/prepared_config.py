"""Tiles whose rows of x the launch before makes, of an x that nobody has made ready. No GPU types here."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import ClassVar

from cute_kernels.linear.wgmma.config import WgmmaConfig
from cute_kernels.linear.wgmma.mainloops import RegisterWgmma


@dataclass(frozen=True)
class PreparedWgmma(RegisterWgmma):
    """As `RegisterWgmma`, behind a launch that makes rows of x and writes nothing else (`cute_kernels.linear.inputs`).

    That launch lets this one begin when all before it have ended. So weights are what they will be, and only what
    brings x waits.
    """

    rows_apart: ClassVar[bool] = False

    def kernel_name(self, config: WgmmaConfig) -> str:
        return f"{super().kernel_name(config)}_prepared"


def prepared(config: WgmmaConfig) -> WgmmaConfig[PreparedWgmma] | None:
    """The same kernel behind a launch that makes its rows; None where there is none."""
    loop = config.mainloop
    if type(loop) is not RegisterWgmma:
        return None
    return replace(config, mainloop=PreparedWgmma(**{one.name: getattr(loop, one.name) for one in fields(loop)}))
