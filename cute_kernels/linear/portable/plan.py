"""What of a launch stays the same from call to call: that of the kernel for many rows, with another function."""

from __future__ import annotations

from cute_kernels.linear.portable.compile import PortableSpec
from cute_kernels.linear.portable.config import PortableConfig
from cute_kernels.linear.wgmma.plan import TilePlan
from cute_kernels.linear.wgmma.schedule import TileSchedule
from cute_kernels.runtime.cache import load
from cute_kernels.runtime.device import portable_arch_of


def make_portable_plan(schedule: TileSchedule, device_index: int) -> TilePlan:
    """The plan of a given schedule of a :class:`PortableConfig`."""
    assert isinstance(schedule.config, PortableConfig)
    return TilePlan(
        function=load(PortableSpec(schedule.config), portable_arch_of(device_index)),
        schedule=schedule,
        device_index=device_index,
        num_words=schedule.workspace_words,
    )
