"""The float64 truth against sums done by hand and against finite differences."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from dpcore import reference  # noqa: E402


def halved_square(outputs, labels):
    return 0.5 * (outputs.squeeze(-1) - labels).square()


def line(weight, bias):
    model = torch.nn.Linear(len(weight), 1)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([weight]))
        model.bias.copy_(torch.tensor([bias]))
    return model


def test_linear_regression_by_hand():
    # prediction 1*3 + 2*4 + 1 = 12, residual 12 - 2 = 10: gradient 10*(3, 4, 1) of norm 10*sqrt(26);
    # prediction 1*0 + 2*0 + 1 = 1, residual 1 - 1.5 = -0.5: gradient -0.5*(0, 0, 1) of norm 0.5.
    model = line([1.0, 2.0], 1.0)
    x, y = torch.tensor([[3.0, 4.0], [0.0, 0.0]]), torch.tensor([2.0, 1.5])
    truth = reference.clipped_sum(model, halved_square, x, y, max_grad_norm=2.0)
    factor = 2.0 / (10 * 26**0.5)
    torch.testing.assert_close(truth.norms, torch.tensor([10 * 26**0.5, 0.5], dtype=torch.float64))
    torch.testing.assert_close(truth.plain["weight"], torch.tensor([[30.0, 40.0]], dtype=torch.float64))
    torch.testing.assert_close(truth.plain["bias"], torch.tensor([9.5], dtype=torch.float64))
    torch.testing.assert_close(truth.clipped["weight"], factor * torch.tensor([[30.0, 40.0]], dtype=torch.float64))
    torch.testing.assert_close(truth.clipped["bias"], torch.tensor([10 * factor - 0.5], dtype=torch.float64))


def test_a_clipped_gradient_has_norm_c_over_all_parameters_together():
    model = line([1.0, 2.0], 1.0)
    truth = reference.clipped_sum(model, halved_square, torch.tensor([[3.0, 4.0]]), torch.tensor([2.0]), 0.25)
    assert float(reference.norm(truth.clipped)) == pytest.approx(0.25, rel=1e-14)


def test_zero_gradient_is_kept_and_empty_batch_is_zero():
    model = line([1.0, 2.0], 1.0)
    truth = reference.clipped_sum(model, halved_square, torch.tensor([[3.0, 4.0]]), torch.tensor([12.0]), 1.0)
    assert truth.norms.tolist() == [0.0]
    assert all(not g.any() for g in truth.clipped.values())
    empty = reference.clipped_sum(model, halved_square, torch.zeros(0, 2), torch.zeros(0), 1.0)
    assert empty.norms.shape == (0,)
    assert {name: tuple(g.shape) for name, g in empty.clipped.items()} == {"weight": (1, 2), "bias": (1,)}
    assert all(not g.any() for g in empty.clipped.values())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_non_finite_example_adds_nothing_to_the_clipped_sum(bad):
    model = line([1.0, 2.0], 1.0)
    x, y = torch.tensor([[3.0, 4.0], [bad, 1.0]]), torch.tensor([2.0, 0.0])
    both = reference.clipped_sum(model, halved_square, x, y, 1.0)
    alone = reference.clipped_sum(model, halved_square, x[:1], y[:1], 1.0)
    assert not torch.isfinite(both.norms[1])
    assert not torch.isfinite(both.plain["weight"]).all()
    for name in alone.clipped:
        torch.testing.assert_close(both.clipped[name], alone.clipped[name], rtol=0, atol=0)


def test_gradients_agree_with_finite_differences_and_examples_do_not_mix():
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Embedding(7, 4), torch.nn.Flatten(), torch.nn.Tanh(), torch.nn.Linear(12, 3))
    model = model.double()
    x, y = torch.tensor([[0, 2, 2], [5, 0, 1]]), torch.tensor([2, 0])
    loss = torch.nn.functional.cross_entropy
    for i, gradients in enumerate(reference.example_gradients(model, loss, x, y)):
        for name, parameter in model.named_parameters():
            flat, expected = parameter.data.view(-1), gradients[name].view(-1)
            for k in range(0, flat.numel(), 5):
                kept, slope = flat[k].item(), []
                for sign in (1, -1):
                    flat[k] = kept + sign * 1e-5
                    slope.append(loss(model(x[i : i + 1]), y[i : i + 1]).item())
                flat[k] = kept
                assert (slope[0] - slope[1]) / 2e-5 == pytest.approx(expected[k].item(), abs=1e-9)


def test_frozen_parameters_do_not_count_and_unused_ones_are_zero():
    model = WithIdleLayer(line([1.0, 2.0], 1.0), torch.nn.Linear(2, 2))
    model.used.bias.requires_grad_(False)
    truth = reference.clipped_sum(model, halved_square, torch.tensor([[3.0, 4.0]]), torch.tensor([2.0]), 1e9)
    assert sorted(truth.plain) == ["idle.bias", "idle.weight", "used.weight"]
    assert not truth.plain["idle.weight"].any()
    assert truth.norms.item() == pytest.approx(50.0)  # 10 * |(3, 4)|, the frozen bias left out


class WithIdleLayer(torch.nn.Module):
    def __init__(self, used, idle):
        super().__init__()
        self.used, self.idle = used, idle

    def forward(self, x):
        return self.used(x)


def test_the_model_is_left_as_it_is():
    model = line([1.0, 2.0], 1.0)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    reference.clipped_sum(model, halved_square, torch.tensor([[3.0, 4.0]]), torch.tensor([2.0]), 1.0)
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.float32 and parameter.grad is None
        assert torch.equal(parameter, before[name])


@pytest.mark.parametrize("norm", [0.0, -1.0, float("nan")])
def test_clipping_norm_must_be_positive(norm):
    with pytest.raises(ValueError, match="must be positive"):
        reference.clipped_sum(line([1.0], 0.0), halved_square, torch.zeros(1, 1), torch.zeros(1), norm)
