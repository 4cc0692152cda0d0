"""The settings of make_private, with their defaults: what its signature and its docstring are made of."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Annotated, Any, ParamSpec, Required, TypedDict, TypeVar, cast, get_args, get_origin, get_type_hints

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from dpcore.clipping import Factors
from dpcore.correlated import CorrelatedNoise
from dpcore.grad_sample.utils import DEFAULT_MODE

P = ParamSpec("P")
T = TypeVar("T")


class PrivateSettings(TypedDict, total=False):
    """The arguments of make_private but for the noise, with their defaults; without one: the optimizer's options.

    Args:
        module: The ``torch.nn.Module`` to train, in training mode. A module in
            ``DifferentiallyPrivateDistributedDataParallel``, or one to which ``fully_shard`` was applied, is trained by
            all ranks of its group; each of them calls this with the whole data set and the same settings.
        optimizer: An ordinary torch optimizer over ``module.parameters()``. Only what it holds is clipped, noised and
            updated.
        criterion: The loss for the mode "ghost" (default ``CrossEntropyLoss``), and in every mode checked against
            ``loss_reduction`` where it is given.
        data_loader: A torch loader over the whole data set. Its batch size sets the default sample rate only. Its
            ``generator`` seeds the batches, unless the engine has a seed or draws securely; for a release it must be
            secret.
        max_grad_norm: C, the L2 bound to which each example's gradient is clipped, and so how far one example can move
            a step's sum. For "per_layer" a list, one bound per trained parameter.
        batch_first: Whether the module's inputs are [B, T, ...]; False: [T, B, ...]. Wrong, it would clip time steps
            instead of examples.
        loss_reduction: The reduction of your loss over the batch, "mean" or "sum". The update of a mean loss is divided
            by ``expected_batch_size``, that of a sum by nothing. Wrong, every gradient is scaled by the batch's length
            before it is clipped.
        poisson_sampling: Whether the returned loader draws Poisson batches: every example independently with the chance
            ``sample_rate``. Epsilon holds for such batches only; False keeps your loader, with a warning.
        clipping: "flat" clips the whole gradient at one bound; "per_layer" each parameter at its own; "adaptive" moves
            the bound towards a quantile of the norms (``options`` are those of :class:`AdaClipDPOptimizer`);
            "automatic" scales every gradient to nearly the bound, shorter ones too.
        noise_generator: A ``torch.Generator`` that seeds the noise, for tests. Noise of a known seed protects nothing.
        grad_sample_mode: Where gradients can be read between ``backward()`` and ``step()``. "bookkeeping" never forms
            the ordinary gradient; "hooks" (also "functorch", "ew") leaves it in ``p.grad``; "ghost" is Opacus' fast
            clipping, with a criterion of its own; "no_op" records nothing and takes ``p.grad_sample`` from the loop.
            The update is the same in all of them.
        wrap_model: Whether the module is returned in a wrapper. False records it where it is and returns the hooks; end
            with their ``cleanup()``.
        rand_on_empty: Accepted for compatibility and ignored, with a warning: an empty batch stays one and is a step of
            noise alone.
        sample_rate: q, the chance of an example to be in a batch; a public number. None: 1 / len(data_loader), which
            takes the number of examples to be public.
        expected_batch_size: The public divisor of every update of a mean loss, of all ranks together. None: sample rate
            × number of examples, with a warning where ``sample_rate`` was given. Never the batch's own length, which
            depends on the data.
        check_batches: Whether each step must use an unused batch of the returned loader, every example in one row. Pass
            False only where your own batches are drawn at the accounted rate.
        check_isolation: Whether experiments on the first batches of every kind, and on rare random ones later, look for
            examples that reach each other's gradients (:mod:`dpcore.example_isolation.check`). Clipping bounds nothing
            where they do.
        max_physical_batch_size: The most examples of a batch that the returned loader hands out at once; "auto" plans
            them by time and memory. ``step()`` then updates once per batch, at its last piece. Schedules of torch's and
            dpcore's classes move there too, though the loop steps them for every piece, and ``len(data_loader)`` stays
            the number of batches. None: whole batches. See
            :class:`dpcore.utils.batch_memory_manager.BatchMemoryManager`.
        group: K, how many rows of a batch that follow each other are one example, the privacy unit: what is said of
            examples here holds for these. An example's gradient is that of the mean of its rows' losses, and is clipped
            once; the loss is reduced over all rows. None: as ``data_loader`` lays rows out, over :func:`dpcore.views`
            or :func:`dpcore.users`; one row over any other data set.
        max_batch_size: The most examples of a batch, for bounded memory and shapes (truncated Poisson sampling): of a
            longer one so many are kept, at random. Epsilon is an upper bound that charges the chance of a longer batch,
            so let that be next to nothing: nine standard deviations beyond the mean. None: no limit.
        sampling: How batches are drawn. "poisson": the default. "truncated": that with ``max_batch_size``, which is
            then needed. "bins": each round puts every example into one of its batches, uniformly and independently; the
            epsilon is its own, a begun round counts whole, and the accountant must be "prv". "shuffle": each round cuts
            the examples, in random order, into batches of the loader's length; every begun round counts as a Gaussian
            mechanism without amplification, an upper bound for neighbours of which one has zeros in an example's place.
            None: as ``data_loader`` does, where that is a :class:`DPDataLoader`.
        mechanism: A :class:`dpcore.CorrelatedNoise`, whose noise later steps partly take back (DP-FTRL). Every round
            then has the same batches in the same order, and epsilon is that of one Gaussian mechanism without
            amplification, for neighbours of which one has zeros in an example's place. None: independent noise.
        keep_gathered: Whether the parameters of a module in shards stay gathered on every rank from the first piece of
            a batch to the last, and are not gathered for each. None: from the second batch on, where half of the memory
            that is free then is enough for it.
    """

    module: Required[nn.Module]
    optimizer: Required[Optimizer]
    data_loader: Required[DataLoader[Any]]
    max_grad_norm: Required[float | Sequence[float]]
    criterion: Annotated[Any, None]
    batch_first: Annotated[bool, True]
    loss_reduction: Annotated[str, "mean"]
    poisson_sampling: Annotated[bool, True]
    clipping: Annotated[str, "flat"]
    noise_generator: Annotated[torch.Generator | None, None]
    grad_sample_mode: Annotated[str, DEFAULT_MODE]
    wrap_model: Annotated[bool, True]
    rand_on_empty: Annotated[bool, False]
    sample_rate: Annotated[float | None, None]
    expected_batch_size: Annotated[float | None, None]
    check_batches: Annotated[bool, True]
    check_isolation: Annotated[bool, True]
    max_physical_batch_size: Annotated[int | str | None, None]
    group: Annotated[int | None, None]
    max_batch_size: Annotated[int | None, None]
    sampling: Annotated[str | None, None]
    mechanism: Annotated[CorrelatedNoise | None, None]
    keep_gathered: Annotated[bool | None, None]
    factors: Factors
    target_unclipped_quantile: float
    clipbound_learning_rate: float
    max_clipbound: float
    min_clipbound: float
    unclipped_num_std: float | None


HINTS = get_type_hints(PrivateSettings, include_extras=True)
NEEDED = {name: get_args(hint)[0] for name, hint in HINTS.items() if get_origin(hint) is Required}
DEFAULTS = {name: hint.__metadata__[0] for name, hint in HINTS.items() if get_origin(hint) is Annotated}


def spelled_out(method: Callable[P, T]) -> Callable[P, T]:
    """Show the settings one by one in the signature and the docstring of a method that takes them as ``**options``."""
    (this, *own), kind = inspect.signature(method).parameters.values(), inspect.Parameter
    needed = [kind(name, kind.KEYWORD_ONLY, annotation=hint) for name, hint in NEEDED.items()]
    optional = [
        kind(name, kind.KEYWORD_ONLY, default=value, annotation=HINTS[name].__origin__)
        for name, value in DEFAULTS.items()
    ]
    rest = kind("options", kind.VAR_KEYWORD, annotation=Any)
    method.__signature__ = inspect.Signature([this, *needed, *own[:-1], *optional, rest])  # type: ignore[attr-defined]
    settings = (inspect.getdoc(PrivateSettings) or "").partition("Args:\n")[2]
    method.__doc__ = (inspect.getdoc(method) or "").replace("    **options:", f"{settings}\n    **options:")
    return method


def completed(given: PrivateSettings) -> PrivateSettings:
    """Return the settings with all defaults; TypeError where one is missing that has none."""
    missing = [name for name in NEEDED if name not in given]
    if missing:
        raise TypeError(
            f"make_private() needs {', '.join(f'{name}=' for name in missing)}, which was not given: the L2 bound of "
            "an example's gradient, 1.0 for a beginning."
        )
    return cast(PrivateSettings, {**DEFAULTS, **given})
