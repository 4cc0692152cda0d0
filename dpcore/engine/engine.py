"""The engine: clipped sums of batches, and private steps made of them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from dpcore.arguments import check_divisor, check_noise_multiplier
from dpcore.clipping import clip_factors
from dpcore.distributed import ranks_of
from dpcore.engine import checks
from dpcore.engine.batch_sums import BatchSums, ClippedSum, LossFn
from dpcore.engine.together import Together, with_whole_parameters
from dpcore.errors import PrivacyError, UnsupportedError
from dpcore.microbatch.accumulator import Factors
from dpcore.microbatch.parallel_sums import accumulator_for
from dpcore.noise import GaussianNoise, warn_without_noise
from dpcore.privacy_unit import check_group
from dpcore.reduction import check_keeps, reduction_of
from dpcore.release import Release
from dpcore.uncompiled import refuse_compiled, uncompiled
from dpcore.validators.parameters import check_hooks, check_recordable


class Engine:
    """Clipped sums and DP-SGD steps for one model and loss, built once and used for every batch.

    Args:
        model: The module, in training mode; its parameters with ``requires_grad`` are trained. One in
            ``DifferentiallyPrivateDistributedDataParallel`` (or replicated), or sharded by ``fully_shard``, is trained
            by all ranks together, each of which hands every step its own share of one batch, also an empty one.
        loss_fn: ``loss_fn(outputs, y)`` returns one loss per example, [B].
        max_grad_norm: C, the L2 bound to which each example's gradient is clipped; or one bound per trained parameter
            (per-layer clipping).
        noise_multiplier: σ; the noise of a step has the standard deviation σ times the L2 norm of the bounds.
        expected_batch_size: The public divisor of every update, whatever the batch's length. :meth:`clipped_sum` needs
            none.
        optimizer: The torch optimizer that :meth:`step` calls.
        noise: The source of noise; None draws a secret seed.
        physical_batch_size: Examples per forward pass. None chooses by sizes and memory, and where memory runs out
            starts the batch anew with half as many at once, so that nothing is counted twice. The result does not
            depend on it.
        factors: The clipping rule, ``factors(norms, C)``, without state, because it is called several times for a
            batch; flat by default.
        compile: Whether, behind the first micro-batch, the pass runs as one compiled graph of fixed length per kind of
            batch (:mod:`dpcore.engine.graphs`). True takes inductor, a name another backend; compiling takes some time
            once. Python values that model and loss hold are then those of the first call, while weights, buffers and
            clip bounds stay live.
        check_isolation: Whether the first batches, and rare random ones later, show by experiment if model and loss mix
            examples (:mod:`dpcore.example_isolation.check`).
        group: K, how many rows that follow each other are one example, the privacy unit: K views of it, or a user's
            rows. Its gradient is that of the mean of its rows' losses, clipped once; batches, B and sizes are counted
            in such examples, while inputs, targets and losses have B K rows.
        keep_gathered: Whether the parameters of a module in shards stay gathered on every rank from the first piece of
            a batch to the last, and are not gathered for each. None: from the second batch on, where half of the memory
            that is free then is enough for it.
        mechanism: None; noise that is correlated over steps is for ``PrivacyEngine.make_private``.

    Raises:
        UnsupportedError: the model is compiled already, split (tensor parallelism), or cannot be recorded; or there is
            a mechanism. With ``compile``: recurrent layers, shards, and at the first step what cannot be traced.
        ValueError: a bound or a size is out of its range.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        *,
        max_grad_norm: float | Sequence[float] = 1.0,
        noise_multiplier: float = 0.0,
        expected_batch_size: float | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        noise: GaussianNoise | None = None,
        physical_batch_size: int | None = None,
        factors: Factors = clip_factors,
        compile: bool | str = False,
        check_isolation: bool = True,
        group: int = 1,
        keep_gathered: bool | None = None,
        mechanism: None = None,
    ) -> None:
        if mechanism is not None:
            raise UnsupportedError(
                f"mechanism is {mechanism!r}, and the noise of an Engine's steps is independent: an engine is not told "
                "which batches hold the same examples, by which alone the cost of correlated noise is known. Leave it "
                "out, or pass it to PrivacyEngine.make_private."
            )
        refuse_compiled(model)
        check_recordable(model)
        self.model = model
        self._modules = tuple(model.modules())
        self._structure = checks.structure_of(model)
        sigma = check_noise_multiplier(noise_multiplier)
        scale = 1.0 if expected_batch_size is None else 1.0 / check_divisor(expected_batch_size)
        self.expected_batch_size = expected_batch_size
        self.optimizer = optimizer
        self.noise = GaussianNoise() if noise is None else noise
        self.steps = 0
        recorded = with_whole_parameters(model)
        self.parameters: dict[str, Parameter] = {n: p for n, p in recorded.named_parameters() if p.requires_grad}
        trained = [(name, tuple(p.shape), p.dtype) for name, p in self.parameters.items()]
        ranks = ranks_of(recorded)
        reduction = reduction_of(recorded, ranks)
        self.together = None if ranks is None else Together(ranks, reduction, self.noise, trained)
        self.accumulator = accumulator_for(self.parameters, max_grad_norm, factors, reduction)
        self.accumulator.check_noise(sigma, scale)
        self.noise_multiplier = sigma
        self.group = check_group(group)
        sums: Any = BatchSums
        check_keeps(keep_gathered, reduction)
        if recorded is not model:
            from dpcore.engine.sums_in_shards import SumsInShards  # which imports what is slow

            sums = functools.partial(SumsInShards, keep_gathered=keep_gathered)
        self._sums: BatchSums = sums(
            recorded,
            loss_fn,
            self.accumulator,
            physical_batch_size=physical_batch_size,
            compile=compile,
            check_isolation=check_isolation,
            group=self.group,
        )
        self.isolation = self._sums.isolation

    def __repr__(self) -> str:
        bounds = self.accumulator.bounds
        optimizer = None if self.optimizer is None else type(self.optimizer).__name__
        return (
            f"{type(self).__name__}({type(self.model).__name__}, {len(self.parameters)} trained parameters, "
            f"max_grad_norm={bounds[0] if len(bounds) == 1 else bounds}, noise_multiplier={self.noise_multiplier:.6g}, "
            f"expected_batch_size={self.expected_batch_size}, optimizer={optimizer}, steps={self.steps})"
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._structure = checks.structure_of(self.model)

    @property
    def loss_fn(self) -> LossFn:
        """``loss_fn(outputs, y)``, [B] losses; another one may be set between steps."""
        return self._sums.loss_fn

    @loss_fn.setter
    def loss_fn(self, value: LossFn) -> None:
        self._sums.loss_fn = value

    @property
    def noise_multiplier(self) -> float:
        """σ; the noise of a step has the standard deviation σ times the L2 norm of the bounds."""
        return self._noise_multiplier

    @noise_multiplier.setter
    def noise_multiplier(self, value: float) -> None:
        self._noise_multiplier = check_noise_multiplier(value)

    # ---- the clipped sum

    @uncompiled
    def clipped_sum(self, x: Any, y: Any, mask: Tensor | None = None) -> ClippedSum:
        """Compute Σ_i min(1, C/|g_i|) g_i over one batch, of several ranks this one's share, without noise.

        Args:
            x: Inputs: a tensor [B, ...], a tuple (positional) or a dict (keyword arguments) of them. B may be 0.
            y: Targets, likewise.
            mask: Bool [B]; examples whose entry is False contribute nothing. With ``group``, a mask of all rows leaves
                rows out of the mean of their example.

        Returns:
            The sums with norms, factors, losses and sensitivity. The sums live in the engine's buffer and hold until
                the next call.

        Raises:
            UnsupportedError: a gradient cannot be told apart by example.
            PrivacyError: model or loss mix examples, the loss is no [B], or the model was changed since the engine was
                built.
            ValueError: the mask is not bool [B].
        """
        if self._sums.model is not self.model:
            raise UnsupportedError(
                "The model is sharded, so that no rank holds whole sums and none is without the others'; call "
                "privatize() or step() on all ranks."
            )
        self._check_model()
        self._withdraw()
        return self._sums.add(x, y, mask, 1.0, self.accumulator.clear)

    @property
    def sensitivity(self) -> float:
        """L2 norm of the bounds: how far one example can move the clipped sum."""
        return self.accumulator.sensitivity

    # ---- the step

    @uncompiled
    def privatize(self, x: Any, y: Any, mask: Tensor | None = None) -> ClippedSum:
        """Set every trained parameter's ``grad`` to (clipped sum + σ·C·N(0, I)) / expected_batch_size.

        The noise belongs to this step's number (``steps``), which then goes up by one. An empty batch is a noisy step.

        Args:
            x: Inputs, as for :meth:`clipped_sum`.
            y: Targets, likewise.
            mask: Bool [B]; examples whose entry is False contribute nothing.

        Returns:
            The result of :meth:`clipped_sum`, whose ``sums`` hold the released gradient.

        Raises:
            ValueError: ``expected_batch_size`` is not set; or as :meth:`clipped_sum`.
            PrivacyError: as :meth:`clipped_sum`.
            UnsupportedError: as :meth:`clipped_sum`.
        """
        with self._attempt():
            return self._privatize(x, y, mask)

    def _attempt(self) -> AbstractContextManager[None]:
        return nullcontext() if self.together is None else self.together.attempt()

    def _privatize(self, x: Any, y: Any, mask: Tensor | None) -> ClippedSum:
        if self.expected_batch_size is None:
            raise ValueError(
                "expected_batch_size is not set; it is the public divisor of the update, never len(batch)."
            )
        self._check_model()
        # The divisor goes into the clip factors and the noise, and the noise is drawn where the sums are then added: no
        # pass over the sums is spent on either.
        scale = 1.0 / check_divisor(self.expected_batch_size)
        if not self.steps:
            warn_without_noise(self.noise_multiplier)
        release = Release.by(self, self.accumulator.check_noise(self.noise_multiplier, scale))
        self._withdraw()
        alone = self.together is None
        begin = functools.partial(release.begin, self.accumulator) if alone else self.accumulator.clear
        try:
            result = self._sums.add(x, y, mask, scale, begin)
            if self.together is not None:
                self.together.finish(self, release, (x, y))
            elif not self.noise.may_come_first:
                release.add(self.accumulator)
        except BaseException:
            # The next attempt draws the same noise: nothing of this one may stay.
            self.accumulator.clear()
            raise
        self.noise.note_made(self.steps)
        self.steps += 1
        for param, released in self.accumulator.released().items():
            param.grad = released
        return result

    @uncompiled
    def step(self, x: Any, y: Any, mask: Tensor | None = None) -> ClippedSum:
        """Make one private update: :meth:`privatize`, then ``optimizer.step()``.

        Args:
            x: Inputs, as for :meth:`clipped_sum`.
            y: Targets, likewise.
            mask: Bool [B]; examples whose entry is False contribute nothing.

        Returns:
            The result of :meth:`privatize`.

        Raises:
            ValueError: the engine has no optimizer; or as :meth:`privatize`.
            PrivacyError: as :meth:`clipped_sum`.
            UnsupportedError: as :meth:`clipped_sum`.
        """
        if self.optimizer is None:
            raise ValueError("This engine has no optimizer; pass one, or call privatize() and update the parameters.")
        with self._attempt():
            checks.check_optimizer(self.optimizer, self.accumulator.targets.values())
            result = self.privatize(x, y, mask)
        self.optimizer.step()
        return result

    def _withdraw(self) -> None:
        """Set ``grad`` to None while the buffer in which the last one lies is written anew.

        It would show sums without noise, and what a loss does to it (``zero_grad(set_to_none=False)``, say) would be
        done to the noise.
        """
        for param in self.accumulator.targets.values():
            param.grad = None

    # ---- checks and explanation

    def _check_model(self) -> None:
        """Before every batch: the same parameters are trained, and nothing was compiled or exchanged since."""
        self._sums.settle()
        self.accumulator.check_unchanged()
        check_hooks(self.parameters)
        if torch.is_inference_mode_enabled():
            raise PrivacyError(
                "torch.inference_mode() records no gradients: every example's would count as zero; leave it."
            )
        if self._structure != checks.structure_of(self.model):
            raise PrivacyError(
                "A layer or a parameter of the model was added, removed or replaced by another object since the engine "
                "was built (load_state_dict(assign=True) does so); build a new engine."
            )
        if self.accumulator.lies_otherwise:  # model.to(memory_format=torch.channels_last), say
            self.accumulator.follow()
        for module in self._modules:
            if module._compiled_call_impl is not None:
                refuse_compiled(self.model)

    def explain(self) -> str:
        """Return how the engine computes, one line per trained parameter, then physical batch sizes and kernels.

        A parameter's line says how its norm and its sum are computed; sizes are those of the largest batch so far.
        """
        return self._sums.explain()
