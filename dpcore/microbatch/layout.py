"""The probe of a model before its first batch of a kind: which modules need the fallback, where layers see the batch.

With an odd number of copies of one example, an input whose first dimension is not the batch does not pass for one by
having the batch's length, here as in the real batch; and a parameter that receives a gradient was used by an operation
without a rule. Either way the module around it is recorded as a whole, and the model is run again.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from dpcore.errors import NoRuleError, UnsupportedError
from dpcore.microbatch.memory import ran_out
from dpcore.rerun.snapshot import preserved
from dpcore.rules.recurrent import packed_noted
from dpcore.rules.vmap import Fallback, Interception, ModuleUse, owner
from dpcore.tape.derived import ThroughUse
from dpcore.tape.tape import BESIDE, IN_ROWS, Tape
from dpcore.tree import flatten, unflatten


def copies(value: Any, batch_size: int, count: int, padded: bool | None = None) -> Any:
    """``count`` copies of the first example of a batch: of every tensor whose first dimension is ``batch_size``; zeros
    where the batch is empty.

    ``padded``: whether masks (integers or booleans [B, T] that are 0 or 1) are to hide the last position or none.
    Models take another way where nothing is padded.
    """
    leaves, structure = flatten(value)
    copied = []
    for leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == batch_size:
            one = leaf[:1] if batch_size else leaf.new_zeros(1, *leaf.shape[1:])
            if padded is not None and is_mask(leaf):
                one = torch.ones_like(one)
                one[:, -1] = int(not padded)
            leaf = one.expand(count, *leaf.shape[1:]).contiguous()
        copied.append(leaf)
    return unflatten(structure, copied)


def is_mask(leaf: Any) -> bool:
    """Return whether this is a mask of positions: [B, T], T > 1, of zeros and ones."""
    whole = isinstance(leaf, Tensor) and leaf.dim() == 2 and leaf.shape[1] > 1 and not leaf.is_floating_point()
    return whole and not leaf.is_complex() and bool(((leaf == 0) | (leaf == 1)).all())


def probe_sizes(value: Any, batch_size: int, model: nn.Module) -> tuple[int, int]:
    """Two numbers of examples that are neither the batch's nor any other dimension of the inputs, of the parameters or
    of the buffers, and hardly both of them another one of the model's: should they be, the real batch is refused with
    an error.
    """
    known = [leaf for leaf in flatten(value)[0] if isinstance(leaf, Tensor)]
    taken = {batch_size}.union(*(tensor.shape for tensor in (*known, *model.parameters(), *model.buffers())))
    free = (n for n in itertools.count(7, 2) if n not in taken and all(n % k for k in range(3, n, 2)))
    return next(free), next(free)


def _shape_beside(x: Tensor, dim: int) -> torch.Size:
    """The shape of a tensor without its batch, which is in ``dim``: 0, 1, IN_ROWS or -1 (none)."""
    if dim < 0:
        return x.shape
    return x.shape[1:] if dim in (0, IN_ROWS) else x.shape[:1] + x.shape[2:]


VARIED_KINDS = 3
"""Kinds of batches for which a model is also probed with padding and without."""


FEWEST_AT_FIRST = 6
"""Examples that the first passes take in any case: with fewer an experiment on mixing sees too little."""
BYTES_AT_FIRST = 32 * 2**20
"""Beyond so many of a graph the first passes would need more memory than later ones, which go in pieces."""

_FIRST = {0}


class _Recording:
    """A pass through a model that one thread runs at a time, on a tape if there is one."""

    def __init__(self, layout: Layout, tape: Tape | None) -> None:
        self._layout = layout
        self._tape = tape

    def __enter__(self) -> None:
        self._layout._begin()
        if self._tape is not None:
            try:
                self._tape.__enter__()
            except BaseException:
                self._layout._busy.clear()
                raise

    def __exit__(self, *exception: Any) -> None:
        try:
            if self._tape is not None:
                self._tape.__exit__(*exception)
        finally:
            self._layout._busy.clear()


class Layout:
    """Knowledge of a model's insides.

    ``fallbacks``: modules, by name, to record as a whole. ``recurrent``: its recurrent layers. For every parameter that
    was used, the dimensions, 0 or 1 (or IN_ROWS, or the shapes of tensors without a batch), in which its layer sees the
    batch: by themselves the lengths cannot tell, where a batch has as many examples as time steps.
    """

    def __init__(self, model: nn.Module, fallbacks: dict[str, Fallback]) -> None:
        self.model = model
        self.fallbacks = fallbacks
        self.recurrent = [m for m in model.modules() if isinstance(m, nn.RNNBase)]
        self.averaged: dict[Parameter, bool] = {}
        """Embeddings: whether nothing but one mean or sum over the positions sees their vectors."""
        self._dims: dict[tuple[Parameter, str], set[int | torch.Size]] = {}
        self._shapes: set[tuple[Parameter, str, int, torch.Size]] = set()
        """With what shapes beside the batch."""
        self.derived: set[str] = set()
        """Parameters from which a tensor is computed before any example comes in."""
        self.learnt = 0
        """Kinds of batches that were learnt about."""
        self.example_bytes = 0.0
        """Bytes that the graph of one example holds, about; of the largest kind."""
        self._probing = False
        self._busy: dict[str, int] = {}

    def tape(self, names: dict[Parameter, str], batch_size: int, scale: float | None = None) -> Tape:
        """Return a tape for a pass of ``batch_size`` examples through the model; open it by :meth:`recording`."""
        return Tape(names, batch_size, scale, self.dim, self.averaged)

    @property
    def drops_activations(self) -> bool:
        """Return whether activations under torch.utils.checkpoint may be dropped: all of the model goes by rules."""
        return not self.fallbacks and not self.recurrent

    def recording(self, tape: Tape) -> AbstractContextManager[None]:
        """Record a pass through the model on ``tape``: modules without a rule as a whole, anything else by rules.

        Raises:
            UnsupportedError: another thread is in the midst of a pass through the same model.
        """
        return self._recording_all(tape) if self.fallbacks or self.recurrent else _Recording(self, tape)

    @contextmanager
    def _recording_all(self, tape: Tape) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(_Recording(self, None))
            for fallback in self.fallbacks.values():
                stack.enter_context(Interception(tape, fallback))
            if self.recurrent:
                stack.enter_context(packed_noted(tape, self.recurrent))
            with tape:
                yield

    def _begin(self) -> None:
        thread = threading.get_ident()
        if self._busy.setdefault("thread", thread) != thread:
            raise UnsupportedError(
                "Two threads run one private model at the same time, so that the passes of both would be recorded as "
                "one; give each thread a model of its own."
            )

    def at_first(self, most: int) -> int:
        """Return how many examples, ``most`` of them, may be in work at once while only the probe has told what they
        take.
        """
        return min(most, max(FEWEST_AT_FIRST, int(BYTES_AT_FIRST / max(self.example_bytes, 1.0))))

    def refuse_unrepeatable(self) -> None:
        """UnsupportedError where gradients by example need the graph of their own batch."""
        for fallback in self.fallbacks.values():
            if fallback.unrepeatable:
                raise UnsupportedError(
                    f"{fallback.name or 'The model'} has no rule and draws random numbers (dropout?) or gives "
                    "something else when it is run again, which cannot be compiled; build the engine with "
                    "compile=False."
                )

    def dim(self, key: tuple[Parameter, str], tape: Tape, x: Tensor, features: int) -> int:
        """Return the batch dimension of x, a tensor met by a parameter: 0, 1, IN_ROWS or -1 (none).

        While probing, it is found by its length.
        """
        if type(x) is Parameter and any(x is param for param in self.model.parameters()):
            return -1  # a frozen weight beside its trained bias, however many rows it has
        known = self._dims.setdefault(key, set())
        if known == _FIRST and not self._probing and not tape.rows:
            return 0 if x.shape[:1] == (tape.batch_size,) else -1
        fits = [IN_ROWS] if tape.in_rows(x) else []
        fits += [d for d in (0, 1) if (d == 0 or x.dim() > d + features) and x.shape[d : d + 1] == (tape.batch_size,)]
        if self._probing:
            found = fits[0] if fits else -1
            known.add(found if fits else x.shape)
            self._shapes.add((*key, found, _shape_beside(x, found)))
            return found
        if not known and key[1].startswith(BESIDE) and tape.batch_size in x.shape:
            raise NoRuleError(
                f"{tape.parameters[key[0]]} met a tensor of shape {tuple(x.shape)} in a part of the model that did not "
                "run when the model was first looked at, so it is not known whether that tensor holds a batch; let the "
                "model take the same way whatever its inputs hold.",
                key[:1],
            )
        possible = [d for d in fits if d in known] + ([-1] if x.shape in known else [])
        if len(possible) > 1:
            possible = [d for d in possible if (*key, d, _shape_beside(x, d)) in self._shapes] or possible
        if len(possible) > 1:
            raise NoRuleError(
                f"{tape.name(key[:1])} is used on inputs that have the batch in different places, and shape "
                f"{tuple(x.shape)} fits more than one of them for {tape.batch_size} examples; keep the batch first.",
                key[:1],
            )
        return possible[0] if possible else -1

    def learn(
        self,
        names: dict[Parameter, str],
        run: Callable[[int], Any],
        counts: Sequence[int],
        variants: Sequence[Callable[[int], Any]] = (),
    ) -> None:
        """Finds out about one kind of batch; ``run(count)`` calls the model on that many examples, and so does each of
        ``variants`` on examples that may lead it another way.

        UnsupportedError where even the whole model does not keep its batch first. Random state is left as it was.
        """
        self._learn(names, run, counts)
        self.learnt += 1
        for variant in variants if self.learnt <= VARIED_KINDS else ():
            try:
                self._learn(names, variant, counts)
            except Exception as error:  # of ours, which the model may well refuse; the user's inputs were accepted
                if ran_out(error):
                    raise

    def _learn(self, names: dict[Parameter, str], run: Callable[[int], Any], counts: Sequence[int]) -> None:
        """One probe after the other, until every module without a rule is known."""
        modules = dict(self.model.named_modules())
        with preserved(self.model):
            while True:
                try:
                    self._probing = True
                    self._check(run, names, counts[0])
                    self._probing = False
                    if any(dims - {0} for dims in self._dims.values()):
                        # A second length makes it certain where the batch was.
                        self._check(run, names, counts[1])
                    return
                except NoRuleError as error:
                    name = owner(self.model, error.params, list(self.fallbacks))
                    if name is None:
                        raise UnsupportedError(str(error)) from error
                    kept = {n: f for n, f in self.fallbacks.items() if name and not n.startswith(name + ".")}
                    self.fallbacks = {**kept, name: Fallback(name, modules[name])}
                finally:
                    self._probing = False

    def _check(self, run: Callable[[int], Any], names: dict[Parameter, str], count: int) -> None:
        tape = self.tape(names, count)
        tape.probing = True
        with torch.enable_grad(), self.recording(tape):
            output = run(count)
        held = tape.made_bytes + sum(use.stash_bytes() for use in tape.uses)
        self.example_bytes = max(self.example_bytes, held / count)
        for use in tape.uses:
            if isinstance(use, ThroughUse):
                self.derived |= {names[root] for derivation in use.stands.values() for root in derivation.roots}
            if isinstance(use, ModuleUse):
                # What has the batch's length here and in the real batch has the batch first.
                fallback = next(f for f in self.fallbacks.values() if f.module is use.module)
                batched = frozenset(use.call.batched)
                fallback.batched = batched if fallback.batched is None else fallback.batched & batched
                if type(use) is ModuleUse:
                    use.check_alone(fallback)
        outputs = [leaf for leaf in flatten(output)[0] if isinstance(leaf, Tensor) and leaf.requires_grad]
        if not outputs:
            return
        params = [p for p in names if p.requires_grad]
        wanted: list[Any] = [*params, *(edge for edge, _ in tape.forbidden), *tape.guards]
        ones = [torch.ones_like(o) for o in outputs]
        grads = torch.autograd.grad(outputs, wanted, ones, allow_unused=True)
        for (_, refuse), grad in zip(tape.forbidden, grads[len(params) :], strict=False):
            refuse(grad)
        raw = [p for p, g in zip(params, grads, strict=False) if g is not None]
        if raw:
            tape.refuse_raw(raw[0])
