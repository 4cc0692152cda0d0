"""Adapters make the update of their library's own example; the page says so, and says what is not so."""

from __future__ import annotations

import ast
from typing import Any

import pytest

from harness.environments import venv as env
from harness.tasks import known_task
from tests.frameworks.own_examples import __main__ as own_examples
from tests.frameworks.own_examples import lines, worker
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
        if own_examples.is_comparable(contestant, task)
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


def record(contestant: str, task: str, **found: Any) -> dict[str, Any]:
    return {"contestant": contestant, "task": task, "versions": {"torch": "2.13.0"}, **found}


def timed(adapter: list[float], example: list[float], ratio: float) -> dict[str, Any]:
    return {"adapter_seconds": adapter, "example_seconds": example, "ratio": ratio}


def test_the_page_names_the_slow_and_the_missing() -> None:
    page = own_examples.page(
        [
            record("opacus-hooks", "small-vit", update={"sgd": 2e-7, "adamw": 3e-6, "control": 0.01}),
            record("opacus-hooks", "vit", turns=timed([1.1, 1.2, 1.3], [1.0, 1.0, 1.0], 1.2)),
            record("opake-vmap", "vit", turns=timed([1.04, 1.05, 1.04], [1.0, 1.0, 1.0], 1.04)),
        ]
    )
    assert "| torch 2.13.0 | small-vit | 2.0e-07 | 3.0e-06 | 1.0e-02 |" in page
    assert "| opacus-hooks | vit | 3 | 1.200 | 1.000 | 1.20 [1.10, 1.30] |" in page
    assert "by more than 5 %: opacus-hooks on vit (1.20).\n" in page
    assert "opacus-ghost on small-gpt2, on gpt2-lm: Opacus refuses a tied head" in page
    (left,) = [line for line in page.splitlines() if "Not measured yet" in line]
    assert "opake-vmap on small-vit (update)" in left
    assert "opake-vmap on vit" not in left and "opacus-ghost on gpt2-lm" not in left
    assert "keras-make-private on mnist-cnn (update)" in left and "keras-make-private on mnist-cnn (time)" in left
    assert "- dp_lora-mean-loss on small-llama, on llama-lora: its README takes a mean loss" in page
    assert "no example is written yet" not in page


def test_the_lines_of_a_change_are_counted_and_are_in_the_page() -> None:
    assert lines.changed("opacus-hooks") == lines.changed("dpcore-native") == 2, "an import and make_private"
    assert lines.changed("torch_func-eager") > 10
    assert "| opacus-hooks | 2 |" in own_examples.page([])
    with pytest.raises(KeyError):
        lines.changed("nobody")


def test_a_line_is_a_statement_and_a_helper_counts_whole() -> None:
    before, after = ast.parse(PLAIN), ast.parse(WITH_DP)
    functions = {f.name: f for tree in (before, after) for f in tree.body if isinstance(f, ast.FunctionDef)}
    assert lines.between(functions, "plain", "private") == 4, "one changed, one added, and two of the helper"


PLAIN = """
def plain(terms):
    model = network(terms)
    step(model)
    return Loop(terms, model)
"""
WITH_DP = """
def private(terms):
    'A docstring is none.'
    model = network(terms)  # nor is a comment
    engine = make(
        terms,
        noise=1.0,
    )
    clip(step(model))
    return Loop(terms, model)


def clip(gradients):
    norm = size(gradients)
    return gradients / norm
"""
