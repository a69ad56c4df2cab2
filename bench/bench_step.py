"""The update: its kernels against their floors, and whole optimizers without a model on three kinds of shapes."""

import pytest
from contenders import CONTENDERS, OURS, build
from floors import floor_name, floors
from kernels import Kernels
from measure import interleave, ratio, stopwatch, together
from races import COPY, EAGER, ROOFLINE, Race
from settings import slug
from shapes import MODELS, count

FUSED = "adamw fused"
# Rounds, and the targets: at least this many times the eager loop's speed, at most this share of fused AdamW's time.
OPTIMIZERS = {"gpt": (10, 6.0, 2.3), "resnet20": (50, 10.0, 1.2), "small": (10, 20.0, 0.6)}
KERNELS = ("step", "refresh_step", "ordinary")
ORDINARY = ("norm", "perturb", "step")
FLOORS = (*ORDINARY, "refresh_step")
KERNEL_ROUNDS = 25


@pytest.fixture(scope="module")
def kernels(settings):
    shapes = settings.shapes("gpt")
    passes = Kernels(shapes)
    contenders = {name: stopwatch(getattr(passes, name)) for name in KERNELS}
    contenders[FUSED] = CONTENDERS[FUSED].build(shapes)
    found = interleave({**contenders, **floors(shapes, *FLOORS)}, settings.rounds(KERNEL_ROUNDS))
    parts = [found[floor_name(part)] for part in ORDINARY if floor_name(part) in found]
    if parts:
        found[floor_name("ordinary")] = together("ordinary", [1.0] * len(parts), parts)
    return shapes, found


@pytest.mark.parametrize("contender", [OURS, ROOFLINE], ids=slug)
@pytest.mark.parametrize("name", KERNELS[:2])
def test_kernel(name, contender, kernels, record, say):
    shapes, found = kernels
    ours = contender == OURS
    more, note = {"calls": "step op"}, "  (target 0.87)" if ours else ""
    if ours and name == "refresh_step":
        beside = ratio(found[name], found["step"])
        more |= {"ratio_to_step": beside.median}
        note += f"; {beside} the ordinary step kernel's time (target 1.5)"
    Race(name, "gpt", shapes, {OURS: found[name], **found}).tell(contender, record, say, note, **more)


def test_copy(kernels, record, say):
    shapes, found = kernels
    Race("step", "gpt", shapes, found).tell(COPY, record, say)


def test_ordinary_kernels_against_fused_adamw(kernels, record, say):
    shapes, found = kernels
    against = ratio(found["ordinary"], found[FUSED])
    note = f"; norm, perturb, step with restore fused in: {against} fused AdamW's time (target 1.9)"
    race = Race("ordinary", "gpt", shapes, {OURS: found["ordinary"], **found})
    race.tell(OURS, record, say, note, ratio_to_fused_adamw=against.median, target=1.9)


@pytest.fixture(scope="module", params=MODELS)
def optimizers(request, settings):
    rounds, faster, share = OPTIMIZERS[request.param]
    shapes = settings.shapes(request.param)
    return request.param, shapes, interleave(build(shapes), settings.rounds(rounds)), faster, share


@pytest.mark.parametrize("contender", CONTENDERS, ids=slug)
def test_optimizer(contender, optimizers, record, say):
    model, shapes, found, faster, share = optimizers
    if contender not in found:
        pytest.skip(f"{contender} takes too long on {model}")
    mine = found[contender]
    over_adamw, under_eager = ratio(mine, found[FUSED]), ratio(found[EAGER], mine)
    per_tensor = mine.median / len(shapes) * 1e6
    record(
        mine,
        contender,
        main=("ratio_to_fused_adamw", over_adamw),
        model=model,
        calls=CONTENDERS[contender].calls,
        parameters=count(shapes),
        tensors=len(shapes),
        us_per_tensor=per_tensor,
        speedup_over_eager=under_eager.median,
        **({"target": share} if contender == OURS else {}),
    )
    targets = f"  (targets {faster:g} and {share:g})" if contender == OURS else ""
    say(
        f"{model:<8} {CONTENDERS[contender].calls:<12} {contender:<16} {mine.median * 1e3:8.3f} ms "
        f"{per_tensor:8.2f} µs/tensor  {under_eager} the eager loop's speed  {over_adamw} fused AdamW's time{targets}"
    )
