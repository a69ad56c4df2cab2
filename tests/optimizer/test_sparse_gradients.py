"""A sparse gradient is refused by name, wherever it turns up first, and leaves everything as it was."""

import pytest
import torch
from torch import nn
from torch.optim import SGD
from training import assert_same_bits, snapshot

from sassha_fast import GSASSHA, MSASSHA, SAM, SASSHA, AdaHessian, SophiaH

WAYS = ("closure", "micro-batches", "hessian_closure")
CASES = [
    (method, {"lr": 0.1, "hvp": hvp, "n_samples": n_samples})
    for method in (SASSHA, GSASSHA, MSASSHA, AdaHessian, SophiaH)
    for hvp, n_samples in (("exact", 1), ("finite_difference", 1), ("central_difference", 2))
]
CASES += [(SASSHA, {"lr": 0.1, "rho": rho}) for rho in (0.0, 0.1)]
CASES += [(SAM, {"base_optimizer": SGD, "lr": 0.1, "alpha": alpha}) for alpha in (0.0, 0.1)]


@pytest.mark.parametrize("backend", ["reference", "foreach", "cpu"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("method", "options"), CASES)
def test_a_sparse_gradient_is_refused_by_name(method, options, way, backend):
    if way == "hessian_closure" and method is SAM:
        pytest.skip("SAM has no products")
    model = nn.Embedding(5, 3, sparse=True)
    opt = method(model.named_parameters(), backend=backend, **options)
    before = snapshot(model)

    def part():
        loss = (model(torch.tensor([1])) ** 2).sum()
        loss.backward()
        return loss

    def closure():
        opt.zero_grad()
        return part()

    given = {"hessian_closure": closure} if way == "hessian_closure" else {}
    with pytest.raises(RuntimeError, match=rf"^{method.__name__}: the gradient of 'weight' is sparse"):
        opt.step([part, part] if way == "micro-batches" else closure, **given)
    assert_same_bits(snapshot(model), before)
    assert not any(opt.state.values())
