"""Muon in float32 against torch's own, and against the singular value decomposition."""

import pytest
import torch

from glance.train.muon import SingleMuon, build_muon, orthogonalise

DEFAULTS = ((3.4445, -4.775, 2.0315), 5, 1e-7)


@pytest.mark.parametrize("shape", [(12, 12), (8, 20), (20, 8)])
def test_singular_vectors_stay_and_singular_values_come_near_one(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    out = orthogonalise(matrix, *DEFAULTS)
    u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
    inner = u.T @ out @ vh.T
    assert (inner - inner.diag().diag()).abs().max() < 1e-4
    assert ((inner.diag() > 0.5) & (inner.diag() < 1.5)).all()


@pytest.mark.parametrize("shape", [(16, 16), (8, 24), (24, 8)])
def test_steps_are_those_of_torch_up_to_bfloat16(shape):
    start = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    weights = {kind: torch.nn.Parameter(start.clone()) for kind in ("bfloat16", "float32")}
    optimisers = {kind: build_muon([weight], 0.01, kind) for kind, weight in weights.items()}
    assert type(optimisers["bfloat16"]) is torch.optim.Muon and type(optimisers["float32"]) is SingleMuon
    for step in range(4):
        gradient = torch.randn(shape, generator=torch.Generator().manual_seed(10 + step))
        for kind, weight in weights.items():
            weight.grad = gradient.clone()
            optimisers[kind].step()
    moved = (weights["bfloat16"] - start).norm()
    assert (weights["bfloat16"] - weights["float32"]).norm() < 0.02 * moved


def test_its_state_is_saved_and_taken_up_again():
    weight = torch.nn.Parameter(torch.randn(6, 4, generator=torch.Generator().manual_seed(2)))
    one = build_muon([weight], 0.01, "float32")
    weight.grad = torch.ones_like(weight)
    one.step()
    other = build_muon([torch.nn.Parameter(weight.detach().clone())], 0.01, "float32")
    other.load_state_dict(one.state_dict())
    twin = other.param_groups[0]["params"][0]
    twin.grad = weight.grad = torch.full_like(weight, 0.5)
    one.step()
    other.step()
    torch.testing.assert_close(twin, weight)
