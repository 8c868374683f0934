"""`Moments`, which finds a layer's cache transform from samples. The transform minimises the harm that quantisation
noise of K does to attention's output.

A group's quantiser makes noise that grows with the group's size. After a rotation over w columns, the error of the
score of query i for key t has the variance (sum_d f_d^2 k_td^2) * (sum_e q_ie^2 / f_e^2) / w, up to a constant. Here d
and e run over one block of columns, k is centred, and f are the factors. To first order, an error of the score changes
the query's output by that error times p_it (v_t - o_i), where p_it is the attention's weight and o_i the output. Summed
over queries and keys, the squared error is

    sum_de M_de f_d^2 / f_e^2,    M_de = sum_it p_it^2 |v_t - o_i|^2 k_td^2 q_ie^2,

which is convex in log f, and smallest if row sums and column sums of its terms are equal. A few cheap steps make them
equal, which *balances* M (Osborne, 1960). Without the attention's weights M_de = s_d t_e, with s_d = sum_t k_td^2 and
t_e = sum_i q_ie^2. The result is then f_d = (t_d / s_d) ** 1/4.
"""

from __future__ import annotations

import torch

from cute_kernels import blocks
from cute_kernels.arguments import check_floating, check_positive, shape_of
from cute_kernels.formats.kv import KvFormat
from cute_kernels.formats.kv.transforms import GREATEST_FACTOR, CacheTransform

_LEAST_SHARE = 1e-6  # of a block's mean row or column, that a dead channel's counts for: it gets a finite factor
_SCORES = 1 << 25  # of attention weights, [heads, queries, keys], at a time
_STEPS, _DAMPING = 300, 0.125  # of balancing: converged to 1e-6 in matrices of a thousandfold range


