"""What goes wrong in silence without ``attach`` is said once, with the remedy, and costs nothing afterwards."""

import pytest
import torch
import torch._dynamo
from torch import nn
from torch.nn.modules import module as modules
from training import closure_of

from sassha_fast import GSASSHA, MSASSHA, SAM, SASSHA, AdaHessian, SophiaH
from sassha_fast.log import StatsLog

CLIMBING = {
    "SASSHA": lambda p: SASSHA(p, lr=0.03, rho=0.05, lazy_hessian=2),
    "GSASSHA": lambda p: GSASSHA(p, lr=0.03, rho=0.05, lazy_hessian=2),
    "SAM": lambda p: SAM(p, torch.optim.SGD, lr=0.03),
    "probes": lambda p: MSASSHA(p, lr=0.03, hvp="finite_difference"),
}
ONE_PASS = {
    "MSASSHA": lambda p: MSASSHA(p, lr=0.03),
    "AdaHessian": lambda p: AdaHessian(p, lr=0.03),
    "SophiaH": SophiaH,
    "no_radius": lambda p: SASSHA(p, lr=0.03, rho=0.0),
}
SAID = r"moves its running statistics in every pass of a step.*call opt\.attach\(model\).*SasshaCallback"


@pytest.fixture(autouse=True)
def nothing_compiled(monkeypatch):
    """As if no test before had compiled anything: a hook of all modules is not set then."""
    monkeypatch.setattr(torch._dynamo.eval_frame, "cached_backends", {})


def net_with(norm=nn.BatchNorm1d):
    return nn.Sequential(nn.Linear(4, 6), norm(6), nn.Tanh(), nn.Linear(6, 1))


def closure_for(opt, net):
    x = torch.randn(8, 4)
    return closure_of(opt, lambda: net(x).square().mean())


@pytest.mark.parametrize("method", CLIMBING)
def test_a_norm_that_moves_in_every_pass_is_said_once(method):
    net = net_with()
    opt = CLIMBING[method](net.parameters())
    closure = closure_for(opt, net)
    with pytest.warns(UserWarning, match=SAID) as seen:
        opt.step(closure)
    assert len(seen) == 1
    assert str(seen[0].message).startswith(f"{type(opt).__name__}.step: BatchNorm1d moves")
    assert not modules._global_forward_pre_hooks
    for _ in range(3):
        opt.step(closure)  # a warning would be an error here


@pytest.mark.parametrize("method", CLIMBING)
@pytest.mark.parametrize("why", ["attached", "evaluated", "no_statistics", "another_norm"])
def test_nothing_is_said_where_nothing_moves_twice(method, why):
    net = net_with(nn.LayerNorm if why == "another_norm" else nn.BatchNorm1d)
    if why == "evaluated":
        net.eval()
    if why == "no_statistics":
        net[1].track_running_stats = False
    opt = CLIMBING[method](net.parameters())
    if why == "attached":
        opt.attach(net)
    opt.step(closure_for(opt, net))


@pytest.mark.parametrize("method", ONE_PASS)
def test_nothing_is_said_of_a_single_pass(method):
    net = net_with()
    opt = ONE_PASS[method](net.parameters())
    opt.step(closure_for(opt, net))


def test_a_warning_that_is_an_error_undoes_the_step():
    net = net_with()
    opt = CLIMBING["SASSHA"](net.parameters())
    before = [p.detach().clone() for p in net.parameters()]
    with pytest.raises(UserWarning, match="moves its running statistics"):
        opt.step(closure_for(opt, net))
    assert all(torch.equal(p, b) for p, b in zip(net.parameters(), before, strict=True))
    assert not opt.state
    assert not modules._global_forward_pre_hooks


def test_where_something_is_compiled_no_hook_is_set():
    torch.compile(nn.Linear(2, 2), backend="eager")
    net = net_with()
    opt = SAM(net.parameters(), torch.optim.SGD, lr=0.03)
    hooks = []
    net[0].register_forward_pre_hook(lambda *_: hooks.append(len(modules._global_forward_pre_hooks)))
    opt.step(closure_for(opt, net))
    assert hooks == [0, 0]


