"""The probe of a model before its first batch of a kind: which modules need the fallback, where layers see the batch.

With an odd number of copies of one example, an input whose first dimension is not the batch does not pass for one by
having the batch's length, here as in the real batch; and a parameter that receives a gradient was used by an operation
without a rule. Either way the module around it is recorded as a whole, and the model is run again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from dpcore.errors import NoRuleError, NotLearnt, PrivacyError, UnsupportedError
from dpcore.gathering import Gathering, gathering_of
from dpcore.microbatch.looks import Look
from dpcore.microbatch.memory import ran_out
from dpcore.rerun.side_effects import SideEffects
from dpcore.rerun.snapshot import Before, RandomNumbers, draw_on, preserved
from dpcore.rules.recurrent import packed_noted
from dpcore.rules.vmap import Fallback, Interception, ModuleUse, owner
from dpcore.tape import own_passes
from dpcore.tape.batch_dims import IN_ROWS, BatchDims
from dpcore.tape.derived import NotKept, ThroughUse, storage_of
from dpcore.tape.sources import handed_on
from dpcore.tape.tape import Tape
from dpcore.tree import flatten

T = TypeVar("T")


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

LOOKS = 8
"""How often a model is looked at again for one pass."""
TRIES = 16
"""How often it is run for such a look, where random numbers decide which parts of it run."""

_FIRST = {0}


LOOKED_AT = (
    "This happened while dpcore looked at copies of an example. The first tensor of the model's inputs says how many "
    "examples there are: put one [B, ...] first, and constants behind it or into a buffer."
)


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
        self._shards = gathering_of(model)
        self.looks = 0
        """How often the model was looked at."""
        self.learnt = 0
        """Kinds of batches that were learnt about."""
        self.unmet: dict[Parameter, str] = {p: n for n, p in model.named_parameters() if p.requires_grad}
        """Trained parameters, by name, that no look has met: one of them at work is a reason for another look."""
        self.unchecked: set[Parameter] = set()
        """Those that only another look has met, and no experiment yet."""
        self.example_bytes = 0.0
        """Bytes that the graph of one example holds, about; of the largest kind."""
        self._probing = False
        self._busy: dict[str, int] = {}

    def tape(self, names: dict[Parameter, str], batch_size: int, scale: float | None = None) -> Tape:
        """Return a tape for a pass of ``batch_size`` examples through the model; open it by :meth:`recording`."""
        tape = Tape(names, batch_size, scale, self.dim, self.averaged)
        tape.uses.unmet = self.unmet if batch_size else {}  # an empty batch, maybe the first one, has no gradients
        return tape

    def attempt(self, run: Callable[[], T], look_again: Callable[[], object] | None) -> T:
        """Return ``run()``, a pass; where it uses a part of the model as no look has seen it, after another look.

        It then runs anew, and finds everything as it was. (What a pass leaves in attributes and buffers is kept where a
        part of the model is known not to have run yet.)
        """
        for _ in range(LOOKS if look_again is not None else 0):
            before = Before(self.model) if self.unmet else None
            try:
                return run()
            except NoRuleError:
                if before is not None:
                    before.restore()
            look_again()  # type: ignore[misc]
        return run()

    @property
    def drops_activations(self) -> bool:
        """Return whether activations under torch.utils.checkpoint may be dropped: all of the model goes by rules."""
        return not self.fallbacks and not self.recurrent

    def recording(self, tape: Tape) -> AbstractContextManager[None]:
        """Record a pass through the model on ``tape``: modules without a rule as a whole, anything else by rules.

        Raises:
            UnsupportedError: another thread is in the midst of a pass through the same model.
        """
        alone = not (self.fallbacks or self.recurrent or self._shards)
        return _Recording(self, tape) if alone else self._recording_all(tape)

    @contextmanager
    def _recording_all(self, tape: Tape) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(_Recording(self, None))
            for fallback in self.fallbacks.values():
                is_unit = self._shards is not None and fallback.module in self._shards.modules
                stack.enter_context(Interception(tape, fallback, hooked=not is_unit))
            if self.recurrent:
                stack.enter_context(packed_noted(tape, self.recurrent))
            if self._shards is not None:
                stack.enter_context(handed_on(tape.sources, self._shards.modules))
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

    def dim(self, key: tuple[Parameter, str], batch: BatchDims, x: Tensor, features: int) -> int:
        """Return the batch dimension of x, a tensor met by a parameter: 0, 1, IN_ROWS or -1 (none).

        While probing, it is found by its length.
        """
        if type(x) is Parameter and any(x is param for param in self.model.parameters()):
            return -1  # a frozen weight beside its trained bias, however many rows it has
        known, size = self._dims.setdefault(key, set()), (batch.size,)
        if known == _FIRST and not self._probing and not batch.rows.known and x.shape[:1] == size != x.shape[1:2]:
            return 0
        fits = [IN_ROWS] if batch.in_rows(x) else []
        fits += [d for d in (0, 1) if (d == 0 or x.dim() > d + features) and x.shape[d : d + 1] == size]
        if self._probing:
            found = fits[0] if fits else -1
            known.add(found if fits else x.shape)
            self._shapes.add((*key, found, _shape_beside(x, found)))
            return found
        possible = [d for d in fits if d in known] + ([-1] if x.shape in known else [])
        if not batch.size:  # of which no gradient is taken
            return (possible or fits or [-1])[0]
        seen = [d for d in possible if (*key, d, _shape_beside(x, d)) in self._shapes]
        if len(fits) > 1 and not seen and batch.size > 1:  # at that length, a way that it has not gone
            raise NotLearnt(f"Parameter {batch.sources.name(key[0])}", key[:1])
        if len(possible) > 1:
            possible = seen or possible
        if len(possible) > 1 and batch.size > 1:  # all of one example's gradient is its own, wherever it is
            raise NoRuleError(
                f"{batch.sources.layer(key[:1])} is used on inputs that have the batch in different places, and shape "
                f"{tuple(x.shape)} fits more than one of them for {batch.size} examples; keep the batch first.",
                key[:1],
            )
        constant = not fits and any(isinstance(place, torch.Size) for place in known)  # of another length
        if not possible and not constant:
            raise NotLearnt(f"Parameter {batch.sources.name(key[0])}", key[:1])
        return possible[0] if possible else -1

    def learn(
        self,
        names: dict[Parameter, str],
        looks: Sequence[Look],
        variants: Sequence[Callable[[int], Any]] = (),
        again: bool = False,
    ) -> None:
        """Finds out about one kind of batch by the first of ``looks`` that the model does not fail on; the last of them
        has the batch as it is.

        Args:
            names: The trained parameters.
            looks: See :func:`dpcore.microbatch.looks.looks`.
            variants: Calls the model on examples that may lead it another way than the first look's.
            again: Whether this is another look at a kind that was learnt about.

        Raises:
            UnsupportedError: even the whole model does not keep its batch first, or cannot be looked at.
        """
        before = set(self.unmet)
        for look in looks:
            known = {key: set(dims) for key, dims in self._dims.items()}, set(self._shapes)
            try:
                self._learn(names, look, TRIES if again else 1)
                break
            except Exception as error:
                if isinstance(error, NotLearnt) and len(look.counts) > 1 and look is not looks[-2]:
                    self._dims, self._shapes = known
                    continue
                if isinstance(error, UnsupportedError | PrivacyError) or ran_out(error):
                    raise
                if look is looks[-1]:
                    self._refuse(look, error)
                if not looks[-1].counts:
                    self._refuse(looks[-1], error)
        if again:
            self.unchecked |= before - self.unmet.keys()
            return
        self.learnt += 1
        for variant in variants if self.learnt <= VARIED_KINDS and look is looks[0] else ():
            try:
                self._learn(names, Look(variant, look.counts))
            except Exception as error:  # of ours, which the model may well refuse; the user's inputs were accepted
                if ran_out(error):
                    raise

    def _refuse(self, look: Look, error: Exception) -> None:
        """UnsupportedError about a model that fails on every look; its own error where it fails on the batch, too."""
        if _raised_here(error):  # what dpcore refuses may crash torch: first states of another shape do
            raise error
        with preserved(self.model), torch.no_grad():
            look.run(0)
        raise UnsupportedError(
            f"The model runs on this batch, and fails while dpcore looks at it ({type(error).__name__}: {error}): its "
            "inputs are not all of one row, or one entry of a list, per example, so that copies of an example are no "
            "batch, and in the batch itself the number of examples is that of another dimension, or what runs cannot "
            "be recorded. Pass tensors [B, ...], padded and with a mask."
        ) from error

    def _learn(self, names: dict[Parameter, str], look: Look, tries: int = 1) -> None:
        """One probe after the other, until every module without a rule is known.

        And ``tries`` of them in all while parts of the model have not run, if random numbers may be what decides.
        """
        modules = dict(self.model.named_modules())
        done = 0
        effects = SideEffects(self.model)  # put back before each pass: a model may count its calls, and go by them
        with preserved(self.model):
            draw_on(self.looks)
            self.looks += 1
            while True:
                done += 1
                try:
                    numbers = RandomNumbers(self.model)
                    self._probing = True
                    self._check(look.run, names, look.counts[0], effects)
                    self._probing = False
                    if any(dims - {0} for dims in self._dims.values()) and len(look.counts) > 1:
                        # A second length makes it certain where the batch was.
                        self._check(look.run, names, look.counts[1], effects)
                    if done >= tries or not self.unmet or numbers.same(RandomNumbers(self.model)):
                        return
                except NotLearnt:
                    if done >= TRIES:  # each with other random numbers
                        raise
                except NoRuleError as error:
                    name = owner(self.model, error.params, list(self.fallbacks))
                    if name is None:
                        raise UnsupportedError(str(error)) from error
                    kept = {n: f for n, f in self.fallbacks.items() if name and not n.startswith(name + ".")}
                    _check_gathered(name, modules[name], self._shards)
                    self.fallbacks = {**kept, name: Fallback(name, modules[name])}
                finally:
                    self._probing = False

    def _check(self, run: Callable[[int], Any], names: dict[Parameter, str], count: int, effects: SideEffects) -> None:
        tape = self.tape(names, count)
        tape.probing, tape.uses.unmet = True, {}
        try:
            with _nothing_saved():
                outputs = self._outputs(tape, run, count, effects)
            unseen = not _may_be_reached(tape, names, outputs)
        except (UnsupportedError, PrivacyError):
            raise
        except Exception:  # a gradient within the forward pass asks for what is saved, say
            unseen = False
        if unseen:
            self._note(tape, names, count)
            return
        tape = self.tape(names, count)
        tape.probing, tape.uses.unmet = True, {}
        outputs = self._outputs(tape, run, count, effects)
        self._note(tape, names, count)
        params = [p for p in names if p.requires_grad]
        wanted: list[Any] = [*params, *(edge for edge, _ in tape.edges.forbidden), *tape.edges.guards]
        ones = [torch.ones_like(o) for o in outputs]
        grads = torch.autograd.grad(outputs, wanted, ones, allow_unused=True)
        for (_, refuse), grad in zip(tape.edges.forbidden, grads[len(params) :], strict=False):
            refuse(grad)
        raw = [p for p, g in zip(params, grads, strict=False) if g is not None]
        if raw:
            own_passes.refuse_raw(tape, raw[0])

    def _outputs(self, tape: Tape, run: Callable[[int], Any], count: int, effects: SideEffects) -> list[Tensor]:
        """The outputs with a gradient of a pass on ``tape``."""
        effects.restore()
        with torch.enable_grad(), self.recording(tape):
            output = run(count)
        return [leaf for leaf in flatten(output)[0] if isinstance(leaf, Tensor) and leaf.requires_grad]

    def _note(self, tape: Tape, names: dict[Parameter, str], count: int) -> None:
        """Notes what a probe's pass has shown."""
        held = tape.made_bytes + sum(use.stash_bytes() for use in tape.uses)
        self.example_bytes = max(self.example_bytes, held / count)
        held_by = {storage_of(p): p for p in (() if self._shards is None else self._shards.shards)}
        for use in tape.uses:
            if isinstance(use, ThroughUse) and self._shards is not None:
                for way in use.stands.values():
                    if read := way.read(held_by):
                        self._shards.note_read(way.roots, read)
            if isinstance(use, ModuleUse):
                # What has the batch's length here and in the real batch has the batch first.
                fallback = next(f for f in self.fallbacks.values() if f.module is use.module)
                batched = frozenset(use.call.batched)
                fallback.batched = batched if fallback.batched is None else fallback.batched & batched
                if self._shards is not None:
                    self._shards.note_read(use.params, self._shards.whole_of(use.module))
                if type(use) is ModuleUse and (self._shards is None or self._shards.is_all):
                    with nullcontext() if self._shards is None else self._shards.gathered(use.module):
                        use.check_alone(fallback)
        for param in tape.uses.met:
            self.unmet.pop(param, None)


