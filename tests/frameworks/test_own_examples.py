"""Adapters make the update of their library's own example."""

from __future__ import annotations

import pytest

from harness.environments import venv as env
from harness.tasks import known_task
from tests.frameworks.own_examples import __main__ as own_examples
from tests.frameworks.own_examples import worker
from tests.frameworks.own_examples.worker import LOOPS

pytestmark = pytest.mark.frameworks

QUICK = {("opacus-ghost", "small-vit"), ("dp_lora-hooks", "small-llama")}
QUICK |= {(name, "mnist-cnn") for name in ("backpack-batch-grad", "fastdp-flat", "private_transformers-default")}
QUICK |= {(name, "small-gpt2") for name in ("dpcore-native", "opacus-hooks", "opake-vmap", "torch_func-eager")}
"""The quick ones; those on JAX compile for a minute."""


@pytest.mark.parametrize(
    ("contestant", "task"),
    [
        pytest.param(contestant, task, marks=[] if (contestant, task) in QUICK else [pytest.mark.slow])
        for task in (*own_examples.SMALL, *own_examples.BOTH)
        for contestant in LOOPS
        if task in own_examples.EXAMPLES[contestant]
    ],
)
def test_an_adapter_makes_the_update_of_its_library_s_example(contestant: str, task: str) -> None:
    try:
        found = own_examples.compare(contestant, task, "update", turns=0)["update"]
    except env.EnvironmentFault as fault:
        pytest.skip(f"unsupported here: {fault}")
    assert found["sgd"] <= own_examples.LIMIT
    assert found.get("adamw", 0.0) <= own_examples.LIMIT_ADAMW
    assert 0.009 < found["control"] < 0.011, "a bound that is 1 % higher is seen"


def test_a_frozen_weight_that_moves_is_an_error_and_both_matrices_of_lora_get_a_gradient() -> None:
    task = known_task("small-llama")
    terms = worker.terms_of(task, 2, 1.0, 0.0, 1.0, task.optimizer)
    assert all(terms.initial[name].any() for name in task.trained_parameters)
    name = next(iter(task.trained_parameters))
    worker.check_frozen(terms, {**terms.initial, name: terms.initial[name] + 1})
    with pytest.raises(ValueError, match=r"have moved: tokens\.weight\."):
        worker.check_frozen(terms, {**terms.initial, "tokens.weight": terms.initial["tokens.weight"] + 1})
