"""Which versions of SGLang are supported, and what they call things.

SGLang moves its interfaces from one release to the next, so a version that nobody tried is left alone, with a word.
"""

from __future__ import annotations

from dataclasses import dataclass

_GPU = "sglang.srt.hardware_backend.gpu.quantization"


@dataclass(frozen=True)
class Interface:
    """Where a version of SGLang keeps what the plug-in hooks, each a module and a class.

    Attributes:
        tested: how this version is known to work, for people.
        compressed_tensors, gptq, awq: the owners of linear layers of these checkpoints.
    """

    tested: str
    compressed_tensors: str = (
        "sglang.srt.layers.quantization.compressed_tensors.schemes.compressed_tensors_wNa16.CompressedTensorsWNA16"
    )
    gptq: str = f"{_GPU}.gptq_kernels.GPTQMarlinLinearKernel"
    awq: str = f"{_GPU}.awq_kernels.AWQMarlinLinearKernel"


INTERFACES = {"0.5.23": Interface("interface tests")}
"""By version; none was seen on a GPU."""


def interface_of(version: str) -> Interface | None:
    """What is known of a version such as "0.5.23"; None if it is not supported."""
    return INTERFACES.get(version.partition("+")[0])


def supported() -> str:
    """The supported versions in words."""
    return ", ".join(INTERFACES)
