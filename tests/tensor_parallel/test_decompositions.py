"""GELU as torch's compiler gets it, beside torch's own in float64, and by automatic differentiation."""

import pytest
import torch
import torch.nn.functional as F
from support.each import each

from megazero.tensor_parallel.decompositions import decompositions

GELU, BACKWARD = torch.ops.aten.gelu.default, torch.ops.aten.gelu_backward.default
X = torch.cat((torch.linspace(-9, 9, 361, dtype=torch.float64), torch.tensor([-40.0, -0.0, 1e-30, 40.0, 1e4]).double()))
BOUNDS = {torch.float64: 1e-14, torch.float32: 6e-7, torch.bfloat16: 8e-3, torch.float16: 1e-3}


@each("approximate", ["tanh", "none"])
@each("dtype", list(BOUNDS))
def test_gelu_and_its_derivative_are_torchs(dtype: torch.dtype, approximate: str) -> None:
    x = X.to(dtype)
    exact = x.double().requires_grad_()
    expected = F.gelu(exact, approximate=approximate)
    grad = torch.linspace(-1, 1, len(x), dtype=torch.float64).to(dtype)
    (expected_grad,) = torch.autograd.grad(expected, exact, grad.double())
    table = decompositions()
    for found, wanted in (
        (table[GELU](x, approximate=approximate), expected.detach()),
        (table[BACKWARD](grad, x, approximate=approximate), expected_grad),
    ):
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), wanted, rtol=BOUNDS[dtype], atol=BOUNDS[dtype])


def test_without_a_name_gelu_is_the_exact_one() -> None:
    """The operator's default is GELU by the error function, 0.0005 away from its approximation."""
    torch.testing.assert_close(decompositions()[GELU](X), F.gelu(X), rtol=1e-14, atol=1e-14)
    assert float((F.gelu(X) - F.gelu(X, approximate="tanh")).abs().max()) > 1e-4


def test_a_negative_number_keeps_its_digits() -> None:
    """In fp32 1 + tanh(u) is zero from -5.4 on, where GELU is not."""
    x = torch.tensor([-5.0, -5.4, -6.0])
    exact = F.gelu(x.double(), approximate="tanh")
    torch.testing.assert_close(decompositions()[GELU](x, approximate="tanh").double(), exact, rtol=1e-5, atol=0)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(F.gelu(x, approximate="tanh").double(), exact, rtol=1e-5, atol=0)
