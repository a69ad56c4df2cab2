"""Operators on a table of addresses: errors in place of crashes, outputs that are overwritten, and the journal."""

from dataclasses import dataclass
from functools import partial

import pytest
import torch
from cases import PASSES, build, members_of, passes_over
from sim import OPS as SIM
from test_step import BY_NAME, cohorts_of, scalars_for
from torch import Tensor

from sassha_fast._passes import layout as tables
from sassha_fast._passes.layout import StepScalars
from sassha_fast.formats import Format

pytestmark = [pytest.mark.usefixtures("native_ops"), pytest.mark.cpu]
LIBRARIES = {"cpu": torch.ops.sassha_fast, "sim": SIM}
N_GROUPS, COHORTS, ROWS = 2, 1, 3
SCALARS = [StepScalars(0.9, 0.9, 0.1, 0.99, 0.01, 0.5, 0.4, 0.5, 1.2, 1e-4, 0.1, 0.5)]
WITH_KERNELS = [name for name in ("native", "cuda_sim", "triton") if name in PASSES]


def filled(*shape):
    """An output before the operator wrote it."""
    return torch.full(shape, torch.nan, dtype=torch.float64)


@dataclass
class Call:
    """Valid arguments of an operator, and the tensors that its table points to."""

    library: str
    name: str
    args: dict
    kept: list

    def __call__(self, **other):
        getattr(LIBRARIES[self.library], f"table_{self.name}")(**{**self.args, **other})


def call(library, name):
    """Two groups, of which the first has two rows; the second row is empty."""
    kept = [[torch.rand(n) for n in (5, 0, 130)] for _ in range(tables.FIRST + 1)]
    table = torch.zeros(ROWS, tables.ROW_WORDS, dtype=torch.int64)
    for column, tensors in enumerate(kept):
        assert LIBRARIES[library].table_bind(table, column, tensors) == (0, 0)
    table[:, tables.GROUP] = torch.tensor([0, 0, 1])
    ascent = {"scales": torch.rand(N_GROUPS), "adaptive": True, "seed": 1, "draw": torch.tensor([2])}
    journal = {"journal": torch.zeros(tables.JOURNAL_WORDS, dtype=torch.int64)}
    tallies, squares = filled(ROWS, tables.TALLY_WORDS), filled(N_GROUPS)
    args = {
        "square_sums": {"sums": filled(N_GROUPS), "column": tables.GRAD, "adaptive": True},
        "perturb": {**ascent, **journal},
        "restore": journal,
        "step": {
            **{
                "scalars": torch.tensor(SCALARS, dtype=torch.float64),
                "seed": 1,
                "draw": 2,
                "sample": 0,
                "zero_is_seen": False,
            },
            **{"noise_draw": torch.tensor([3]), "adaptive": False, "tallies": tallies, "squares": squares, **journal},
        },
        "momentum_ascent": ascent,
        "gap_sums": {"sums": filled(tables.GAP_WORDS)},
        "decompose": {"scales": torch.rand(N_GROUPS, 2)},
        "unseen_sums": {"tallies": filled(ROWS, tables.TALLY_WORDS), "sums": filled(ROWS, tables.UNSEEN_WORDS)},
        "fill_unseen": {"sums": filled(ROWS, tables.UNSEEN_WORDS)},
        "rademacher": {"seed": 1, "draw": 2},
        "probe": {"h": torch.tensor(0.1, dtype=torch.float64), "seed": 1, "draw": 2},
    }[name]
    if library != "cpu":
        chunks, counts = LIBRARIES[library].table_chunks(table)
        args = {**args, "chunks": chunks, "counts": counts.tolist()}
    return Call(library, name, {"table": table, **args}, kept)


NAMES = ("square_sums", "perturb", "restore", "step", "momentum_ascent", "gap_sums", "decompose")
NAMES += ("unseen_sums", "fill_unseen", "rademacher", "probe")
BOTH = [(library, name) for library in LIBRARIES for name in NAMES]
# Sizes that may be any number: of rows, groups or cohorts.
FREE = {("square_sums", "sums"), ("perturb", "scales"), ("momentum_ascent", "scales"), ("step", "squares")}


def mistakes(made, argument):
    """What may be wrong with a tensor, and the tensor with it."""
    value = made.args[argument]
    yield "dtype", value.to(torch.float16 if value.is_floating_point() else torch.int16)
    yield "dimensions", value[None]
    if value.dim() and (made.name, argument) not in FREE:
        yield "width", torch.cat((value, value), dim=-1)
    if value.numel() > 1:
        yield "strides", torch.stack((value, value), dim=-1)[..., 0]


def test_operators_take_these_arguments():
    for library, name in BOTH:
        call(library, name)()


