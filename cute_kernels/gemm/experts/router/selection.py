"""How a warp chooses a token's experts. Lane l holds experts l, l + 32, l + 64 ... in registers.

Experts are ranked by keys. A key is an integer that stands for an fp32 number, since redux.sync finds the largest
integer of a warp but does not take fp32. Keys have the order of the numbers, and NaN has the largest key. Among experts
with equal keys, the one with the lowest index wins. Each round finds one expert, and lane j keeps the j-th expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from cute_kernels.device import lanes, numbers, ptx
from cute_kernels.device.cuda import WARP_THREADS
from cute_kernels.gemm.experts.router.routing import LEAST_SUM, SCORINGS

NONE = -(2**31)  # below the key of any number
NAN_KEY = 0x7FFFFFFF
LEAST_KEY = 0x807FFFFF - 2**32  # the key of -inf
NOWHERE = 1 << 20  # above all indices
GROUP_SHIFT = 20  # bits of the reciprocal of a group's size: exact for experts below 1024
ALL_LANES = lanes.neighbours(WARP_THREADS)


@dataclass(frozen=True)
class Choice:
    """The fields of a `Routing` that a launch takes, as run-time values; see :mod:`.arguments`."""

    bias: Int64
    correction: Int64
    padding: Int64
    ids: Int64
    weights: Int64
    top_k: Int32
    scoring: Int32
    ranks_logits: Int32
    renormalize: Int32
    groups: Int32
    kept_groups: Int32
    bias_wide: Int32
    correction_wide: Int32
    scale: Float32
    experts: Int32
    group_reciprocal: Int32

    @staticmethod
    def of(given, experts) -> Choice:
        """Makes the choice from a launch's arguments."""
        names = (name for name in Choice.__dataclass_fields__ if name not in ("experts", "group_reciprocal"))
        size = experts // given.groups
        reciprocal = ((Int32(1) << GROUP_SHIFT) + size - 1) // size
        return Choice(**{name: getattr(given, name) for name in names}, experts=experts, group_reciprocal=reciprocal)


def key_of(x: Float32) -> Int32:
    """Returns the key of a number; -0 and 0 have the same key."""
    word = numbers.bits(x)
    word = cutlass.select_(word == Uint32(0x80000000), Uint32(0), word)
    is_nan = (word & Uint32(0x7FFFFFFF)) > Uint32(0x7F800000)
    signed = Int32(word)
    return cutlass.select_(is_nan, Int32(NAN_KEY), signed ^ ((signed >> 31) & Int32(0x7FFFFFFF)))


def number_of(key: Int32) -> Float32:
    """Returns the number that a key stands for."""
    return numbers.from_bits(Uint32(key ^ ((key >> 31) & Int32(0x7FFFFFFF))))