# ---- Lightning ----------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers")
@pytest.mark.filterwarnings("ignore:The number of training batches")
@pytest.mark.filterwarnings("ignore:.*LeafSpec.*")
class TestLightning:
    def fit(self, build, callbacks=(), prepare=lambda opt, module: None):
        lightning = pytest.importorskip("lightning.pytorch")

        class Module(lightning.LightningModule):
            def __init__(self):
                super().__init__()
                self.net = net_with()

            def training_step(self, batch, batch_idx):
                return self.net(batch).square().mean()

            def validation_step(self, batch, batch_idx):
                self.log("loss", self.net(batch).square().mean())

            def configure_optimizers(self):
                opt = build(self.parameters())
                prepare(opt, self)
                return opt

        data = torch.utils.data.DataLoader(torch.randn(16, 4), batch_size=8)
        trainer = lightning.Trainer(
            max_epochs=2,
            callbacks=list(callbacks),
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Module(), data, data)

    @pytest.mark.parametrize("logged", [False, True])
    def test_m_sassha_without_the_callback_is_told_of_it_once(self, logged, tmp_path):
        logs = []

        def log(opt, module):
            if logged:
                logs.append(StatsLog(opt, tmp_path / "log.csv"))

        with pytest.warns(UserWarning, match=r"MSASSHA\.step: Lightning validates and saves.*x \+ ε") as seen:
            self.fit(ONE_PASS["MSASSHA"], prepare=log)
        assert sum("Lightning validates" in str(w.message) for w in seen) == 1
        for each in logs:
            each.close()

    def test_sassha_without_the_callback_is_told_of_its_norms(self):
        with pytest.warns(UserWarning, match=SAID) as seen:
            self.fit(CLIMBING["SASSHA"])
        assert sum("moves its running" in str(w.message) for w in seen) == 1

    @pytest.mark.parametrize("build", [ONE_PASS["MSASSHA"], CLIMBING["SASSHA"]], ids=["MSASSHA", "SASSHA"])
    def test_with_the_callback_nothing_is_said(self, build):
        pytest.importorskip("lightning.pytorch")
        from sassha_fast.integrations.lightning import SasshaCallback

        self.fit(build, [SasshaCallback()])

    def test_an_attached_m_sassha_warns_where_perturbed_weights_are_used(self):
        with pytest.warns(UserWarning, match="the model is evaluated while its parameters hold") as seen:
            self.fit(ONE_PASS["MSASSHA"], prepare=lambda opt, module: opt.attach(module.net))
        assert not any("Lightning validates" in str(w.message) for w in seen)


@pytest.mark.parametrize("method", ["SASSHA", "GSASSHA", "SAM"])  # probes come with the next refresh
def test_a_resumed_run_is_told_too(method):
    net = net_with()
    opt = CLIMBING[method](net.parameters())
    opt.attach(net)
    opt.step(closure_for(opt, net))
    resumed = CLIMBING[method](net.parameters())
    resumed.load_state_dict(opt.state_dict())
    with pytest.warns(UserWarning, match=SAID) as seen:
        resumed.step(closure_for(resumed, net))
    assert len(seen) == 1
    resumed.step(closure_for(resumed, net))  # a warning would be an error here


def test_a_resumed_run_in_lightning_is_told_too():
    net = net_with(nn.LayerNorm)
    opt = MSASSHA(net.parameters(), lr=0.03)
    opt.step(closure_for(opt, net))
    resumed = MSASSHA(net.parameters(), lr=0.03)
    resumed.load_state_dict(opt.state_dict())
    closure = closure_for(resumed, net)
    closure.__module__ = "lightning.pytorch.loops.optimization.automatic"
    with pytest.warns(UserWarning, match="Lightning validates and saves"):
        resumed.step(closure)
    resumed.step(closure)
