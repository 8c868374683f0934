"""Transforms fitted to a model by gradient descent: the distribution of the next token is to stay what it is.

`calibrate_cache` finds transforms layer by layer, to first order. Here all layers' centers and factors move together,
so that the model with simulated rows says what it says with exact K and V: the KL divergence of its next token, on text
of one's own. The model's weights stay.

A quantiser has no gradient, but its step has: an element x is read as x + step * r, where r, the rounding error in
steps, counts as a constant, and the step (range / 15, say) depends on the row. Shrinking a row shrinks its noise; a
score does not see the factors otherwise, since q is divided by them.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from cute_kernels.arguments import check_count, check_positive
from cute_kernels.formats.kv import KvFormat, format_of
from cute_kernels.formats.kv.transforms import GREATEST_FACTOR, CacheTransform, rotated
from cute_kernels.integrations.objects import Foreign
from cute_kernels.integrations.transformers.attend import attention
from cute_kernels.integrations.transformers.cache_options import formats_of_layer
from cute_kernels.integrations.transformers.calibrate import Batch, Seen, attending, inputs_of, watch
from cute_kernels.kv_cache.constants import CacheConstants
from cute_kernels.model_layers import compiled_from
from cute_kernels.runtime.captures import graph_of

_BETAS = (0.9, 0.98)
_WARM_STEPS = 3  # before a step is recorded, as PyTorch's guide to CUDA graphs has it
_U4_STEPS, _INT8_STEPS = 15, 127  # of a row's range, of its largest magnitude


def fit_transforms(
    model: PreTrainedModel,
    batches: Sequence[Batch],
    kv_format: object,
    constants: CacheConstants,
    *,
    steps: int = 150,
    learning_rate: float = 0.02,
    text_weight: float = 0.0,
    cuda_graph: bool = False,
    say: Callable[[int, float], None] | None = None,
) -> CacheConstants:
    """Constants whose transforms lose less of a model than those to begin with, on what the batches are like.

    A step takes one batch through the model twice and back once: memory as for training without the weights' share.
    Products of an fp32 model are in TF32 meanwhile.

    Args:
        model: as `calibrate_cache` takes it, its layers transformers' own.
        batches: as of `calibrate_cache`, text in some variety: they are gone through in turn.
        kv_format: INT4 formats, INT8 ones with scales in their rows, dense ones: as `DecodeCache` takes them.
        constants: to begin with, as `calibrate_cache` gives them. Widths, signs and what is not there stay.
        steps: of Adam.
        learning_rate: of the factors' logarithms, and of the centers in channels' standard deviations; it falls to 0
            along a cosine.
        text_weight: from 0 to 1: how much of the loss is the text's own next tokens (their cross-entropy over that with
            exact K and V), the rest being the divergence. More of it keeps perplexity on such text, less of it keeps
            what the model would say.
        cuda_graph: whether steps from the fourth on are replayed from a CUDA graph, for a model so small, or a host so
            busy, that launches take longer than what they launch. It wants one GPU, batches of one shape without
            padding, and a model whose pass does not wait for the GPU: else CUDA's own error ends the fit.
        say: called after each step with its number and its loss, in nats.

    Returns:
        New constants; ``about`` says that and how they were fitted.

    Raises:
        TypeError, ValueError: an argument is not as above, no layer has factors or a center, or the model is
            accelerated or quantised: the kernels have no gradients.
        RuntimeError: with ``cuda_graph``, the model's pass cannot be recorded.
    """
    check_count("steps", steps, 1)
    check_positive("learning_rate", learning_rate)
    if not 0 <= text_weight <= 1:
        raise ValueError(f"text_weight: got {text_weight}, want a number from 0 to 1")
    if not isinstance(batches, Sequence) or not batches:
        raise ValueError(f"batches: got {type(batches).__name__} of none, want a list of at least one")
    batches, model = [inputs_of(batch) for batch in batches], cast("PreTrainedModel", compiled_from(model))
    _check_differentiable(model)
    deviations = _deviations(model, batches[0])
    if len(deviations) != constants.num_layers:
        raise ValueError(f"constants: got those of {constants.num_layers} layers, want {len(deviations)}, the model's")
    layers = [
        _Layer(transform or CacheTransform(), formats_of_layer(kv_format, index), deviation)
        for index, (transform, deviation) in enumerate(zip(constants.transforms, deviations, strict=True))
    ]
    parameters = [parameter for layer in layers for parameter in layer.parameters]
    if not parameters:
        raise ValueError("constants: got no factors and no centers, want some to fit")
    if cuda_graph:
        _check_recordable(batches, parameters)
    losses: list[torch.Tensor] = []
    rate = torch.tensor(learning_rate, device=parameters[0].device) if cuda_graph else learning_rate
    optimizer = torch.optim.Adam(parameters, lr=rate, betas=_BETAS, capturable=cuda_graph)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 + 0.5 * math.cos(math.pi * step / steps))

    def advance(batch: Mapping[str, Any]) -> torch.Tensor:
        divergence, excess = _losses(model, batch, layers)
        optimizer.zero_grad()
        (divergence.lerp(excess, text_weight) if text_weight else divergence).backward()
        optimizer.step()
        return divergence.detach()

    act = _Recorded(advance, parameters[0].device) if cuda_graph else advance
    with _frozen(model), _tensor_cores():
        for step in range(steps):
            losses.append(act(batches[step % len(batches)]))
            schedule.step()
            if say is not None:
                say(step, float(losses[-1]))
    optimizer.zero_grad()
    ends = [float(torch.stack(part).mean()) for part in (losses[: len(batches)], losses[-len(batches) :])]
    fitted = f"{steps} steps, KL {ends[0]:.5f} to {ends[1]:.5f} nats, text weight {text_weight:g}"
    about = dict(constants.about) | {"fitted": fitted}
    return CacheConstants(tuple(layer.transform() for layer in layers), constants.scales, about)


class _Recorded:
    """Steps that are replayed from a CUDA graph, but for the first ones, which also warm up what the graph uses.

    device: the model's. It need not be the current one, of whose streams alone torch would record what it is given.
    """

    def __init__(self, advance: Callable[[Mapping[str, Any]], torch.Tensor], device: torch.device) -> None:
        self.advance, self.device, self.to_warm = advance, device, _WARM_STEPS
        self.graph: torch.cuda.CUDAGraph | None = None
        self.batch: dict[str, torch.Tensor] = {}
        self.loss = torch.zeros(())

    def __call__(self, batch: Mapping[str, Any]) -> torch.Tensor:
        with torch.cuda.device(self.device):
            return self._act(batch)

    def _act(self, batch: Mapping[str, Any]) -> torch.Tensor:
        if self.to_warm:
            self.to_warm -= 1
            return self._warm(batch)
        if self.graph is None:
            self._record(batch)
        assert self.graph is not None
        for name, tensor in self.batch.items():
            tensor.copy_(batch[name])
        self.graph.replay()
        return self.loss.clone()

    def _warm(self, batch: Mapping[str, Any]) -> torch.Tensor:
        """A step aside of the current stream: nothing that a backward pass keeps may belong to it."""
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "This instance was constructed with capturable=True")
            loss = self.advance(batch)
        torch.cuda.current_stream().wait_stream(aside)
        return loss

    def _record(self, batch: Mapping[str, Any]) -> None:
        self.batch = {name: tensor.clone() for name, tensor in batch.items()}
        self.graph, self.loss = graph_of(lambda: self.advance(self.batch), self.device)


def _check_recordable(batches: Sequence[Mapping[str, Any]], parameters: Sequence[torch.Tensor]) -> None:
    """ValueError for what one CUDA graph cannot serve."""
    places = {str(parameter.device) for parameter in parameters}
    if len(places) > 1 or not parameters[0].is_cuda:
        raise ValueError(f"cuda_graph: got a model on {', '.join(sorted(places))}, want one on one GPU")
    shapes = {tuple((name, tuple(batch[name].shape)) for name in sorted(batch)) for batch in batches}
    if len(shapes) > 1 or set(batches[0]) != {"input_ids"}:
        raise ValueError(f"cuda_graph: got batches of {sorted(shapes)}, want input_ids alone, of one shape")


class _Layer:
    """A layer's transform with its numbers free, and what rows in its formats make of K and V.

    transform: to begin with. deviation: K's by channel, fp32 [num_kv_heads, head_dim].
    """

    def __init__(self, transform: CacheTransform, formats: tuple[str, str], deviation: torch.Tensor) -> None:
        self.start, self.deviation = transform.to(deviation.device), deviation
        self.forms = tuple(format_of(name) for name in formats)
        for name, form in zip(formats, self.forms, strict=True):
            if form.in_blocks or (_step(form, deviation) is None and form.is_coded):
                raise ValueError(
                    f"kv_format: got {name!r}, want INT4, INT8 with scales in the rows, or a dense format"
                    + (": a fit is for rows, and these keys lie in blocks" if form.in_blocks else "")
                )
        arrays = self.start.arrays
        self.logs = {name: arrays[name].abs().log() for name in ("k_factor", "v_factor") if name in arrays}
        self.offset = torch.zeros_like(arrays["k_center"]) if "k_center" in arrays else None
        widths = {self.start.k_rotation, self.start.v_rotation}
        # Hadamard matrices before they are scaled: +1 and -1, exact in TF32 too.
        self.signs = {width: rotated(torch.eye(width, device=deviation.device), width).sign() for width in widths}
        self.parameters = [x.requires_grad_() for x in (*self.logs.values(), self.offset) if x is not None]

    def arrays(self) -> dict[str, torch.Tensor]:
        """The arrays as they are now, with gradients."""
        start = self.start.arrays
        most = math.log(GREATEST_FACTOR)
        found = {name: logs.clamp(-most, most).exp() * start[name].sign() for name, logs in self.logs.items()}
        if self.offset is not None:
            found["k_center"] = start["k_center"] + self.offset * self.deviation
        return found

    def read(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V [batch, heads, tokens, columns] as attention would read them, with the transform undone."""
        now, widths = self.arrays(), (self.start.k_rotation, self.start.v_rotation)
        results = []
        for x, side, form, width in zip((k, v), "kv", self.forms, widths, strict=True):
            center, factor = now.get(f"{side}_center"), now.get(f"{side}_factor")
            x = x.float().transpose(1, 2)
            x = x if center is None else x - center
            x = x if factor is None else x * factor
            x = self._rotated(_Rounded.apply(self._rotated(x, width), form), width)
            x = x if factor is None else x / factor
            x = x if center is None else x + center
            results.append(x.transpose(1, 2).to(k.dtype))
        return results[0], results[1]

    def _rotated(self, x: torch.Tensor, width: int) -> torch.Tensor:
        """`rotated`, by one product in place of a butterfly's many steps: a fit waits for their launches."""
        return x if width == 1 else (x.unflatten(-1, (-1, width)) @ self.signs[width]).flatten(-2) * width**-0.5

    def transform(self) -> CacheTransform | None:
        """What has become of it; None for one that changes nothing."""
        arrays = {name: array.detach().contiguous() for name, array in self.arrays().items()}
        turned = CacheTransform(k_rotation=self.start.k_rotation, v_rotation=self.start.v_rotation)
        made = replace(turned, **arrays)
        return None if made.identity else made


