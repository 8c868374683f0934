"""Gives `PackedWeight` importers of other projects' layers, such as `from_awq`. Each importer's module is imported at
its first call.

Importers depend on `PackedWeight`, which does not depend on them.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from cute_kernels.gemm.weight import PackedWeight

_PACKAGE = "cute_kernels.integrations.checkpoints"
PROJECTS = {
    "awq": "an AWQ layer",
    "gptq": "a GPTQ layer",
    "compressed_tensors": 'a "pack-quantized" layer',
    "hqq": "an HQQ layer",
    "torchao": "a torchao layer",
    "fastertransformer": "a layer preprocessed for FasterTransformer or TensorRT-LLM",
}


def _importer(project: str, what: str) -> Callable[..., PackedWeight]:
    def importer(*tensors: object, **options: object) -> PackedWeight:
        return getattr(import_module(f"{_PACKAGE}.{project}"), f"from_{project}")(*tensors, **options)

    importer.__name__ = importer.__qualname__ = f"from_{project}"
    importer.__doc__ = f"Packs the weight of {what}; see `{_PACKAGE}.{project}.from_{project}`."
    return importer


for _project, _what in PROJECTS.items():
    setattr(PackedWeight, f"from_{_project}", staticmethod(_importer(_project, _what)))