class Selection:
    """Chooses a token's experts, in a warp whose lanes each have ``lane_experts`` of the token's logits."""

    def __init__(self, lane_experts: int, dtype: str):
        self.count, self.dtype = lane_experts, dtype

    def expert(self, i: int, lane: Int32) -> Int32:
        """Returns the index of a lane's i-th expert."""
        return lane + i * WARP_THREADS

    @cute.jit
    def load_number(self, address, index, wide):
        """Loads an element of a bias or correction. The load may run before the previous launch ends, since no launch
        writes biases and corrections.
        """
        value = Float32(0.0)
        if wide != 0:
            value = numbers.from_bits(numbers.load_global_part(address + Int64(index) * 4, 0, 4))
        else:
            word = numbers.load_global_part(address + Int64(index) * 2, 0, 2)
            if const_expr(self.dtype == "bf16"):
                value = ptx.bf16x2_low_to_float(word)
            else:
                value = ptx.half2_low_to_float(word)
        return value

    @cute.jit
    def choose(self, choice, logits, token, lane):
        """Chooses a token's experts, and stores their ids and weights. logits: the logits of the lane's experts, any
        value for experts that do not exist. A padding token's ids are -1."""
        is_padding = Uint32(0)
        if choice.padding != 0:
            is_padding = numbers.load_global_part(choice.padding + Int64(token), 0, 1)
        scores = cute.make_rmem_tensor(self.count, Float32)
        keys = cute.make_rmem_tensor(self.count, Int32)
        self.score(choice, scores, logits, lane)
        for i in cutlass.range_constexpr(self.count):
            ranked = cutlass.select_(choice.ranks_logits != 0, logits[i], scores[i])
            if (choice.correction != 0) & (self.expert(i, lane) < choice.experts):
                ranked = ranked + self.load_number(choice.correction, self.expert(i, lane), choice.correction_wide)
            keys[i] = cutlass.select_(self.expert(i, lane) < choice.experts, key_of(ranked), Int32(NONE))
        if choice.groups > 1:
            self.keep_groups(choice, keys, lane)
        own, weight = Int32(0), Float32(0.0)
        for j in cutlass.range(choice.top_k, unroll=1):
            found, value = self.take(keys, scores, lane)
            own = cutlass.select_(lane == j, found, own)
            weight = cutlass.select_(lane == j, value, weight)
        if choice.renormalize != 0:
            counted = cutlass.select_(lane < choice.top_k, weight, Float32(0.0))
            weight = weight * ptx.reciprocal(lanes.lane_sum(counted, ALL_LANES) + Float32(LEAST_SUM))
        if lane < choice.top_k:
            place = Int64(token * choice.top_k + lane) * 4
            own = cutlass.select_(is_padding == Uint32(0), own, Int32(-1))
            ptx.store_global(choice.ids + place, [Uint32(own)])
            ptx.store_global(choice.weights + place, [weight * choice.scale])

    @cute.jit
    def score(self, choice, scores, logits, lane):
        """Computes the scores of the lane's experts into ``scores``."""
        if choice.scoring == SCORINGS.index("softmax"):
            top, total = Float32(-Float32.inf), Float32(0.0)
            for i in cutlass.range_constexpr(self.count):
                there = self.expert(i, lane) < choice.experts
                top = ptx.fmax(top, cutlass.select_(there, logits[i], Float32(-Float32.inf)))
            top = lanes.lane_max(top, ALL_LANES)
            for i in cutlass.range_constexpr(self.count):
                there = self.expert(i, lane) < choice.experts
                scores[i] = ptx.exp2((logits[i] - top) * Float32(ptx.LOG2_E))
                total = total + cutlass.select_(there, scores[i], Float32(0.0))
            inverse = ptx.reciprocal(lanes.lane_sum(total, ALL_LANES))
            for i in cutlass.range_constexpr(self.count):
                scores[i] = scores[i] * inverse
        elif choice.scoring == SCORINGS.index("sigmoid"):
            for i in cutlass.range_constexpr(self.count):
                scores[i] = ptx.reciprocal(ptx.exp2(logits[i] * Float32(-ptx.LOG2_E)) + Float32(1.0))
        else:
            for i in cutlass.range_constexpr(self.count):
                scores[i] = root_of_softplus(logits[i])

    @cute.jit
    def take(self, keys, scores, lane):
        """Removes the warp's highest-ranking expert from ``keys``. Returns its (index, score)."""
        index, _ = self.first(keys, lane)
        value = Float32(0.0)
        for i in cutlass.range_constexpr(self.count):
            is_first = self.expert(i, lane) == index
            value = cutlass.select_(is_first, scores[i], value)
            keys[i] = cutlass.select_(is_first, Int32(NONE), keys[i])
        return index, cute.arch.shuffle_sync(value, index % WARP_THREADS)

    def first(self, keys, lane) -> tuple[Any, Any]:
        """Returns (index, key) of the warp's highest-ranking expert. It has the largest key, and among equal keys the
        lowest index."""
        best, index = keys[0], self.expert(0, lane)
        for i in range(1, self.count):
            more = keys[i] > best
            best = cutlass.select_(more, keys[i], best)
            index = cutlass.select_(more, self.expert(i, lane), index)
        top = ptx.warp_max(best)
        return -ptx.warp_max(cutlass.select_(best == top, -index, Int32(-NOWHERE))), top

    @cute.jit
    def keep_groups(self, choice, keys, lane):
        """Sets the keys of experts outside the kept groups to the key of -inf. Lane g ranks group g."""
        own = Int32(NONE)
        within = cute.make_rmem_tensor(self.count, Int32)
        for group in cutlass.range(choice.groups, unroll=1):
            for i in cutlass.range_constexpr(self.count):
                inside = (self.group(choice, i, lane) == group) & (self.expert(i, lane) < choice.experts)
                within[i] = cutlass.select_(inside, keys[i], Int32(NONE))
            index, best = self.first(within, lane)
            for i in cutlass.range_constexpr(self.count):
                within[i] = cutlass.select_(self.expert(i, lane) == index, Int32(NONE), within[i])
            _, second = self.first(within, lane)
            own = cutlass.select_(lane == group, key_of(number_of(best) + number_of(second)), own)
        kept = Uint32(0)
        for _ in cutlass.range(choice.kept_groups, unroll=1):
            top = ptx.warp_max(own)
            first = -ptx.warp_max(cutlass.select_(own == top, -lane, Int32(-NOWHERE)))
            kept = kept | (Uint32(1) << Uint32(first))
            own = cutlass.select_(lane == first, Int32(NONE), own)
        for i in cutlass.range_constexpr(self.count):
            left = (kept >> Uint32(self.group(choice, i, lane))) & Uint32(1) == Uint32(0)
            there = self.expert(i, lane) < choice.experts
            keys[i] = cutlass.select_(left & there, Int32(LEAST_KEY), keys[i])

    def group(self, choice, i: int, lane: Int32) -> Int32:
        """Returns the group of a lane's i-th expert."""
        return (self.expert(i, lane) * choice.group_reciprocal) >> GROUP_SHIFT


def root_of_softplus(x: Float32) -> Float32:
    """Returns sqrt(log(1 + exp(x))).

    With u = exp(-|x|) and s = u / (2 + u), log(1 + u) is 2 atanh(s). As s is at most 1 / 3, seven terms of atanh's
    series are enough.
    """
    u = ptx.exp2(ptx.absolute(x) * Float32(-ptx.LOG2_E))
    s = u * ptx.reciprocal(u + Float32(2.0))
    square, series = s * s, Float32(1.0 / 13)
    for term in (11, 9, 7, 5, 3, 1):
        series = ptx.fma(series, square, Float32(1.0 / term))
    soft = ptx.fmax(x, Float32(0.0)) + (s + s) * series
    root = soft * numbers.reciprocal_root(soft)
    return cutlass.select_((soft == Float32(0.0)) | (soft == Float32.inf), soft, root)
