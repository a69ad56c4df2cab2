"""The training examples: data in its layouts, every optimizer, and runs that are stopped and resumed."""

import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tolerances import PATIENCE

pytest.importorskip("PIL")
pytest.importorskip("matplotlib")
pytest.importorskip("tqdm")
pytest.importorskip("scipy")
from PIL import Image

from examples import gpt, image
from examples.lib import engine, pictures, presets, text
from examples.lib.networks import PICTURES, language_model
from examples.lib.noise import with_noise
from examples.lib.optimizers import BUILDERS, build_optimizer, build_schedule
from sassha_fast.log import read_log

pytestmark = pytest.mark.product
ROOT = Path(__file__).resolve().parents[2]
CLOCKED = ("per_second", "seconds")  # columns of the log that differ from run to run


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """48 + 16 pictures of two classes: dark and bright noise."""
    folder, draw = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    for split, count in (("train", 24), ("val", 8)):
        for name, low in (("bright", 128), ("dark", 0)):
            (folder / split / name).mkdir(parents=True)
            for i in range(count):
                pixels = draw.integers(low, low + 128, (32, 32, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / split / name / f"{i:02d}.png")
    return folder


@pytest.fixture(scope="module")
def play(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "play.txt"
    path.write_text("to be, or not to be: that is the question.\n" * 60)
    return path


@pytest.fixture(autouse=True)
def one_thread():
    """Batches this small are slower on more, and thread counts are no part of what is compared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def image_args(tree, out, *more):
    given = ["--data", tree, "--out", out, "--cache", Path(out).parent / "cache", "--batch", 16, "--epochs", 2]
    return [str(value) for value in (*given, "--quiet", *more)]


def gpt_args(play, out, *more):
    given = ["--data", play, "--out", out, "--batch", 4, "--epochs", 2, "--validation-size", 2]
    return [str(value) for value in (*given, "--quiet", *more)]


def end_of(out):
    """Everything of a finished run that does not depend on the clock."""
    lines = [line.split(",") for line in (out / "log.csv").read_text().splitlines()]
    kept = [i for i, name in enumerate(lines[0]) if name not in CLOCKED]
    return [[line[i] for i in kept] for line in lines], torch.load(out / "checkpoint.pt")


def assert_same_end(a, b):
    (log_a, state_a), (log_b, state_b) = end_of(a), end_of(b)
    assert log_a == log_b
    assert len(log_a) > 2
    assert state_a["model"].keys() == state_b["model"].keys()
    assert all(torch.equal(state_a["model"][key], state_b["model"][key]) for key in state_a["model"])
    for key, state in state_a["opt"]["state"].items():
        for name, value in state.items():
            other = state_b["opt"]["state"][key][name]
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(other)), name


# ---- training ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", BUILDERS)
def test_every_optimizer_learns_a_text(optimizer, play):
    if optimizer == "shampoo":
        pytest.importorskip("pytorch_optimizer")
    read = text.load(play, None, "chars", 0)
    torch.manual_seed(0)
    model = language_model("char-gpt", len(read.vocabulary))
    known = {**presets.IMAGE["cifar10-resnet20"].settings, **presets.LANGUAGE["char-gpt"].settings}
    rate = {"sgd": 0.1, "sam": 0.1, "shampoo": 0.1}.get(optimizer, 0.003)
    opt = build_optimizer(optimizer, model.parameters(), replace(known[optimizer], lr=rate))
    data = text.batches(read, 128, 4, 0, 2)
    losses = []
    for x, y in [batch for epoch in range(3) for batch in data.train(epoch, 0)]:

        def closure(x=x, y=y):
            opt.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
            loss.backward()
            return loss

        losses.append(opt.step(closure).item())
    assert losses[-1] < losses[0] - 0.1


def test_a_run_leaves_log_checkpoint_and_plot(tree, tmp_path):
    image.main(image_args(tree, tmp_path / "run", "--optimizer", "adamw", "--schedule", "cosine"))
    rows, state = end_of(tmp_path / "run")
    assert [row[:2] for row in rows] == [["epoch", "step"], ["1", "3"], ["2", "6"]]
    assert float(rows[2][2]) == 0.0  # the end of a cosine
    assert state["progress"]["step"] == 6
    with Image.open(tmp_path / "run" / "curves.png") as plot:
        assert plot.width > 800


def test_a_folder_with_a_checkpoint_is_not_overwritten(play, tmp_path):
    gpt.main(gpt_args(play, tmp_path, "--optimizer", "sgd", "--epochs", 1))
    before = (tmp_path / "checkpoint.pt").read_bytes()
    with pytest.raises(SystemExit, match="--resume, or take another folder"):
        gpt.main(gpt_args(play, tmp_path, "--optimizer", "sgd", "--epochs", 1))
    assert (tmp_path / "checkpoint.pt").read_bytes() == before


# ---- stopping and resuming ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [("sassha",), ("m-sassha", "--amp")], ids="".join)
def test_ctrl_c_and_resume_give_the_uninterrupted_run(method, tree, tmp_path, monkeypatch):
    """Within an epoch, with BatchNorm, varied pictures and, of M-SASSHA, weights that lie apart."""
    options = ("--optimizer", *method, "--lazy-hessian", 2, "--stats")
    image.main(image_args(tree, tmp_path / "whole", *options))
    batches, handler = pictures.batches, signal.getsignal(signal.SIGINT)

    def interrupted(*args):
        for number, batch in enumerate(batches(*args)):
            if args[3] is not None and number == 1:
                signal.raise_signal(signal.SIGINT)
            yield batch

    with monkeypatch.context() as patch:
        patch.setattr(pictures, "batches", interrupted)
        with pytest.raises(SystemExit, match="stopped after step 2"):
            image.main(image_args(tree, tmp_path / "stopped", *options))
    assert signal.getsignal(signal.SIGINT) is handler
    image.main(image_args(tree, tmp_path / "stopped", *options, "--resume"))
    assert_same_end(tmp_path / "whole", tmp_path / "stopped")
    whole, stopped = (read_log(tmp_path / run / "stats.csv") for run in ("whole", "stopped"))
    assert repr(whole) == repr(stopped)  # NaN stands for what is not known
    assert whole["step"] == list(range(6))
    assert (tmp_path / "stopped" / "stats.png").exists()


def test_sigkill_and_resume_give_the_uninterrupted_run(play, tmp_path):
    options = ("--optimizer", "g-sassha", "--dropout", 0.1, "--save-every", 1, "--epochs", 4, "--threads", 1)
    killed = tmp_path / "killed"
    command = [sys.executable, "-m", "examples.gpt", *gpt_args(play, killed, *options)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    deadline = time.monotonic() + PATIENCE
    while not (killed / "checkpoint.pt").exists():
        assert process.poll() is None, process.stderr.read().decode()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    process.stderr.close()
    gpt.main(gpt_args(play, killed, *options, "--resume"))
    gpt.main(gpt_args(play, tmp_path / "whole", *options))
    assert_same_end(tmp_path / "whole", killed)


def test_half_a_line_of_a_log_is_dropped(play, tmp_path):
    options = ("--optimizer", "sgd")
    gpt.main(gpt_args(play, tmp_path / "whole", *options))
    shutil.copytree(tmp_path / "whole", tmp_path / "half")
    log = (tmp_path / "half" / "log.csv").read_text()
    last = log.splitlines()[-1]
    for cut in ("3,99,0.0", "3,99,1e-", last[:-1], last):  # the last lacks nothing but its end
        (tmp_path / "half" / "log.csv").write_text(log + cut)
        gpt.main(gpt_args(play, tmp_path / "half", *options, "--resume"))
        assert (tmp_path / "half" / "log.csv").read_text() == log


def test_a_log_is_replaced_as_a_whole_when_a_run_is_resumed(play, tmp_path, monkeypatch):
    options = ("--optimizer", "sgd")
    gpt.main(gpt_args(play, tmp_path, *options))
    log = (tmp_path / "log.csv").read_text()

    def interrupted(source, target):
        assert Path(source).read_text() == log
        raise KeyboardInterrupt

    monkeypatch.setattr(engine.os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        gpt.main(gpt_args(play, tmp_path, *options, "--resume"))
    assert (tmp_path / "log.csv").read_text() == log


def test_processes_of_torchrun_train_one_network(tree, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "examples.image", *image_args(tree, tmp_path / "run", "--optimizer", "sassha", "--epochs", 1)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, timeout=PATIENCE)
    rows, state = end_of(tmp_path / "run")
    assert len(rows) == 2
    assert state["progress"]["step"] == 3
    assert (tmp_path / "run" / "curves.png").exists()


# ---- data --------------------------------------------------------------------------------------------------------


def test_an_archive_has_the_pictures_of_its_folder(tree, tmp_path):
    archive = shutil.make_archive(str(tmp_path / "pictures"), "xztar", tree)
    of_tree, of_archive = pictures.find(tree, tmp_path), pictures.find(Path(archive), tmp_path / "cache")
    assert of_tree[2] == of_archive[2] == 2
    for one, other in zip(of_tree[:2], of_archive[:2], strict=True):
        first = pictures.decoded(one, 32, tmp_path / f"a{len(one.files)}.pt")
        second = pictures.decoded(other, 32, tmp_path / f"b{len(one.files)}.pt")
        assert torch.equal(first.pixels, second.pixels)
        assert torch.equal(first.labels, second.labels)
        assert torch.equal(pictures.decoded(one, 32, tmp_path / f"a{len(one.files)}.pt").pixels, first.pixels)


def test_cifar_is_read_as_it_is_published(tmp_path):
    draw = np.random.default_rng(1)
    wanted = draw.integers(0, 256, (6, 3072), dtype=np.uint8)
    for i in range(5):
        content = {b"data": wanted[i : i + 1], b"labels": [i]}
        (tmp_path / f"data_batch_{i + 1}").write_bytes(pickle.dumps(content))
    (tmp_path / "test_batch").write_bytes(pickle.dumps({b"data": wanted[5:], b"labels": [4]}))
    train, test, classes = pictures.find(tmp_path, tmp_path)
    assert classes == 5
    assert train.pixels.shape == (5, 3, 32, 32)
    assert test.labels.tolist() == [4]
    assert train.pixels[2, 1, 3, 4] == wanted[2, 1024 + 3 * 32 + 4]


def test_missing_data_says_where_to_get_it(tmp_path, play):
    with pytest.raises(SystemExit, match="no such file or folder") as raised:
        pictures.find(tmp_path / "nothing.tar.gz", tmp_path)
    assert "cs.toronto.edu" in str(raised.value)
    with pytest.raises(SystemExit, match="no folder train/"):
        pictures.find(tmp_path, tmp_path)
    with pytest.raises(SystemExit, match=r"--data .*no such file"):
        text.load(tmp_path / "nothing.txt", None, "chars", 0)


def test_shifted_pictures_are_crops_of_padded_ones():
    x = torch.rand(64, 3, 32, 32)
    varied = pictures.shifted(x, torch.Generator().manual_seed(0))
    padded = torch.nn.functional.pad(x, (4, 4, 4, 4))
    found = set()
    for i in range(64):
        crops = {
            (down, right, mirrored): crop.flip(-1) if mirrored else crop
            for down in range(9)
            for right in range(9)
            for mirrored in (False, True)
            for crop in [padded[i, :, down : down + 32, right : right + 32]]
        }
        equal = [key for key, crop in crops.items() if torch.equal(crop, varied[i])]
        assert len(equal) == 1
        found.add(equal[0])
    assert len({key[:2] for key in found}) > 30
    assert {key[2] for key in found} == {False, True}


def test_large_pictures_vary_by_epoch_and_seed_alone(tmp_path):
    draw = np.random.default_rng(0)
    Image.fromarray(draw.integers(0, 256, (60, 90, 3), dtype=np.uint8)).save(tmp_path / "a.png")
    split = pictures.Listed([tmp_path / "a.png"], torch.tensor([3]))
    one, same, other = (pictures.Files(split, 48, seed)[0][0] for seed in (7, 7, 8))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    middle, label = pictures.Files(split, 48, None)[0]
    assert middle.shape == (3, 48, 48)
    assert label == 3


def test_label_noise_replaces_its_share_by_wrong_labels():
    labels = torch.randint(0, 10, (20000,))
    noisy = with_noise(labels, 0.4, 10, seed=0)
    wrong = noisy != labels
    assert abs(wrong.float().mean() - 0.4) < 0.02
    assert torch.bincount((noisy - labels)[wrong] % 10, minlength=10)[1:].min() > 700


def test_an_epoch_covers_a_text_once(play):
    read = text.load(play, None, "chars", 0)
    data = text.batches(read, 16, 4, seed=3, evaluated=0)
    pieces = [(x, y) for x, y in data.train(0, 0)]
    assert len(pieces) == data.steps
    assert torch.equal(pieces[0][0][:, 1:], pieces[0][1][:, :-1])
    rest = list(data.train(0, 2))
    assert torch.equal(rest[0][0], pieces[2][0])
    assert sum(x.numel() for x, _ in pieces) > len(read.train) - 16 * 5
    assert torch.equal(text.load(play, None, "chars", 0, size=100).train, read.train[:100])
    spelled = "".join(read.vocabulary[i] for i in read.train.tolist())
    assert play.read_text().startswith(spelled)


def test_words_beyond_the_vocabulary_are_unknown(tmp_path):
    (tmp_path / "words.txt").write_text("a a a b b c\n" * 20)
    read = text.load(tmp_path / "words.txt", tmp_path / "words.txt", "words", 3)
    assert read.vocabulary[0] == "<unk>"
    assert set(read.vocabulary) == {"<unk>", "a", "b"} or set(read.vocabulary) == {"<unk>", "a", "<eos>"}
    assert torch.equal(read.train, read.validation)


# ---- networks and presets ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "classes", "parameters"),
    [
        ("resnet20", 10, 272_474),
        ("resnet32", 10, 466_906),
        ("wrn-28-10", 100, 36_536_884),
        ("resnet50", 1000, 25_557_032),
    ],
)
def test_networks_have_the_published_number_of_parameters(name, classes, parameters):
    with torch.device("meta"):
        model = PICTURES[name][1](classes)
    assert sum(p.numel() for p in model.parameters()) == parameters


def test_the_preset_of_cifar10_is_the_authors():
    preset = presets.IMAGE["cifar10-resnet20"]
    assert (preset.model, preset.epochs, preset.batch, preset.milestones) == ("resnet20", 160, 256, (80, 120))
    sassha = preset.settings["sassha"]
    assert (sassha.lr, sassha.weight_decay, sassha.rho, sassha.lazy_hessian, sassha.eps) == (0.15, 5e-4, 0.2, 10, 1e-6)
    (group,) = build_optimizer("sassha", [torch.nn.Parameter(torch.zeros(2))], sassha).param_groups
    assert (group["lr"], group["weight_decay"], group["rho"]) == (0.15, 5e-4 / 0.15, 0.2)


def test_every_preset_can_be_built():
    for preset in [*presets.IMAGE.values(), *presets.LANGUAGE.values()]:
        for name, settings in preset.settings.items():
            if name == "shampoo":
                pytest.importorskip("pytorch_optimizer")
            opt = build_optimizer(name, [torch.nn.Parameter(torch.zeros(2, 2))], settings)
            build_schedule(opt, preset, preset.epochs, 10)


def test_milestones_of_steps_move_with_the_length():
    opt = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 1.0)
    schedule = build_schedule(opt, presets.IMAGE["cifar10-resnet20"], epochs=16, steps=2)
    rates = []
    for _ in range(32):
        rates.append(schedule.get_last_lr()[0])
        opt.step()
        schedule.step()
    assert rates == pytest.approx([1.0] * 16 + [0.1] * 8 + [0.01] * 8)


def test_an_optimizer_without_settings_is_refused(play, tmp_path):
    with pytest.raises(SystemExit, match=re.escape("--preset char-gpt has no settings for shampoo")):
        gpt.main(gpt_args(play, tmp_path, "--optimizer", "shampoo"))


@pytest.mark.slow
def test_a_compiled_network_learns(play, tmp_path):
    gpt.main(gpt_args(play, tmp_path, "--optimizer", "sassha", "--compile", "--lr", 0.003))
    rows, _ = end_of(tmp_path)
    assert float(rows[2][3]) < float(rows[1][3])
    with pytest.raises(SystemExit, match="finite_difference"):
        gpt.main(gpt_args(play, tmp_path / "other", "--compile", "--hvp", "exact"))