@pytest.mark.parametrize(("library", "name"), BOTH)
def test_a_wrong_tensor_is_named_with_what_it_is_and_what_was_expected(library, name):
    made = call(library, name)
    for argument in [key for key, value in made.args.items() if isinstance(value, Tensor)]:
        for what, wrong in mistakes(made, argument):
            with pytest.raises(RuntimeError) as error:
                made(**{argument: wrong})
            kind = "non-contiguous" if what == "strides" else "contiguous"
            assert f"sassha_table_{name}: {argument} is a {kind} " in str(error.value)
            shape = ", ".join(map(str, wrong.shape))
            assert f" tensor of shape ({shape}) on the CPU, expected a contiguous " in str(error.value)
    if "journal" in made.args:
        assert not made.args["journal"].any()


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("column", [-1, tables.EXP_AVG, tables.HESSIAN, tables.NUMEL, tables.ROW_WORDS])
def test_squares_are_of_a_column_with_addresses_of_tensors_like_the_parameters(library, column):
    with pytest.raises(RuntimeError, match=f"sassha_table_square_sums: column is {column}, expected one that holds"):
        call(library, "square_sums")(column=column)


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("sample", [-1, 3])
def test_an_unknown_sample_is_refused(library, sample):
    with pytest.raises(RuntimeError, match=f"sassha_table_step: sample is {sample}, expected 0"):
        call(library, "step")(sample=sample)


READ = {
    "square_sums": (tables.GRAD, tables.PARAM),
    "perturb": (tables.PARAM, tables.GRAD, tables.BACKUP),
    "restore": (tables.PARAM, tables.BACKUP),
    "step": (tables.GRAD, tables.BACKUP, tables.EXP_AVG, tables.HESSIAN),
    "momentum_ascent": (tables.PARAM, tables.BACKUP, tables.EXP_AVG),
    "gap_sums": (tables.GRAD, tables.FIRST),
    "decompose": (tables.GRAD, tables.FIRST),
    "unseen_sums": (tables.GRAD, tables.HESSIAN),
    "fill_unseen": (tables.GRAD, tables.HESSIAN),
    "rademacher": (tables.PARAM,),
    "probe": (tables.PARAM,),
}


@pytest.mark.parametrize(("library", "name"), BOTH)
def test_a_row_without_an_address_that_the_pass_needs_is_named(library, name):
    for column in READ[name]:
        made = call(library, name)
        made.args["table"][2, column] = 0
        expected = f"sassha_table_{name}: row 2 of table has no address in column {column}, expected that of 130 elem"
        with pytest.raises(RuntimeError, match=expected):
            made()


SCALES = {tables.EXP_AVG: tables.EXP_AVG_SCALE, tables.HESSIAN: tables.HESSIAN_SCALE}
STORED = {name: [SCALES[column] for column in columns if column in SCALES] for name, columns in READ.items()}
STORED = {**STORED, "perturb": []}
for name in ("perturb", "step", "momentum_ascent"):
    STORED[name] = [*STORED[name], tables.CORRECTION]


@pytest.mark.parametrize(("library", "name"), BOTH)
def test_a_row_without_an_address_that_its_format_needs_is_named(library, name):
    made = call(library, name)
    table = made.args["table"]
    table[:, tables.DTYPE], table[:, tables.FORMAT] = 2, Format(8, 8).code  # bfloat16
    for column in STORED[name]:
        table[:, [tables.CORRECTION, tables.EXP_AVG_SCALE, tables.HESSIAN_SCALE]] = made.kept[0][2].data_ptr()
        table[2, column] = 0
        expected = f"sassha_table_{name}: row 2 of table has no address in column {column}, expected that of 130 elem"
        with pytest.raises(RuntimeError, match=expected):
            made()


@pytest.mark.parametrize("dtype", range(4))
@pytest.mark.parametrize("library", LIBRARIES)
def test_a_format_that_a_dtype_has_not_is_refused(library, dtype):
    """All that formats.py gives to a dtype are taken: the pass itself would stop at no address."""
    known = {Format(s, c).code for s in (32, 16, 8) for c in (0, 8, 16)}
    known |= {Format(8, c, signed=True).code for c in (0, 8, 16)}
    taken = {0} if dtype == 1 else {code for code in known if dtype >= 2 or not code & 12}
    for code in range(-1, 64):
        made = call(library, "restore")
        table = made.args["table"]
        table[:, tables.DTYPE], table[:, tables.FORMAT] = dtype, code
        table[:, tables.NUMEL] = 0
        if code in taken:
            made(**({} if library == "cpu" else {"counts": [0, 0, 0, 0, code], "chunks": made.args["chunks"][-3:]}))
        else:
            expected = f"row 0 of table has dtype {dtype} and format {code}, expected one that this dtype has and all"
            with pytest.raises(RuntimeError, match=expected):
                made()


