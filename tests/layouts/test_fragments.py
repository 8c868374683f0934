"""Fragments against CuTe DSL, against the PTX ISA's formulas, and what weight preprocessing needs of them."""

import numpy as np
import pytest
from tensor_layouts import atoms_nv as atoms

from layouts import algebra
from layouts.algebra import Layout
from layouts.bitlinear import BitMap
from layouts.fragments import FRAGMENTS, QUAD_PAIR_LANES, ldmatrix, wgmma_a, wgmma_accumulator
from layouts.proofs import ProofError
from layouts.weights import fastertransformer, operand
from tests.layouts.dsl_oracle import traced

WARP_SHAPES = {"m16n8k16": (16, 8, 16), "m16n8k8": (16, 8, 8)}
WGMMA_N = (8, 64, 96, 256)


@pytest.fixture(scope="module")
def dsl_layouts():
    """name -> layout of the DSL's own atoms, in CuTe notation."""

    def body():
        import cutlass
        from cutlass import cute
        from cutlass.cute.nvgpu import OperandMajorMode, warp, warpgroup

        found = {}

        def add_mma(shape, op):
            tiled = cute.make_tiled_mma(op)
            for operand_name in "abc":
                found[f"{operand_name}_{shape}"] = str(getattr(tiled, f"tv_layout_{operand_name.upper()}"))

        for shape, mnk in WARP_SHAPES.items():
            add_mma(f"mma_{shape}", warp.MmaF16BF16Op(cutlass.Float16, cutlass.Float32, mnk))
        e4m3 = cutlass.Float8E4M3FN
        source = (warpgroup.OperandSource.RMEM, OperandMajorMode.K, OperandMajorMode.K)
        for n in WGMMA_N:
            add_mma(f"wgmma16_{n}", warpgroup.MmaF16BF16Op(cutlass.Float16, cutlass.Float32, (64, n, 16), *source))
            add_mma(f"wgmma8_{n}", warpgroup.MmaF8Op(e4m3, e4m3, cutlass.Float32, (64, n, 32), *source))
        for count in (1, 2, 4):
            for trans in (False, True):
                load = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(trans, count), cutlass.Float16)
                store = cute.make_copy_atom(warp.StMatrix8x8x16bOp(trans, count), cutlass.Float16)
                found[f"ldmatrix_{count}_{trans}"] = str(load.layout_dst_tv)
                found[f"stmatrix_{count}_{trans}"] = str(store.layout_src_tv)
        return found

    return {name: algebra.parse(text) for name, text in traced(body).items()}


@pytest.mark.parametrize("shape", WARP_SHAPES)
@pytest.mark.parametrize("operand_name", "abc")
def test_warp_mma_fragments_are_the_dsls(dsl_layouts, shape, operand_name):
    ours = FRAGMENTS[f"mma_{operand_name}_{shape}"].layout
    assert algebra.equal(ours, dsl_layouts[f"{operand_name}_mma_{shape}"])


@pytest.mark.parametrize("n", WGMMA_N)
def test_wgmma_fragments_are_the_dsls(dsl_layouts, n):
    for bits in (16, 8):
        assert algebra.equal(wgmma_a(bits).layout, dsl_layouts[f"a_wgmma{bits}_{n}"])
        assert algebra.equal(wgmma_accumulator(n).layout, dsl_layouts[f"c_wgmma{bits}_{n}"])


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("trans", [False, True])
def test_ldmatrix_and_stmatrix_are_the_dsls(dsl_layouts, count, trans):
    ours = ldmatrix(count, trans).layout
    assert algebra.equal(ours, dsl_layouts[f"ldmatrix_{count}_{trans}"])
    assert algebra.equal(ours, dsl_layouts[f"stmatrix_{count}_{trans}"])


def test_8_bit_mma_fragments_are_cutlass():
    atom = atoms.SM80_16x8x32_S32S8S8S32_TN
    for name, layout in (("a", atom.a_layout), ("b", atom.b_layout), ("c", atom.c_layout)):
        assert algebra.equal(FRAGMENTS[f"mma_{name}_m16n8k32"].layout, layout)


def test_volta_fragments_are_cutlass():
    row_col, col_row = atoms.SM70_8x8x4_F32F16F16F32_TN, atoms.SM70_8x8x4_F32F16F16F32_NT
    pairs = {
        "volta_a_row": row_col.a_layout,
        "volta_b_col": row_col.b_layout,
        "volta_a_col": col_row.a_layout,
        "volta_b_row": col_row.b_layout,
        "volta_c_f32": row_col.c_layout,
        "volta_c_f16": atoms.SM70_8x8x4_F16F16F16F16_TN.c_layout,
    }
    for name, layout in pairs.items():
        assert algebra.equal(FRAGMENTS[f"{name}_m8n8k4"].layout, layout), name
    assert algebra.offsets(QUAD_PAIR_LANES).tolist() == [0, 1, 2, 3, 16, 17, 18, 19]


