"""Score options, which change attention's scores between q K^T and the softmax. Each is one object
(docs/add_score_option.md)."""

from cute_kernels.formats.scores.base import SIZES, KeyBlock, OptionTensor, ScoreOption
from cute_kernels.formats.scores.registry import (
    OPTIONS,
    check_given,
    check_mapping,
    code_of,
    flattened,
    known,
    modules_of,
    options_in,
    register,
    restored,
    tensors_in,
    tensors_of,
)

__all__ = [
    "OPTIONS",
    "SIZES",
    "KeyBlock",
    "OptionTensor",
    "ScoreOption",
    "check_given",
    "check_mapping",
    "code_of",
    "flattened",
    "known",
    "modules_of",
    "options_in",
    "register",
    "restored",
    "tensors_in",
    "tensors_of",
]