@pytest.mark.parametrize("library", LIBRARIES)
def test_rows_of_one_table_have_one_format(library):
    made = call(library, "restore")
    made.args["table"][1, tables.FORMAT] = Format(8).code
    with pytest.raises(RuntimeError, match="row 1 of table has dtype 0 and format 2, expected one that this dtype has"):
        made()


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_row_without_a_product_has_nothing_to_fill(library):
    made = call(library, "fill_unseen")
    made.args["sums"].fill_(1.0)
    made.args["table"][2, tables.PRODUCT] = 0
    with pytest.raises(RuntimeError, match="sassha_table_fill_unseen: row 2 of table has no address in column 5, but"):
        made()
    made.args["sums"].zero_()
    made()


@pytest.mark.parametrize(("library", "name"), BOTH)
def test_a_row_that_no_parameter_was_bound_to_is_named(library, name):
    made = call(library, name)
    made.args["table"][1, tables.DTYPE] = 4
    with pytest.raises(RuntimeError, match=f"sassha_table_{name}: row 1 of table has numel 0 and dtype 4, expected"):
        made()


@pytest.mark.parametrize("bad", [-1, N_GROUPS])
@pytest.mark.parametrize(
    ("name", "argument"),
    [
        ("square_sums", "sums"),
        ("step", "squares"),
        *((n, "scales") for n in ("perturb", "momentum_ascent", "decompose")),
    ],
)
@pytest.mark.parametrize("library", LIBRARIES)
def test_a_group_without_an_entry_is_named(library, name, argument, bad):
    made = call(library, name)
    made.args["table"][2, tables.GROUP] = bad
    expected = (
        f"sassha_table_{name}: row 2 of table belongs to entry {bad} of {argument}, expected one below {N_GROUPS}"
    )
    with pytest.raises(RuntimeError, match=expected):
        made()


@pytest.mark.parametrize("bad", [-1, COHORTS])
@pytest.mark.parametrize("library", LIBRARIES)
def test_a_cohort_without_scalars_is_named(library, bad):
    made = call(library, "step")
    made.args["table"][0, tables.COHORT] = bad
    with pytest.raises(RuntimeError, match=f"row 0 of table belongs to entry {bad} of scalars, expected one below 1"):
        made()


@pytest.mark.parametrize("name", NAMES)
def test_a_table_on_a_device_comes_with_its_chunks(name):
    made = call("sim", name)
    with pytest.raises(
        RuntimeError, match=f"sassha_table_{name}: counts has 5 entries and chunks is None; a table on a"
    ):
        made(chunks=None)
    with pytest.raises(RuntimeError, match="counts has 2 entries and chunks is given"):
        made(counts=[2, 0])
    with pytest.raises(RuntimeError, match=r"counts\[1\] is -1, expected 0 or more"):
        made(counts=[3, -1, 0, 0, 0])
    with pytest.raises(RuntimeError, match=r"chunks is .* of shape \(5, 2\) .*, expected .* of shape \(4, 2\)"):
        made(counts=[1, 0, 0, 0, 0])


@pytest.mark.parametrize("library", LIBRARIES)
def test_columns_without_addresses_are_not_bound(library):
    bind = LIBRARIES[library].table_bind
    table = torch.zeros(1, tables.ROW_WORDS, dtype=torch.int64)
    for column in (-1, tables.NUMEL):
        with pytest.raises(RuntimeError, match=f"sassha_table_bind: column is {column}, expected one that holds"):
            bind(table, column, [torch.rand(2)])
    with pytest.raises(RuntimeError, match=r"sassha_table_bind: table is .*, expected .* of shape \(2, 18\)"):
        bind(table, tables.PARAM, [torch.rand(2), torch.rand(2)])
    for wrong in (table[0], table.int(), table[:, :3]):
        with pytest.raises(RuntimeError, match=r"sassha_table_chunks: table is .*, expected .* of shape \(rows, 18\)"):
            LIBRARIES[library].table_chunks(wrong)


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_column_holds_the_tensors_that_were_bound_as_long_as_they_are_the_same(library):
    bind, holds = LIBRARIES[library].table_bind, LIBRARIES[library].table_holds
    table = torch.zeros(2, tables.ROW_WORDS, dtype=torch.int64)
    here = [torch.rand(6, 4), torch.rand(3)]
    bind(table, tables.PARAM, here)
    assert holds(table, tables.PARAM, here)
    assert holds(table, tables.PARAM, [here[0].detach(), here[1].detach()])  # the same memory
    changed = {
        "address": torch.rand(6, 4),
        "size": here[0][:3],
        "order": here[0].view(4, 6).t(),
        "dtype": here[0].view(torch.int32),
        "sign": torch._neg_view(here[0]),
    }
    for what, tensor in changed.items():
        assert not holds(table, tables.PARAM, [tensor, here[1]]), what
    with pytest.raises(RuntimeError, match=r"sassha_table_holds: table is .*, expected .* of shape \(1, 18\)"):
        holds(table, tables.PARAM, here[:1])
    with pytest.raises(RuntimeError, match=f"sassha_table_holds: column is {tables.NUMEL}, expected one that holds"):
        holds(table, tables.NUMEL, here)


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_tensor_with_the_negative_bit_fits_no_row(library):
    table = torch.zeros(2, tables.ROW_WORDS, dtype=torch.int64)
    weights = [torch.rand(5), torch.rand(3)]
    LIBRARIES[library].table_bind(table, tables.PARAM, weights)
    grads = [torch.rand(5), torch._neg_view(torch.rand(3))]
    misfits, shared = LIBRARIES[library].table_bind(table, tables.GRAD, grads)
    assert (misfits > 0, shared) == (True, 0)
    assert not table[:, tables.GRAD].any()  # and no address of a copy that is gone by now


