"""Loops in the style of two well-known training scripts, with AdamW's lines and ours side by side.

One function is the loop of both optimizers. Lines marked "ours" are all that differs.
"""

import copy
import math

import pytest
import torch
from torch import nn
from torch.amp import GradScaler
from torch.nn import functional as F
from torch.optim import AdamW
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from training import assert_same_bits, same_bits

from sassha_fast import MSASSHA, SASSHA

# ---- a language model: accumulation, clipping, a scaler, a schedule by hand --------------------------------------

VOCABULARY, LENGTH, PARTS, ITERATIONS, WARMUP, CLIP = 11, 8, 3, 24, 4, 1.0
RATES = {AdamW: 2e-2, SASSHA: 0.2, MSASSHA: 0.2}


class TinyLM(nn.Module):
    """Embedding, one block of attention, a head that shares the embedding; returns logits and loss."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.places = nn.Embedding(VOCABULARY, 16), nn.Embedding(LENGTH, 16)
        self.norm, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)
        self.mlp = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16), nn.Dropout(0.1))
        self.head = nn.Linear(16, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.3)

    def forward(self, x, y):
        h = self.tokens(x) + self.places(torch.arange(x.shape[1]))
        q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.qkv(self.norm(h)).chunk(3, dim=-1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = h + self.out(attended.transpose(1, 2).flatten(2))
        logits = self.head(h + self.mlp(h))
        return logits, F.cross_entropy(logits.flatten(0, 1), y.flatten())


def decayed_and_not(model):
    """Two groups: matrices decay, the rest does not."""
    params = list(model.parameters())
    return [
        {"params": [p for p in params if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]


def text_batch(iteration, part):
    """Sequences in which a token is one more than three times the last."""
    generator = torch.Generator().manual_seed(1000 * iteration + part)
    rows = [torch.randint(0, VOCABULARY, (6,), generator=generator)]
    for _ in range(LENGTH):
        rows.append((3 * rows[-1] + 1) % VOCABULARY)
    tokens = torch.stack(rows, dim=1)
    return tokens[:, :-1], tokens[:, 1:]


def rate_at(iteration, highest):
    if iteration < WARMUP:
        return highest * (iteration + 1) / WARMUP
    share = (iteration - WARMUP) / (ITERATIONS - WARMUP)
    return highest * (0.1 + 0.45 * (1.0 + math.cos(math.pi * share)))


class LanguageRun:
    """Model, optimizer and scaler of a run, which can be saved and loaded."""

    def __init__(self, method, way, scaled):
        self.model, self.method, self.way = TinyLM(), method, way
        own = {} if method is AdamW else {"rho": 0.05, "lazy_hessian": 5}  # ours
        if way == "closure":
            own["max_grad_norm"] = CLIP  # ours, in place of clip_grad_norm_
        self.opt = method(decayed_and_not(self.model), lr=RATES[method], betas=(0.9, 0.95), **own)
        self.scaler = GradScaler("cpu", enabled=scaled, init_scale=2.0**10, growth_interval=7)
        self.losses = []

    def train(self, start, stop):
        model, opt, scaler = self.model, self.opt, self.scaler
        for iteration in range(start, stop):
            torch.manual_seed(iteration)  # for dropout, so that a resumed run draws the same
            for group in opt.param_groups:
                group["lr"] = rate_at(iteration, RATES[self.method])
            if self.way == "closure":  # ours: the passes of a step become closures
                self.losses.append(float(opt.step([self.micro(iteration, i) for i in range(PARTS)], scaler=scaler)))
                scaler.update()
                continue
            total = 0.0
            due = self.method is MSASSHA and opt.hessian_due  # ours
            with opt.refresh_context() if due else torch.enable_grad():  # ours: attention with a double backward
                for i in range(PARTS):
                    _, loss = model(*text_batch(iteration, i))
                    scaler.scale(loss / PARTS).backward(create_graph=due)  # ours: create_graph
                    total += loss.item() / PARTS
                if self.method is MSASSHA:
                    opt.take_products(scaler=scaler)  # ours: before gradients are unscaled and clipped
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            scaler.step(opt)
            scaler.update()
            opt.zero_grad(set_to_none=True)
            self.losses.append(total)
        return self

    def micro(self, iteration, part):
        def closure():
            _, loss = self.model(*text_batch(iteration, part))
            self.scaler.scale(loss / PARTS).backward()
            return loss / PARTS

        return closure

    def evaluate(self):
        if self.method is MSASSHA:
            self.opt.eval()  # ours
        self.model.eval()
        with torch.no_grad():
            loss = float(self.model(*text_batch(10**6, 0))[1])
        self.model.train()
        if self.method is MSASSHA:
            self.opt.train()  # ours
        return loss

    def save(self):
        parts = {"model": self.model, "opt": self.opt, "scaler": self.scaler}
        return copy.deepcopy({name: part.state_dict() for name, part in parts.items()})

    def load(self, checkpoint):
        self.model.load_state_dict(checkpoint["model"])
        self.opt.load_state_dict(checkpoint["opt"])
        self.scaler.load_state_dict(checkpoint["scaler"])
        return self


@pytest.mark.parametrize("scaled", [False, True], ids=["scaler_off", "scaler_on"])
@pytest.mark.parametrize(
    ("method", "way"), [(AdamW, "loop"), (SASSHA, "closure"), (MSASSHA, "loop"), (MSASSHA, "closure")]
)
def test_a_language_model_trains_and_resumes_bit_for_bit(method, way, scaled):
    run = LanguageRun(method, way, scaled).train(0, 13)
    saved = run.save()
    assert run.train(13, ITERATIONS).evaluate() < 0.7 * run.losses[0]
    resumed = LanguageRun(method, way, scaled).load(saved).train(13, ITERATIONS)
    assert resumed.losses == run.losses[13:]
    assert_same_bits(list(resumed.model.parameters()), list(run.model.parameters()))
    assert resumed.scaler.get_scale() == run.scaler.get_scale()


@pytest.mark.parametrize(("method", "way"), [(SASSHA, "closure"), (MSASSHA, "loop")])
def test_a_scale_that_is_a_power_of_two_changes_no_bit(method, way):
    plain, scaled = (LanguageRun(method, way, on).train(0, 6) for on in (False, True))
    assert_same_bits(list(scaled.model.parameters()), list(plain.model.parameters()))


# ---- pictures: EMA, mixup, label smoothing, channels_last, warm-up, bfloat16, resume -------------------------------

EPOCHS, CLASSES, BATCH, PICTURES = 6, 3, 16, 48


class TinyNet(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.norm1 = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.body, self.norm2 = nn.Conv2d(8, 12, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(12)
        self.drop, self.head = nn.Dropout(0.1), nn.Linear(12, CLASSES)

    def forward(self, x):
        h = F.gelu(self.norm1(self.stem(x)))
        h = F.gelu(self.norm2(self.body(h)))
        return self.head(self.drop(h.mean((2, 3))))


def pictures():
    """Noise with a bright stripe, whose direction is the class."""
    generator = torch.Generator().manual_seed(5)
    y = torch.arange(PICTURES) % CLASSES
    x = 0.3 * torch.randn(PICTURES, 3, 8, 8, generator=generator)
    x[y == 0, :, 3:5, :] += 1.0
    x[y == 1, :, :, 3:5] += 1.0
    return x, y


def mixed(x, y, generator, alpha=0.2):
    """Mixup: pictures and smoothed targets of a batch with those of the batch in reverse."""
    share = torch._sample_dirichlet(torch.tensor([alpha, alpha]), generator)[0]
    target = F.one_hot(y, CLASSES).float() * 0.9 + 0.1 / CLASSES
    return share * x + (1 - share) * x.flip(0), share * target + (1 - share) * target.flip(0)


class PictureRun:
    """Model, average, optimizer and schedule of a run, which can be saved and loaded."""

    def __init__(self, method):
        self.method, self.model = method, TinyNet().to(memory_format=torch.channels_last)
        rate = {AdamW: 1e-2, SASSHA: 0.1, MSASSHA: 0.1}[method]
        own = {} if method is AdamW else {"rho": 0.05, "lazy_hessian": 4}  # ours
        self.opt = method(self.model.parameters(), lr=rate, weight_decay=0.01, **own)
        if method is not AdamW:
            self.opt.attach(self.model)  # ours
        warm = torch.optim.lr_scheduler.LinearLR(self.opt, 0.1, total_iters=1)
        cool = torch.optim.lr_scheduler.CosineAnnealingLR(self.opt, EPOCHS)
        self.schedule = torch.optim.lr_scheduler.SequentialLR(self.opt, [warm, cool], milestones=[1])
        self.average = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.7), use_buffers=True)
        self.losses = []

    def train(self, start, stop):
        model, opt = self.model, self.opt
        data, labels = pictures()
        for epoch in range(start, stop):
            generator = torch.Generator().manual_seed(epoch)
            torch.manual_seed(epoch)
            model.train()
            for chosen in torch.randperm(PICTURES, generator=generator).split(BATCH):
                x, target = mixed(data[chosen], labels[chosen], generator)
                x = x.contiguous(memory_format=torch.channels_last)

                def closure(x=x, target=target):
                    opt.zero_grad()
                    # ours: products of eight bits round to 0, so steps that differentiate do without autocast
                    exact = self.method is not AdamW and opt.hessian_due
                    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not exact):
                        loss = F.cross_entropy(model(x).float(), target)
                    loss.backward()
                    return loss

                self.losses.append(opt.step(closure).item())  # AdamW takes a closure too
                if self.method is MSASSHA:
                    with opt.true_weights():  # ours
                        self.average.update_parameters(model)
                else:
                    self.average.update_parameters(model)
            self.schedule.step()
        return self

    def accuracy(self, model):
        x, y = pictures()
        with torch.no_grad():
            return float((model.eval()(x).argmax(1) == y).float().mean())

    def save(self):
        if self.method is MSASSHA:
            self.opt.eval()  # ours
        parts = {"model": self.model, "opt": self.opt, "schedule": self.schedule, "average": self.average}
        checkpoint = copy.deepcopy({name: part.state_dict() for name, part in parts.items()})
        if self.method is MSASSHA:
            self.opt.train()  # ours
        return checkpoint

    def load(self, checkpoint):
        self.model.load_state_dict(checkpoint["model"])
        self.opt.load_state_dict(checkpoint["opt"])
        self.schedule.load_state_dict(checkpoint["schedule"])
        self.average.load_state_dict(checkpoint["average"])
        if self.method is MSASSHA:
            self.opt.train()  # ours
        return self


@pytest.mark.parametrize("method", [AdamW, SASSHA, MSASSHA])
def test_pictures_are_learned_and_the_run_resumes_bit_for_bit(method):
    run = PictureRun(method).train(0, 2)
    saved = run.save()
    run.train(2, EPOCHS)
    assert sum(run.losses[-3:]) < 0.85 * sum(run.losses[:3])
    resumed = PictureRun(method).load(saved).train(2, EPOCHS)
    assert resumed.losses == run.losses[6:]
    found, expected = resumed.save(), run.save()
    for part in ("model", "average"):
        for name, tensor in expected[part].items():
            same = torch.equal if not tensor.is_floating_point() else same_bits
            assert same(found[part][name], tensor), (part, name)
    assert all(p.is_contiguous(memory_format=torch.channels_last) for p in run.model.parameters() if p.dim() == 4)
    assert run.model.norm1.num_batches_tracked == EPOCHS * PICTURES // BATCH  # moved once a step
    if method is MSASSHA:
        run.opt.eval()  # ours
    assert run.accuracy(run.average.module) > 0.6
