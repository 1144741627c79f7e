"""The loss of rows by our own kernel, beside torch's operators in fp64 and in the kernel's own type."""

import pytest
import torch

from powertrain.models.kernels.losses import Terms, plain_rows
from powertrain.models.kernels.rows.losses import cpp_rows
from powertrain.records import IGNORE

TERMS = (None, Terms(label_smoothing=0.1), Terms(z_loss=1e-3), Terms(0.1, 1e-3))


@pytest.mark.parametrize("vocabulary", [2, 65, 10_007])
@pytest.mark.parametrize("terms", TERMS, ids=str)
@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-5), (torch.bfloat16, 2 ** -8)], ids=["fp32", "bf16"])
def test_losses_and_gradients_are_those_of_torchs_operators(vocabulary: int, terms: Terms | None, dtype: torch.dtype,
                                                            close: float) -> None:
    draw = torch.Generator().manual_seed(0)
    logits = (4 * torch.randn(7, vocabulary, generator=draw)).to(dtype)
    targets = torch.randint(0, vocabulary, (7,), generator=draw)
    targets[0], targets[3] = vocabulary - 1, IGNORE
    exact = logits.double().requires_grad_()
    kept, y = targets != IGNORE, exact.logsumexp(-1)
    smoothing, z_loss = terms or (0.0, 0.0)
    plain = y - exact.gather(1, targets.clamp(min=0)[:, None]).squeeze(1)
    losses = ((1 - smoothing) * plain + smoothing * (y - exact.mean(-1)) + z_loss * y * y) * kept
    losses.sum().backward()
    assert exact.grad is not None
    found, gradient = cpp_rows(given := logits.clone(), targets, terms, gradient=True, every=False)
    assert gradient is not None
    assert gradient.data_ptr() == given.data_ptr()
    torch.testing.assert_close((found if terms is None else found[0]).double(), losses.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient.double(), exact.grad, rtol=close, atol=close * float(exact.grad.abs().max()))
    expected, _ = plain_rows(logits.clone(), targets, terms, gradient=False, every=False)
    alone, none = cpp_rows(given := logits.clone(), targets, terms, gradient=False, every=False)
    assert none is None
    assert torch.equal(given, logits)
    assert torch.equal(alone, found)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_a_logit_that_is_no_number_makes_the_loss_none() -> None:
    logits = torch.zeros(3, 100)
    logits[0, 5], logits[1, 7] = torch.nan, torch.inf
    losses, gradient = cpp_rows(logits, torch.tensor([1, 1, 1]), None, gradient=True, every=True)
    assert gradient is not None
    assert losses.isnan().tolist() == [True, True, False]
    assert gradient.isnan().any(-1).tolist() == [True, True, False]


def test_a_target_beyond_the_vocabulary_is_refused() -> None:
    with pytest.raises(IndexError, match="beyond the 5 tokens"):
        cpp_rows(torch.zeros(2, 5), torch.tensor([1, 5]), None, gradient=True, every=True)