def _check_gathered(name: str, module: nn.Module, shards: Gathering | None) -> None:
    """UnsupportedError where what is to be run again as a whole is gathered in several units."""
    units = () if shards is None else shards.modules
    inside = [n for n, part in module.named_modules() if n and part in units]
    if inside:
        raise UnsupportedError(
            f"{name} has no rule and would be run again example by example, but {inside[0]} within it was given to "
            "fully_shard by itself and is gathered at another time. Give fully_shard the whole of that layer alone, or "
            "use DifferentiallyPrivateDistributedDataParallel."
        )


def _may_be_reached(tape: Tape, names: dict[Parameter, str], outputs: list[Tensor]) -> bool:
    """Return whether a path leads from the outputs to what no gradient may reach, or to a parameter itself."""
    ends = {id(end) for end in (*names, *tape.edges.guards)}
    forbidden = {edge.node for edge, _ in tape.edges.forbidden}
    seen = {output.grad_fn for output in outputs if output.grad_fn is not None}
    if any(id(output) in ends for output in outputs):
        return True
    waiting: list[Any] = list(seen)
    while waiting:
        node = waiting.pop()
        if node in forbidden or id(getattr(node, "variable", None)) in ends:
            return True
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return False


def _nothing_saved() -> torch.autograd.graph.saved_tensors_hooks:
    """A context in which graphs keep no tensors: it is only looked at where their paths lead."""
    return torch.autograd.graph.saved_tensors_hooks(storage_of, _refuse_saved)


def _refuse_saved(storage: int) -> Tensor:
    raise NotKept(storage)


def _raised_here(error: Exception) -> bool:
    """Return whether dpcore's own code has raised an error; to one of torch's the remedy is noted."""
    frames = error.__traceback__
    while frames is not None and frames.tb_next is not None:
        frames = frames.tb_next
    is_ours = frames is not None and str(frames.tb_frame.f_globals.get("__name__", "")).startswith("dpcore.")
    if is_ours and not isinstance(error, UnsupportedError | PrivacyError):
        error.add_note(LOOKED_AT)
    return is_ours
