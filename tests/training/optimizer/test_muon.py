"""Muon: orthogonalised momentum, and its step against the formula."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from andrea.config import group_config
from andrea.training.optimizer import MOMENTUM, Muon, orthogonalise
from andrea.training.parallel.ranks import Parallel

FINITE = torch.tensor(True)


@pytest.mark.parametrize("shape", [(3, 7, 13), (2, 13, 7), (1, 11, 11)])
def test_orthogonalised_matrices_have_singular_values_near_one(shape: tuple[int, int, int]) -> None:
    generator = torch.Generator().manual_seed(3)
    values = torch.linalg.svdvals(orthogonalise(torch.randn(shape, generator=generator)))
    assert values.min() > 0.3 and values.max() < 1.3


def make_muon(matrices: dict[str, nn.Parameter], weight_decay: float = 0.0, **changes: object) -> Muon:
    rate_factors = {name: 1.0 if name == "a" else 0.25 for name in matrices}
    parallel = Parallel(nn.ParameterDict(matrices))
    changes = {
        "matrix_learning_rate": 0.1,
        "weight_decay": weight_decay,
        "muon_rows": "none",
    } | changes
    return Muon(matrices, rate_factors, group_config("optimizer", "muon", **changes), bf16=False, parallel=parallel)


def test_it_points_along_the_orthogonal_factor_of_the_gradient() -> None:
    generator = torch.Generator().manual_seed(4)
    matrix = nn.Parameter(torch.zeros(5, 17))
    muon = make_muon({"a": matrix})
    matrix.grad = torch.randn(5, 17, generator=generator)
    u, _, v = torch.linalg.svd(matrix.grad, full_matrices=False)
    muon.step(1.0, FINITE)
    along = nn.functional.cosine_similarity(-matrix.detach().flatten(), (u @ v).flatten(), dim=0)
    assert along > 0.95


def test_its_step_is_the_formula_matrix_by_matrix() -> None:
    """W (1 - rate decay) - rate factor sqrt(max(1, R/C)) orthogonalise(momentum): three shapes, one of them twice."""
    generator = torch.Generator().manual_seed(2)
    shapes = {"a": (23, 7), "b": (7, 23), "c": (13, 13), "d": (7, 23)}
    matrices = {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in shapes.items()}
    muon = make_muon(matrices, weight_decay=0.3)
    before = {name: matrix.detach().clone() for name, matrix in matrices.items()}
    gradients = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    for name, matrix in matrices.items():
        matrix.grad = gradients[name].clone()
    muon.step(0.7, FINITE)
    for name, matrix in matrices.items():
        momentum = (1 - MOMENTUM) * gradients[name]
        nesterov = gradients[name].lerp(momentum, MOMENTUM)
        rate, factor, (n_row, n_column) = 0.7 * 0.1, 1.0 if name == "a" else 0.25, shapes[name]
        size = rate * factor * max(1.0, n_row / n_column) ** 0.5
        expected = before[name] * (1 - rate * 0.3) - size * orthogonalise(nesterov[None])[0]
        torch.testing.assert_close(matrix.detach(), expected, atol=1e-6, rtol=1e-5)


def steps_of(muon: Muon, matrix: nn.Parameter, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    """The change of the matrix in each step."""
    changes = []
    for gradient in gradients:
        before, matrix.grad = matrix.detach().clone(), gradient.clone()
        muon.step(1.0, FINITE)
        changes.append(matrix.detach() - before)
    return changes


def test_a_matrix_without_gradient_stays_where_it_is() -> None:
    """As the first matrices of an MLP whose last matrix is still 0: no root of 0 becomes a NaN."""
    matrix = nn.Parameter(torch.ones(5, 3))
    assert not steps_of(make_muon({"a": matrix}, muon_rows="equal"), matrix, [torch.zeros(5, 3)])[0].any()


def test_equal_rows_make_the_update_independent_of_the_rows_sizes() -> None:
    changes = []
    for factors in (torch.ones(11), torch.logspace(0, -2, 11)):
        matrix = nn.Parameter(torch.zeros(11, 7))
        gradient = torch.randn(11, 7, generator=torch.Generator().manual_seed(6)) * factors[:, None]
        changes += steps_of(make_muon({"a": matrix}, muon_rows="equal"), matrix, [gradient])
    torch.testing.assert_close(*changes, atol=1e-6, rtol=1e-4)