# ---- outputs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize(("name", "outputs"), [("square_sums", ["sums"]), ("gap_sums", ["sums"])])
def test_sums_are_overwritten(library, name, outputs):
    made = call(library, name)
    results = []
    for start in (torch.nan, 17.0):
        for output in outputs:
            made.args[output].fill_(start)
        made()
        results.append([made.args[output].clone() for output in outputs])
    assert all(map(torch.equal, *results))
    assert all(t.isfinite().all() and t.ne(0).all() for t in results[0])


@pytest.mark.parametrize("library", LIBRARIES)
def test_tallies_and_squares_are_overwritten_where_no_row_adds_to_them_too(library):
    made = call(library, "step")
    made.args["table"][:, tables.PRODUCT] = 0
    made.args["table"][:, tables.GROUP] = 0
    made()
    assert made.args["tallies"].eq(0).all()
    assert made.args["squares"][0] > 0
    assert made.args["squares"][1] == 0


@pytest.mark.parametrize("library", LIBRARIES)
def test_without_tallies_a_product_in_the_table_is_left_alone(library):
    made = call(library, "step")
    before = [d.clone() for d in made.kept[tables.HESSIAN]]
    made(tallies=None)
    assert all(map(torch.equal, made.kept[tables.HESSIAN], before))
    made()
    assert not torch.equal(made.kept[tables.HESSIAN][0], before[0])


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("column", [tables.PARAM, tables.GRAD, tables.BACKUP, tables.PRODUCT, tables.FIRST])
@pytest.mark.parametrize("adaptive", [False, True])
def test_squares_are_of_the_column_that_was_asked_for(library, column, adaptive):
    made = call(library, "square_sums")
    made(column=column, adaptive=adaptive)
    values, weights = made.kept[column], made.kept[tables.PARAM]
    terms = [(w.abs() * v if adaptive else v).double().square().sum() for v, w in zip(values, weights, strict=True)]
    torch.testing.assert_close(made.args["sums"], torch.stack((terms[0] + terms[1], terms[2])), rtol=1e-12, atol=0)


# ---- the journal --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_state", [False, True])
@pytest.mark.parametrize("runner", WITH_KERNELS)
def test_the_journal_says_where_x_is_and_how_many_updates_there_were(runner, in_state):
    lists = build(BY_NAME["chunks"], torch.float32)
    n, draw = len(lists.weights), torch.tensor([1])
    passes = passes_over(runner, members_of(lists.weights))
    passes.bind_state(lists.exp_avgs, lists.hessians, [w.clone() for w in lists.weights] if in_state else None)
    update = partial(passes.step, scalars_for(0.5, "ordinary"), cohorts_of(n), None, 1, 2)
    found = [passes.journal.tolist()]
    passes.bind_grads(lists.grads)
    if in_state:
        update()
        found.append(passes.journal.tolist())
        passes.momentum_ascent(torch.ones(3), adaptive=False, seed=1, draw=draw)
        passes.show_x()
        assert [*found, passes.journal.tolist()] == [[0, 0], [0, 1], [0, 1]]
        return
    ascend = partial(passes.perturb, torch.ones(3), adaptive=False, take_grads=False, seed=1, draw=draw)
    for undo in (passes.restore, partial(update, restore=True)):
        passes.bind_grads(lists.grads)
        ascend()
        found.append(passes.journal.tolist())
        passes.bind_grads(lists.grads)
        undo()
        found.append(passes.journal.tolist())
    assert found == [[0, 0], [1, 0], [0, 0], [1, 0], [0, 1]]


@pytest.mark.parametrize("library", LIBRARIES)
def test_an_update_in_state_leaves_alone_what_the_journal_says_of_x(library):
    made = call(library, "step")
    made.args["journal"].copy_(torch.tensor([1, 7]))
    made()
    assert made.args["journal"].tolist() == [1, 8]
    made(squares=None)
    assert made.args["journal"].tolist() == [0, 9]