class _Rounded(torch.autograd.Function):
    """x [..., columns] through a format, with the gradient of its step: few launches there and back."""

    @staticmethod
    def forward(ctx: Foreign, x: torch.Tensor, form: KvFormat) -> torch.Tensor:
        read = form.dequantize(form.quantize(x), x.shape[-1], torch.float32)
        ctx.form = form
        step = _step(form, x)
        if step is not None:
            least = torch.finfo(torch.float32).tiny
            parts = x.unflatten(-1, (form.num_groups, -1))
            rounded = (read - x).unflatten(-1, (form.num_groups, -1)) / step.clamp(min=least)
            ctx.save_for_backward(parts, rounded)
        return read

    @staticmethod
    def backward(ctx: Foreign, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        (gradient,) = gradients
        if not ctx.saved_tensors:
            return gradient, None
        parts, rounded = ctx.saved_tensors
        by_group = gradient.unflatten(-1, parts.shape[-2:])
        of_step = (by_group * rounded).sum(-1, keepdim=True)
        if ctx.form.codes == "u4":
            of_step = of_step / _U4_STEPS
            ends = ((parts.argmax(-1, keepdim=True), of_step), (parts.argmin(-1, keepdim=True), -of_step))
        else:
            place = parts.abs().argmax(-1, keepdim=True)
            ends = ((place, of_step / _INT8_STEPS * parts.gather(-1, place).sign()),)
        found = by_group.clone()
        for place, part in ends:
            found.scatter_add_(-1, place, part)
        return found.flatten(-2), None


def _step(form: KvFormat, x: torch.Tensor) -> torch.Tensor | None:
    """How far apart a row's numbers are, as far as it depends on the row: [..., groups, 1]. None: not known."""
    if not form.has_header or form.codes not in ("u4", "int8"):
        return None
    parts = x.unflatten(-1, (form.num_groups, -1))
    if form.codes == "u4":
        low, high = parts.aminmax(dim=-1, keepdim=True)
        return (high - low) / _U4_STEPS
    return parts.abs().amax(-1, keepdim=True) / _INT8_STEPS


def _losses(
    model: PreTrainedModel, batch: Mapping[str, Any], layers: Sequence[_Layer]
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the layers' rows cost beside exact K and V, nats per token: the KL divergence of the next token, and the
    cross-entropy of the text's own."""

    def attend(
        module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **options: Any
    ) -> Any:
        key, value = layers[cast("int", module.layer_idx)].read(key, value)
        return attention(module, query, key, value, *args, **options)

    with torch.no_grad(), attending(model, attention):
        exact = model(**batch, use_cache=False).logits.float().log_softmax(-1)
    with attending(model, attend):
        found = model(**batch, use_cache=False).logits.float().log_softmax(-1)
    divergence = (exact.exp() * (exact - found)).sum(-1)
    told = batch["input_ids"][:, 1:, None]
    excess = (exact[:, :-1].gather(-1, told) - found[:, :-1].gather(-1, told))[..., 0]
    if (seen := batch.get("attention_mask")) is not None:
        seen = seen.bool()
        divergence, excess = divergence[seen], excess[seen[:, :-1] & seen[:, 1:]]  # tokens whose next one is the text's
    return divergence.mean(), excess.sum() / max(1, excess.numel())


def _check_differentiable(model: PreTrainedModel) -> None:
    """ValueError, naming the first, for a model with layers that this package computes: they have no gradients."""
    for name, module in model.named_modules():
        own = vars(module).get("forward")
        makers = (type(module), type(own), getattr(own, "func", own))
        if any((getattr(maker, "__module__", None) or "").startswith("cute_kernels") for maker in makers):
            raise ValueError(
                f"model: got {name or type(model).__name__}, which kernels without gradients compute; want the model "
                "as transformers loads it: restore(model), and its weights not quantised"
            )


def _deviations(model: PreTrainedModel, batch: Mapping[str, Any]) -> list[torch.Tensor]:
    """Each layer's standard deviation of K's channels, fp32 [num_kv_heads, head_dim]."""
    found: list[torch.Tensor] = []

    def see(seen: Seen) -> None:
        found.append(seen.k.float().std(0, correction=0))

    watch(model, [batch], see)
    return found


@contextmanager
def _frozen(model: PreTrainedModel) -> Iterator[None]:
    """A model whose weights ask for no gradients."""
    asking = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in asking:
        parameter.requires_grad_(False)
    try:
        with torch.enable_grad():
            yield
    finally:
        for parameter in asking:
            parameter.requires_grad_()


@contextmanager
def _tensor_cores() -> Iterator[None]:
    """fp32 products in TF32, and as they were afterwards."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