def test_wmma_fragments_are_what_the_published_kernel_indexes():
    """P: head t / 4, tokens 2 (t % 4) + {0, 1} and 8 further; QK: heads 2 (t % 4) + {0, 1}, tokens t / 4 + 8 j."""
    p, qk = FRAGMENTS["wmma_a_m8n32k16"].coordinates(), FRAGMENTS["wmma_c_m8n32k16"].coordinates()
    for t in range(32):
        assert p[t].tolist() == [[t // 4, t % 4 * 2 + i % 2 + 8 * (i // 2)] for i in range(4)]
        assert qk[t].tolist() == [[t % 4 * 2 + i % 2, t // 4 + 8 * (i // 2)] for i in range(8)]


def ptx_coordinate(name, lane, i):
    """Row and column of value i of a lane, as the PTX ISA writes them for mma.m16n8k*; first axis first."""
    group, thread = lane // 4, lane % 4
    if name.startswith("mma_c"):
        return group + 8 * (i >= 2), thread * 2 + i % 2
    operand_name, shape = name.split("_")[1:]
    per_register = 4 if shape == "m16n8k32" else 2
    half = 16 if shape == "m16n8k32" else 8
    register, inside = i // per_register, i % per_register
    k = thread * per_register + inside
    if operand_name == "a":
        return group + 8 * (register % 2), k + half * (register // 2)
    return group, k + half * register


@pytest.mark.parametrize("name", [name for name in FRAGMENTS if name.startswith("mma_")])
def test_warp_fragments_are_the_ptx_formulas(name):
    fragment = FRAGMENTS[name]
    wanted = [[ptx_coordinate(name, lane, i) for i in range(fragment.num_values)] for lane in range(32)]
    assert fragment.coordinates().tolist() == [[list(c) for c in row] for row in wanted]


@pytest.mark.parametrize("fragment", FRAGMENTS.values(), ids=lambda f: f.name)
def test_every_fragment_covers_its_tile_once(fragment):
    assert fragment.verify()
    owners = fragment.owners()
    assert (owners >= 0).all()
    for thread in (0, fragment.num_threads - 1):
        for value in (0, fragment.num_values - 1):
            i, j = fragment.coordinates()[thread, value]
            assert owners[i, j].tolist() == [thread, value]


def test_a_fragment_with_a_hole_is_refused():
    from dataclasses import replace

    broken = replace(FRAGMENTS["mma_b_m16n8k16"], layout=Layout(((4, 8), (2, 2)), ((16, 1), (8, 0))))
    with pytest.raises(ProofError, match="each element once"):
        broken.verify()


def test_the_accumulator_of_s_is_the_a_operand_of_the_next_product():
    """Two m16n8 accumulators side by side are one m16n8k16 A fragment: no shuffle between softmax and P V."""
    c, a = FRAGMENTS["mma_c_m16n8k16"], FRAGMENTS["mma_a_m16n8k16"]
    side_by_side = BitMap((*c.bit_map().columns, 128), 8)
    assert side_by_side == a.bit_map()


# ----------------------------------------------------------------------------------------- what S1 is for


@pytest.mark.parametrize(("bits", "activation_bits"), [(8, 16), (4, 16), (4, 8)])
def test_permuted_rows_reach_their_fragments_through_ldmatrix(bits, activation_bits):
    assert operand.prove_row_permutation(bits, activation_bits).method == "matrix"


@pytest.mark.parametrize("bits", [4, 8])
def test_without_the_permutation_they_do_not(bits):
    order = fastertransformer.row_order(bits)
    unpermuted = Layout(algebra.size(order), 1)
    fragment = FRAGMENTS["mma_b_m16n8k16"]
    assert operand.delivered(bits, unpermuted) != operand.wanted(fragment, algebra.size(order))


def test_sixteen_bit_weights_need_no_permutation():
    """The reason in one line: at 16 bits ldmatrix already deals out fragments of m16n8k8."""
    assert ldmatrix(1).bit_map().columns == (2, 4, 8, 16, 32, 1)
    n_first = BitMap.permutation([3, 4, 5, 0, 1, 2])
    assert n_first @ ldmatrix(1).bit_map() == FRAGMENTS["mma_b_m16n8k8"].bit_map()


@pytest.mark.parametrize(("bits", "activation_bits"), [(8, 16), (4, 16), (4, 8)])
def test_simulated_ldmatrix_delivers_fragments(bits, activation_bits):
    """The same claim with numbers instead of matrices: run the load on labelled elements."""
    order = algebra.offsets(fastertransformer.row_order(bits, activation_bits))
    per_thread = 32 // bits
    fragment = FRAGMENTS["mma_b_m16n8k16" if activation_bits == 16 else "mma_b_m16n8k32"]
    got = []
    for lane in range(32):
        n, first = lane // 4, lane % 4 * per_thread
        got.append([(n, int(order[first + v])) for v in range(per_thread)])
    steps = len(order) // fragment.tile[1]
    coordinates = fragment.coordinates()
    wanted = [
        [(int(n), int(k) + step * fragment.tile[1]) for step in range(steps) for n, k in coordinates[lane]]
        for lane in range(32)
    ]
    assert got == wanted


def test_volta_needs_no_permutation():
    assert operand.prove_volta_needs_none().method == "symbolic"
    coordinates = FRAGMENTS["volta_b_row_m8n8k4"].coordinates()
    row_major = coordinates[..., 0] + 8 * coordinates[..., 1]
    assert (np.diff(row_major, axis=1) == 1).all() and (row_major[:, 0] % 4 == 0).all()


@pytest.mark.parametrize(
    "call", [lambda: wgmma_a(4), lambda: wgmma_accumulator(12), lambda: wgmma_accumulator(264), lambda: ldmatrix(3)]
)
def test_bad_input_is_named(call):
    with pytest.raises(ValueError, match="want"):
        call()