class Moments:
    """Accumulates statistics of one layer's q, k and v, sequence by sequence, and computes the layer's transform.

    Examples:
        >>> moments = Moments()
        >>> _ = moments.update(torch.randn(100, 8, 64), torch.randn(100, 2, 64), torch.randn(100, 2, 64))
        >>> moments.transform(k_rotation=32).k_center.shape
        torch.Size([2, 64])
    """

    def __init__(self) -> None:
        self._sums: dict[str, torch.Tensor] = {}  # fp64, by what they are of
        self.sizes: tuple[int, int, int] | None = None  # num_kv_heads, head_dim, v_head_dim; None before any sample
        self.tokens = 0

    def update(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float | None = None) -> Moments:
        """Adds one sequence with causal attention: token i attends to tokens 0 to i. Returns self. Waits for the
        device.

        Windows, soft caps and sinks are ignored; they would only change the attention's weights.

        Args:
            q: floating, finite [tokens, num_q_heads, head_dim], after RoPE.
            k, v: [tokens, num_kv_heads, head_dim], [tokens, num_kv_heads, v_head_dim].
            softmax_scale: default head_dim ** -0.5.

        Raises:
            TypeError: a tensor is not floating.
            ValueError: shapes do not fit each other or those of earlier calls, or samples are not finite.
        """
        heads = self._check_shapes(q, k, v)
        scale = q.shape[2] ** -0.5 if softmax_scale is None else softmax_scale
        check_positive("softmax_scale", scale)
        queries = q.detach().float().unflatten(1, (heads, -1)).permute(1, 2, 0, 3)  # [heads, group, tokens, head_dim]
        keys, values = (x.detach().float().transpose(0, 1) for x in (k, v))
        if not all(bool(x.isfinite().all()) for x in (queries, keys, values)):
            raise ValueError("q, k, v: got NaN or infinity among the samples, want finite ones")
        self.sizes = heads, k.shape[2], v.shape[2]
        weighted, weights = _attended(queries, keys, values, scale)
        self._add("k", keys.double().sum(1))
        self._add("k_square", keys.double().square().sum(1))
        for name, x in (("m_square", keys.square()), ("m_linear", keys)):
            self._add(name, torch.einsum("htd,hte->hde", x.double(), weighted.double()))
        self._add("m_constant", weighted.double().sum(1))
        self._add("v_noise", torch.einsum("ht,htd->hd", weights.double(), values.double().square()))
        self.tokens += len(k)
        return self

    def transform(
        self,
        *,
        k_rotation: int = 1,
        v_rotation: int = 1,
        k_group: int | None = None,
        center: bool = True,
        factors: bool = True,
        v_factors: bool = False,
        seed: int = 0,
    ) -> CacheTransform:
        """Returns the transform that is best for the samples.

        Args:
            k_rotation, v_rotation: see :class:`CacheTransform`; `group_of` returns a width that suits a format.
            k_group: number of columns of K that share a scale. Factors are balanced over this many columns, or over
                k_rotation columns if k_rotation is larger. Default: k_rotation, or all columns without a rotation.
            center: whether K's mean is subtracted.
            factors: whether K's channels are multiplied by the factors f of the module's text.
            v_factors: whether V's channels are multiplied by the inverse square roots of their magnitudes, which are
                weighted by attention.
            seed: seed of the random signs before a rotation.

        Raises:
            ValueError: there were no samples, or a width does not fit.
        """
        if self.sizes is None:
            raise ValueError("q, k, v: got no samples, want at least one update")
        _, head_dim, v_head_dim = self.sizes
        generator = torch.Generator().manual_seed(seed)
        mean = self._sums["k"] / self.tokens
        k_factor = v_factor = None
        if factors:
            block = max(k_rotation, k_group or (k_rotation if k_rotation > 1 else head_dim))
            if block < 1 or head_dim % block:
                raise ValueError(f"k_group: got blocks of {block}, want a number that divides head_dim {head_dim}")
            k_factor = _balanced(self._importance(mean if center else torch.zeros_like(mean)), block)
        if v_factors:
            v_factor = _levelled(self._sums["v_noise"])
        parts = ((k_factor, k_rotation, head_dim), (v_factor, v_rotation, v_head_dim))
        k_factor, v_factor = (_signed(factor, width, mean, dim, generator) for factor, width, dim in parts)
        return CacheTransform(mean.float() if center else None, k_factor, k_rotation, v_factor, v_rotation)

    def _importance(self, center: torch.Tensor) -> torch.Tensor:
        """Returns the matrices M that the module's docstring defines, for keys minus ``center``: fp64 [num_kv_heads,
        head_dim, head_dim].
        """
        sums = self._sums
        linear = 2 * center[:, :, None] * sums["m_linear"]
        found = sums["m_square"] - linear + center.square()[:, :, None] * sums["m_constant"][:, None]
        return found.clamp(min=0)

    def _add(self, name: str, x: torch.Tensor) -> None:
        self._sums[name] = self._sums[name].to(x.device) + x if name in self._sums else x

    def _check_shapes(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> int:
        """Checks that the shapes fit each other and the shapes of earlier calls. Returns num_kv_heads."""
        check_floating(q=q, k=k, v=v)
        for name, x in (("q", q), ("k", k), ("v", v)):
            if x.dim() != 3 or 0 in x.shape:
                raise ValueError(f"{name}: got shape {shape_of(x)}, want [tokens, heads, head_dim]")
        tokens, heads, head_dim = k.shape
        sizes = self.sizes or (heads, head_dim, v.shape[2])
        if (heads, head_dim, v.shape[2]) != sizes or v.shape[:2] != k.shape[:2]:
            wanted = f"[tokens, {sizes[0]}, {sizes[1]}] and [tokens, {sizes[0]}, {sizes[2]}]"
            raise ValueError(f"k, v: got shapes {shape_of(k)} and {shape_of(v)}, want {wanted}")
        if q.shape[0] != tokens or q.shape[1] % heads or q.shape[2] != head_dim:
            raise ValueError(f"q: got shape {shape_of(q)}, want [{tokens}, a multiple of {heads}, {head_dim}]")
        return heads


def group_of(form: KvFormat, head_dim: int) -> int:
    """Returns how many columns of a row share a scale. For a format in blocks, returns how many tokens of a column
    share a scale.

    Returns 1 for formats that gain nothing from a transform of channels: their codes have an exponent, or each channel
    has a scale of its own.

    Examples:
        >>> from cute_kernels.formats.kv import format_of
        >>> group_of(format_of("int4_g4"), 128), group_of(format_of("bf16"), 128)
        (32, 1)
    """
    if form.in_blocks:
        return form.block_tokens  # whose number of values a scale serves
    is_uniform = form.codes in ("u4", "int8")
    return head_dim // form.num_groups if is_uniform and form.given_scale != "channel" else 1


def can_rotate(head_dim: int) -> bool:
    """Returns whether the kernels can rotate rows of ``head_dim`` columns: whether it is a power of two."""
    return not head_dim & (head_dim - 1)


def _attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns two sums over queries i, in fp32, for each key t: the sum of p_it^2 |v_t - o_i|^2 q_ie^2, [heads, tokens,
    head_dim], and the sum of p_it^2, [heads, tokens]. q: [heads, group, tokens, head_dim]. k, v: [heads, tokens,
    head_dim].
    """
    tokens = k.shape[1]
    weighted, weights = torch.zeros_like(k), k.new_zeros(k.shape[:2])
    places = torch.arange(tokens, device=k.device)
    for rows in places.split(max(1, blocks.elements(_SCORES) // (q.shape[0] * q.shape[1] * tokens))):
        some = q[:, :, rows]
        scores = torch.einsum("hgnd,htd->hgnt", some, k) * scale
        p = scores.masked_fill_(places > rows[:, None], -torch.inf).softmax(-1)
        out = torch.einsum("hgnt,htd->hgnd", p, v)
        far = v.square().sum(-1)[:, None, None] - 2 * torch.einsum("hgnd,htd->hgnt", out, v)
        far += out.square().sum(-1, keepdim=True)
        squares = p.square()
        weights += squares.sum((1, 2))
        weighted += torch.einsum("hgnt,hgnd->htd", squares * far.clamp_(min=0), some.square())
    return weighted, weights


def _balanced(importance: torch.Tensor, block: int) -> torch.Tensor:
    """Returns the factors f, fp32 [heads, columns], that minimise the sum of M_de f_d^2 / f_e^2 over all columns d and
    e of each block of ``block`` columns.

    The geometric mean of a block's factors is 1. importance: M, fp64 [heads, columns, columns].
    """
    heads, columns = importance.shape[:2]
    blocks = columns // block
    pairs = importance.reshape(heads, blocks, block, blocks, block).diagonal(dim1=1, dim2=3).movedim(-1, 1)
    floor = _LEAST_SHARE * pairs.mean((-2, -1), keepdim=True)
    pairs = pairs + floor.clamp(min=torch.finfo(torch.float64).tiny)
    logs = pairs.new_zeros(heads, blocks, block)
    for _ in range(_STEPS):
        terms = pairs * torch.exp(2 * (logs[..., :, None] - logs[..., None, :]))
        logs = logs + _DAMPING * (terms.sum(-2).log() - terms.sum(-1).log())
        logs = logs - logs.mean(-1, keepdim=True)
    return _factor(logs.reshape(heads, columns))


def _levelled(noise: torch.Tensor) -> torch.Tensor:
    """Returns noise ** -1/4, scaled so that each head's geometric mean is 1: fp32 [heads, columns]."""
    floor = (_LEAST_SHARE * noise.mean(-1, keepdim=True)).clamp(min=torch.finfo(torch.float64).tiny)
    logs = -0.25 * noise.maximum(floor).log()
    return _factor(logs - logs.mean(-1, keepdim=True))


def _factor(logs: torch.Tensor) -> torch.Tensor:
    return torch.exp(logs).clamp(1 / GREATEST_FACTOR, GREATEST_FACTOR).float()


def _signed(
    factor: torch.Tensor | None, width: int, like: torch.Tensor, columns: int, generator: torch.Generator
) -> torch.Tensor | None:
    """Multiplies a factor by random signs if a rotation follows (``width`` > 1): fp32 [heads, columns]. If ``factor``
    is None, returns the signs. If no rotation follows, returns ``factor``.
    """
    if width == 1:
        return factor
    signs = (torch.randint(0, 2, (len(like), columns), generator=generator) * 2 - 1).float().to(like.device)
    return signs if factor is None else factor * signs
