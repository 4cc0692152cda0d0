"""The tape: for every use of a parameter in a forward and backward pass, its input and its output's gradient.

While a :class:`Tape` is active, calls of the torch functions that have a rule (``F.linear``, ``torch.conv2d``,
``F.embedding`` ...) are intercepted, whichever module makes them. The parameters enter detached, so that autograd
computes no weight gradients and, for layers fed by data, no input gradients either; the output's place in the graph is
remembered, and one call of ``torch.autograd.grad`` then yields the gradients at all those places.
"""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, TypeGuard, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import Parameter
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten
from torch.utils.weak import WeakTensorKeyDictionary

from dpcore.errors import NoRuleError, NotLearnt, UnsupportedError
from dpcore.tape.checkpointing import CHECKPOINTING, kept_by_graph
from dpcore.tape.compiled_functions import COMPILED_FUNCTIONS
from dpcore.tape.deferred_lookups import Lookups
from dpcore.tape.derived import Derivation, ThroughUse
from dpcore.tape.dropped_use import Arrival, DroppedUse, inputs_of
from dpcore.tape.rows import Rows
from dpcore.tape.uses import DERIVING, HANDLERS, REWRITES, FormedUse, Use, handles

MaybeTensor = TypeVar("MaybeTensor", Tensor, Tensor | None)
FindBatch = Callable[[tuple[Parameter, str], "Tape", Tensor, int], int]
"""``find_batch((parameter, kind of tensor), tape, tensor, features)``: the dimension that is the batch, or -1."""
BESIDE = "beside "
"""Kinds of tensors that parameters meet in functions: "beside add"."""
HALF = (torch.bfloat16, torch.float16)
PASS_OF: Any = WeakTensorKeyDictionary()
"""Leaf of autograd's graph, made by a recorded pass -> weak reference to its tape."""
LOOKS: set[int] = set()
"""Backward passes that only look at the graph between a loss and outputs; they may come to no recorded place."""
STARTED_WITH: dict[int, float] = {}
"""Number of a backward pass under way -> what it started with at the loss, where that is not 1."""
EDGES_OWN = "ownership_token" in GradientEdge._fields
IN_ROWS = 2
"""In the place of a dimension: the first one holds several rows for each example, [B * k, ...]."""


class _Attach(torch.autograd.Function):
    """Gives a tensor that needs no gradient a place in the graph, without a copy.

    A leaf with requires_grad would do, but refuses in-place activations behind it.
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor, anchor: Tensor) -> Tensor:
        ctx.mark_dirty(output)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        return None, None


SECOND_ORDER = (
    "The model or its loss takes derivatives of its own (create_graph=True, torch.func or forward-mode differentiation "
    "within a private pass). What is recorded holds the weights as constants, so their part in such derivatives would "
    "be lost; compute such penalties on a copy of the model, without privacy."
)


OF_PARAMETERS = (
    "The model takes gradients of trained parameters within its forward pass (a step of training within the model, or "
    "backward() without inputs=). They are added up over the examples of the batch, and what is recorded holds the "
    "weights as constants. Ask torch.autograd.grad for gradients of tensors by example alone."
)


def started_with() -> float:
    """Return what the backward pass under way started with at the loss; a tape's ``scale`` undoes the rest."""
    return STARTED_WITH.get(torch._C._current_graph_task_id(), 1.0)


def check_first_order() -> None:
    """UnsupportedError where a transform of torch.func or forward-mode differentiation is at work."""
    if torch._C._functorch.maybe_current_level() is not None or forward_ad._current_level >= 0:
        raise UnsupportedError(SECOND_ORDER)


class Tape(TorchFunctionMode):
    """Records the uses of ``parameters`` (names by identity) for a batch of ``batch_size`` examples."""

    _within_forward = False
    """Whether the model is taking a gradient of its own, of which nothing is recorded."""
    inputs: Sequence[Tensor] = ()
    """The tensors that the module is called with."""

    def __init__(
        self,
        parameters: dict[Parameter, str],
        batch_size: int,
        scale: float | None = None,
        find_batch: FindBatch | None = None,
        averaged: dict[Parameter, bool] | None = None,
    ) -> None:
        """``scale`` None: gradients come from :meth:`backward`.

        A number: they come from whatever backward pass runs through the recorded places, and are multiplied by it (a
        mean loss divides every gradient by the batch size). ``find_batch``: which dimension of a tensor is the batch;
        None: every layer sees the batch first. ``averaged``: embeddings by whether nothing but one mean or sum over the
        positions sees their vectors.
        """
        super().__init__()
        self.scale = scale
        self.rounds = False
        """Whether something was computed in half precision, to which its gradient is rounded: a division shows."""
        self.may_start_with_length = False
        """Whether a loss of this pass is divided by the batch's length, and its backward pass may undo that."""
        self.iteration: Any = None
        """Result of its first backward pass."""
        self.on_fire: Callable[[Tape], None] = lambda tape: None
        self.number = 0
        """Which of a module's passes this is."""
        self.on_again: Callable[[Tape], None] = lambda tape: None
        """Refuses the second run of a checkpointed function where it may not be that of the first run's batch."""
        self._task = -1
        self._find_batch = find_batch
        self.averaged = {} if averaged is None else averaged
        self.probing = False
        self.made_bytes = 0
        """While probing: bytes of what functions with a gradient returned, which is about what their graph holds."""
        self.stands: dict[Parameter, Derivation] = {}
        """Stand-ins for what is computed from parameters alone."""
        self._derived: dict[int, Derivation] = {}
        self._stand_of: dict[int, Parameter] = {}
        self.rows = Rows(batch_size)
        self.packed: PackedSequence | None = None
        """Sequences that a recurrent layer is working on: the function that it calls is not told their order."""
        self.lookups = Lookups()
        self.channels_last = any(_is_channels_last(p) for p in parameters)
        self.parameters = parameters
        self._trained = set(map(id, parameters))
        self.batch_size = batch_size
        self.uses = Uses(self.stands)
        self._edges: list[GradientEdge] = []
        self._owners: list[Any] = []
        """Nodes that own places of the graph, where torch's edges do not."""
        self.forbidden: list[tuple[GradientEdge, Callable[[Tensor | None], None]]] = []
        self._targets: list[Callable[[Tensor | None], None]] = []
        self.anchor = torch.zeros((), requires_grad=True)
        PASS_OF[self.anchor] = weakref.ref(self)
        self._resets: list[Callable[[], None]] = []
        """What forgets an earlier pass's gradients where :meth:`place` hands them on."""
        self.drops_activations = False
        """Whether what runs under torch.utils.checkpoint is run again in the backward pass."""
        self.dropped: list[tuple[Tensor, int]] | None = None
        """While such a function runs: the inputs of its uses, and their versions."""
        self.attached = 0
        """How many outputs were attached."""
        self.guards: list[Tensor] = []
        """Leaves that no gradient may reach: hooks at them raise an error. A backward pass of the tape's own asks for
        them, because it goes where it is sent and nowhere else."""

    def __enter__(self) -> Tape:
        CHECKPOINTING.open(self)
        COMPILED_FUNCTIONS.open()
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        COMPILED_FUNCTIONS.close()
        CHECKPOINTING.close()
        self.lookups.settle(self)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.lookups:
            pooled = self.lookups.pooled(self, func, args, kwargs)
            if pooled is not None:
                return pooled
            args, kwargs = self.lookups.formed(self, func, args, kwargs)
        handler = HANDLERS.get(func)
        sources = self._sources(args, kwargs) if handler is None or func in DERIVING or self._derived else ()
        result = self._computed(func, handler, args, kwargs, sources)
        if isinstance(result, Tensor) and result.requires_grad:
            self.rounds = self.rounds or result.dtype in HALF
            if self.probing and not result._is_view():
                self.made_bytes += result.nbytes
            if result.is_leaf and (func is Tensor.requires_grad_ or all(result is not given for given in args)):
                PASS_OF[result] = weakref.ref(self)
        if not sources or not self._is_derived(result):
            self.rows.follow(func, args, kwargs, result)
        return result

    def _computed(
        self,
        func: Callable[..., Any],
        handler: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        sources: Sequence[Parameter | Derivation],
    ) -> Any:
        """The result of a call, in which ``sources`` are parameters and what comes from them alone."""
        if not sources or not torch.is_grad_enabled():
            as_it_is = handler is None or torch.is_inference_mode_enabled()  # whose tensors count no changes
            return func(*args, **kwargs) if as_it_is else handler(self, func, args, kwargs)
        if (handler is None or func in DERIVING) and self._without_batch(func, args, kwargs, sources):
            return self.derive(func, args, kwargs, sources)
        rewrite = REWRITES.get(func)
        if rewrite is not None:
            rewritten = rewrite(self, func, args, kwargs)
            if rewritten is not None:
                return rewritten
        if handler is None:
            self.uses.meet([root for s in sources for root in (s.roots if isinstance(s, Derivation) else (s,))])
            return func(*args, **kwargs)
        _refuse_complex(func, args, kwargs, sources)
        if any(isinstance(source, Derivation) for source in sources):
            args, kwargs = self._with_stands(args), {name: self._with_stands(value) for name, value in kwargs.items()}
        return handler(self, func, args, kwargs)

    def call(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The result of a function as if the model had called it."""
        return self.__torch_function__(func, (), args, kwargs)

    # ---- what is computed from parameters alone

    def _is_derived(self, value: Any) -> bool:
        return id(value) in self._derived

    def _sources(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Parameter | Derivation]:
        """The trained parameters among the arguments, and what comes from trained parameters alone."""
        if not self._derived and not self.stands:  # by far the most calls have none: the fewest steps
            trained = self._trained
            for value in (*args, *kwargs.values()) if kwargs else args:
                if id(value) in trained or isinstance(value, list | tuple):
                    break
            else:
                return []
        found: list[Parameter | Derivation] = []
        for value in _tensors_in(args, kwargs):
            derivation = self._derived.get(id(value))
            if derivation is not None:
                found.append(derivation)
            elif self.trains(value):
                found.append(value)
        return found

    def is_source(self, value: Any) -> bool:
        """Return whether this is a trained parameter, or comes from trained parameters alone."""
        return self.trains(value) or self._is_derived(value)

    def _without_batch(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        sources: Sequence[Parameter | Derivation],
    ) -> bool:
        """Return whether no argument has a batch, so that the result comes from parameters and constants alone."""
        others = [v for v in _tensors_in(args, kwargs) if not self.is_source(v)]
        root = sources[0].roots[0] if isinstance(sources[0], Derivation) else sources[0]
        without = True
        for other in others:
            surely = other.requires_grad or self.rows.of(other) is not None
            if (surely and not self.probing) or not other.dim():
                without = without and not surely
                continue
            if self.probing and not surely and self.batch_size in other.shape[2:]:
                raise self._no_batch(other, (root,), 0)
            # Also where it is known now: the same call may get data without a gradient in another pass.
            batched = self.batch_dim(other, (root,), 0, BESIDE + func.__name__) >= 0
            without = without and not (surely or batched)
        return without

    def derive(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        sources: Sequence[Parameter | Derivation] | None = None,
        added: Callable[[], Use] | None = None,
    ) -> Any:
        """The result of a call without a batch, remembered as what comes from parameters alone.

        ``added``: makes the use where the result is added to a batch.
        """
        sources = self._sources(args, kwargs) if sources is None else sources
        # Under torch.utils.checkpoint each pull to a parameter would run the whole function again, at the step.
        with nullcontext() if self.dropped is None else kept_by_graph():
            result = func(*args, **kwargs)
        for tensor in _tensors_in((result,), {}):
            if tensor.requires_grad and not self.trains(tensor) and tensor.grad_fn is not None:
                self._derived[id(tensor)] = Derivation.of(func, args, kwargs, tensor, sources, added)
                self._stand_of.pop(id(tensor), None)
        return result

    def _with_stands(self, value: Any) -> Any:
        """Arguments with stand-ins in the place of what comes from parameters alone."""
        if isinstance(value, list | tuple) and type(value) in (list, tuple):
            return type(value)(self._with_stands(part) for part in value)
        derivation = self._derived.get(id(value))
        if derivation is None:
            return value
        stand = self._stand_of.get(id(value))
        if stand is None:
            stand = self._stand_of[id(value)] = derivation.stand(self.parameters[derivation.roots[0]])
            self.stands[stand] = derivation
            self.guards.append(stand)
        return stand

    def root(self, param: Parameter) -> Parameter:
        """The parameter itself, or the first one that a stand-in comes from."""
        derivation = self.stands.get(param) if self.stands else None
        return param if derivation is None else derivation.roots[0]

    def trains(self, tensor: Any) -> TypeGuard[Parameter]:
        """Return whether this is one of the trained parameters, or stands for what comes from them alone."""
        return id(tensor) in self._trained or (
            bool(self.stands) and isinstance(tensor, Parameter) and tensor in self.stands
        )

    def constant(self, tensor: MaybeTensor) -> MaybeTensor:
        """A trained parameter as a constant of the graph; anything else as it is."""
        return tensor.detach() if self.trains(tensor) else tensor  # type: ignore[return-value]

    def attach(self, output: Tensor, target: Callable[[Tensor | None], None]) -> Tensor:
        """Remembers ``output``'s place in the graph; ``target`` receives the gradient there.

        Returns the output to use. Where no gradients are recorded (torch.no_grad() in a forward pass), none can come.
        """
        if not torch.is_grad_enabled():
            return output
        check_first_order()
        self.attached += 1
        self.rounds = self.rounds or output.dtype in HALF
        output = _no_view(output)
        if not output.requires_grad:
            output = _Attach.apply(output, self.anchor)
        if self.scale is not None:
            _last(output, self._hook(target))
            return output
        self._edges.append(self._edge(output))
        self._targets.append(target)
        return output

    def _edge(self, output: Tensor) -> GradientEdge:
        """Return what get_gradient_edge does; of a node of torch's own it is the two fields alone.

        A node of Python's is owned by the graph behind it, which the model may drop; torch then crashes where it is
        asked for the gradient there. Newer torch has a token in the edge that owns the node; 2.6 has none.
        """
        node = output.grad_fn
        if node is not None and not isinstance(node, torch._C._FunctionBase):
            return GradientEdge(node, output.output_nr)
        if node is not None and not EDGES_OWN:
            with torch.enable_grad():
                self._owners.append(output.view_as(output).grad_fn)
        return get_gradient_edge(output)

    def give_way(self, tensor: Tensor) -> None:
        """Let a hook that is about to be registered on ``tensor`` come before what is recorded there.

        Where torch returns the gradient at a place in the graph, and goes on behind it, it is the one before all hooks.
        """
        for k, edge in enumerate(self._edges):
            if edge.node is tensor.grad_fn and edge.output_nr == tensor.output_nr:
                target = self._targets[k]
                _last(tensor, target)
                # What torch returns is left, but for None: nothing has come.
                self._targets[k] = functools.partial(_unless_there, target)

    def record(self, use: Use, output: Tensor, batch_dim: int = 0) -> Tensor:
        """Records ``use``, whose ``grad`` will be the gradient at ``output`` with ``batch_dim`` brought to the front.

        Returns the output to use.
        """
        size = self.batch_size
        if self.dropped is not None and torch.is_grad_enabled():
            late = DroppedUse(use)
            self.uses.append(late)
            self._resets.append(late.forget)
            nodes = late.drop(self.anchor, self.dropped)
            return self._attach_arrival(output, lambda grad: late.arrive(batch_first(grad, batch_dim, size), nodes))
        self.uses.append(use)
        for saved in inputs_of(use) if self.probing else ():
            saved.drop()  # nobody asks for a gradient

        def set_grad(grad: Tensor | None) -> None:
            use.grad = grad if grad is None else batch_first(grad, batch_dim, size)

        return self.attach(output, set_grad)

    def _attach_arrival(self, output: Tensor, arrive: Callable[[Tensor], None]) -> Tensor:
        """:meth:`attach` for who wants the gradient within the backward pass, and is to be the last who has it."""
        check_first_order()
        self.attached += 1
        self.rounds = self.rounds or output.dtype in HALF
        # Where the graph's edges are held, this tape must not be: see place().
        factor = None if self.scale is None else self._arrive
        return Arrival.apply(  # type: ignore[no-any-return]
            _no_view(output),
            self.anchor,
            lambda grad: arrive(scaled(grad.detach(), 1.0 if factor is None else factor(grad))),
        )

    @property
    def may_drop_activations(self) -> bool:
        """Return whether a function that is about to run under torch.utils.checkpoint may be run again later.

        What stands for vectors that were not looked up yet would be vectors then; and of functions within functions
        only the outer one is run again.
        """
        return self.drops_activations and self.dropped is None and not self.lookups

    def again(self) -> Tape:
        """Return a tape for the second run of a checkpointed function, which takes the same way as the first did.

        Raises:
            UnsupportedError: another batch went through the module since the first run.
        """
        self.on_again(self)
        tape = Tape(self.parameters, self.batch_size, self.scale, self._find_batch, self.averaged)
        tape.rows, tape.stands = self.rows, self.stands
        tape._derived, tape._stand_of = dict(self._derived), dict(self._stand_of)
        return tape

    def place(self, use: FormedUse, take: Callable[..., None]) -> Callable[[Tensor, Tensor], None]:
        """Record a use that forms what it needs within the backward pass.

        Returns what an autograd function behind ``anchor`` is to call with every gradient that comes there, and with
        its input; ``take`` gets both, and ``scale``.
        """
        check_first_order()
        self.uses.append(use)
        self.attached += 1
        self._resets.append(use.forget)

        if self.scale is None:
            # Without this tape, which holds the graph's edges: a circle would outlive the step.
            return torch.no_grad()(functools.partial(take, scale=1.0))

        @torch.no_grad()
        def hand_on(grad: Tensor, x: Tensor) -> None:
            take(grad, x, scale=self._arrive(grad))

        return hand_on

    def _arrive(self, grad: Tensor) -> float:
        """Note that a backward pass has come here; return the factor of its gradients."""
        if grad.requires_grad:
            raise UnsupportedError(
                "A backward pass with create_graph=True went through the private module; the gradient of a "
                "gradient mixes what is recorded. Compute such penalties on to_standard_module(), without privacy."
            )
        task = torch._C._current_graph_task_id()
        if task in LOOKS:
            raise UnsupportedError("The loss comes from these outputs by way of another private module.")
        if task != self._task and not self._within_forward:
            self._task = task
            self.on_fire(self)
        return (self.scale or 1.0) / started_with()

    def _hook(self, target: Callable[[Tensor | None], None]) -> Callable[[Tensor | None], None]:
        """Hands gradients to ``target``, added up where several backward passes run through the same place."""
        total: Tensor | None = None

        def hook(grad: Tensor | None) -> None:
            nonlocal total
            if grad is None or self._within_forward:
                return
            arrived = scaled(grad.detach(), self._arrive(grad))
            total = arrived if total is None else total + arrived
            target(total)

        return hook

    def forbid(self, output: Tensor, params: Sequence[Parameter]) -> Tensor:
        """An output whose first dimension is not the batch: it may be returned, but no gradient may flow back to it."""

        def refuse(grad: Tensor | None) -> None:
            if grad is not None:
                raise self._no_batch(output, params, 0)

        attached = self.attach(output, refuse)
        if attached.requires_grad:
            self.forbidden.append((self._edge(attached), refuse))
        return attached

    def backward(self, losses: Tensor, weights: Tensor) -> None:
        """Fills in every use's gradient from per-example ``losses`` [B], weighted by ``weights`` [B].

        The trained parameters themselves are asked for too: one that turns up was used in a way no rule has seen.
        """
        raw: list[Any] = [*self.parameters, *self.guards]
        if not losses.requires_grad:
            for target in self._targets:
                target(None)
            return
        with self._no_gradients_left():
            wanted = [*self._edges, *raw, self.anchor]
            grads = torch.autograd.grad(losses, wanted, grad_outputs=weights, allow_unused=True)
        for param, grad in zip(self.parameters, grads[len(self._edges) :], strict=False):
            if grad is not None:
                self.refuse_raw(param)
        for target, grad in zip(self._targets, grads, strict=False):
            target(grad)

    def pull(
        self, outputs: Sequence[Tensor], weights: Sequence[Tensor], keep: bool, guarded: bool = False
    ) -> dict[Parameter, Tensor]:
        """Fills in every use's gradient from any ``outputs`` with ``weights`` of their shapes; ``keep``: the graph.

        ``guarded``: whether a gradient that reaches a guard is an error.

        Returns the gradients that came to parameters themselves, by operations that no rule has seen.
        """
        if not outputs or not self.attached:
            return {}
        for target in self._targets:
            target(None)  # what an earlier call left need not wait for its successor
        self._forget()
        params = [param for param in self.parameters if param.requires_grad]
        wanted: list[Any] = [*self._edges, *params, *(self.guards if guarded else ()), self.anchor]
        keep = keep or bool(self.stands)  # which go through what was computed from parameters once more
        with self._no_gradients_left():
            grads = torch.autograd.grad(outputs, wanted, weights, retain_graph=keep, allow_unused=True)
        for target, grad in zip(self._targets, grads, strict=False):
            target(grad)
        raw = zip(params, grads[len(self._edges) :], strict=False)
        return {param: grad for param, grad in raw if grad is not None}

    @contextmanager
    def _no_gradients_left(self) -> Iterator[None]:
        """Raise UnsupportedError where a backward pass within has given a parameter an ordinary gradient."""
        before = [_state_of(param.grad) for param in self.parameters]
        yield
        for (param, name), known in zip(self.parameters.items(), before, strict=True):
            if _state_of(param.grad) != known:
                raise UnsupportedError(
                    f"Parameter {name} gets a gradient by a backward pass within the backward pass (by a function "
                    "whose backward() calls torch.autograd.backward, as reversible layers do), where it cannot be told "
                    "apart by example; use torch.utils.checkpoint in its place."
                )

    def _forget(self) -> None:
        """Forget what uses formed of an earlier backward pass."""
        for reset in self._resets:
            reset()

    def gradient_within_forward(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what ``func``, a gradient that the model takes within its forward pass, returns: constants.

        Nothing of it is a gradient of the loss, so what it brings to recorded places is left out.
        """
        self._within_forward = True
        try:
            return func(*args, **kwargs)
        finally:
            self._within_forward = False
            self._forget()

    def refuse_raw(self, param: Parameter) -> None:
        """NoRuleError about a parameter that received an ordinary gradient."""
        raise NoRuleError(
            f"Parameter {self.parameters[param]} is used by an operation that dpcore has no rule for; wrap that "
            f"operation "
            "in a module of its own, or freeze the parameter with requires_grad_(False).",
            (param,),
        )

    def name(self, params: Sequence[Parameter]) -> str:
        """The layer's name in messages: the first parameter's, without its last part."""
        name = self.parameters[self.root(params[0])]
        return name.rpartition(".")[0] or name

    def check_batch(self, x: Tensor, params: Sequence[Parameter], dim: int = 0) -> None:
        """UnsupportedError unless dimension ``dim`` of an input is the batch."""
        if dim != IN_ROWS and (x.dim() <= dim or x.shape[dim] != self.batch_size):
            raise self._no_batch(x, params, dim)

    def _no_batch(self, x: Tensor, params: Sequence[Parameter], dim: int) -> NoRuleError:
        if not x.dim():
            return NoRuleError(
                f"The model computes a single number from {self.name(params)}, a penalty on its weights, say. It has "
                "no gradient by example, so it cannot be clipped; put a penalty on squares into the optimizer's "
                "weight_decay, and compute another one for every example, from param.expand(len(x), *param.shape).",
                params,
            )
        return NoRuleError(
            f"{self.name(params)} got an input of shape {tuple(x.shape)} whose dimension {dim} is not the batch of "
            f"{self.batch_size} examples, so gradients cannot be told apart by example; keep the batch first.",
            params,
        )

    def batch_dim(self, x: Tensor, params: Sequence[Parameter], features: int = 1, use: str = "input") -> int:
        """Return which dimension of an input is the batch: 0, 1, IN_ROWS or -1 (none).

        It is 1 where the layer of ``params`` works on time-first sequences [T, B, ...] with ``features`` dimensions at
        the end. ``use`` tells apart different kinds of tensors that meet the same parameter.
        """
        if self._find_batch is None:
            in_rows = IN_ROWS if self.in_rows(x) else -1
            return 0 if x.dim() and len(x) == self.batch_size else in_rows
        return self._find_batch((self.root(params[0]), use), self, x, features)

    def in_rows(self, x: Tensor) -> bool:
        """Return whether the first dimension of a tensor is known to hold several rows for each example."""
        place = self.rows.of(x)
        return place is not None and place[0] == 0

    def require_batch(self, x: Tensor, params: Sequence[Parameter], features: int = 1) -> int:
        """Return :meth:`batch_dim`; NoRuleError where there is no batch."""
        dim = self.batch_dim(x, params, features)
        self.check_batch(x, params, max(dim, 0))
        return dim


def _no_view(output: Tensor) -> Tensor:
    """Return ``output`` with a place in the graph of its own.

    An operation in place gives a view another place, and the gradient no longer comes to the first one: a layer whose
    output is changed in place would lose it.
    """
    if not output._is_view():
        return output
    # Of what has no gradient the memory may be a parameter's or the data's.
    return torch.ops.aten._unsafe_view(output, output.shape) if output.requires_grad else output.clone()


def _last(output: Tensor, hook: Callable[[Tensor | None], None]) -> None:
    """Call ``hook`` with the gradient at ``output`` as its layer gets it.

    A hook on the tensor would come before those that the user registers on it later, in the forward pass or in the
    loop, and would not see what they make of the gradient.
    """
    node, place = output.grad_fn, output.output_nr
    if node is None:
        output.register_hook(hook)
    else:
        node.register_prehook(lambda grads: hook(grads[place]))


def _unless_there(target: Callable[[Tensor | None], None], grad: Tensor | None) -> None:
    if grad is None:
        target(None)


def _state_of(grad: Tensor | None) -> tuple[int, int]:
    """Return what is another number when a gradient was replaced or changed."""
    return (0, 0) if grad is None else (id(grad), grad._version)


class Uses(list[Use]):
    """The uses of a pass, ``counts`` of them by parameter; those of stand-ins become uses of the parameters behind
    them. ``unmet``: names of parameters that no look at the model has met.
    """

    def __init__(self, stands: dict[Parameter, Derivation]) -> None:
        super().__init__()
        self._stands = stands
        self.counts: Counter[Parameter] = Counter()
        self.unmet: Mapping[Parameter, str] = {}

    def append(self, use: Use) -> None:
        through = bool(self._stands) and any(p in self._stands for p in use.params)
        use = ThroughUse(use, self._stands) if through else use
        if self.unmet:
            self.meet(use.params)
        super().append(use)
        for param in use.params:
            self.counts[param] += 1

    def meet(self, params: Sequence[Parameter]) -> None:
        """Note parameters at work; NotLearnt where a look at the model has to come first."""
        for param in params:
            if param in self.unmet:
                raise NotLearnt(f"Parameter {self.unmet[param]}", (param,))
            self.counts.setdefault(param, 0)


def scaled(tensor: Tensor, scale: float) -> Tensor:
    """Tensor * scale, expanded where the tensor is: rules make use of that."""
    if scale == 1.0:
        return tensor
    if 0 not in tensor.stride() or not tensor.numel():
        return tensor * scale
    core = tensor[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())]
    return (core * scale).expand(tensor.shape)


def batch_first(tensor: Tensor, dim: int, batch_size: int) -> Tensor:
    """A tensor with the batch in ``dim`` (0, 1 or IN_ROWS) as [B, ...]."""
    if dim == IN_ROWS:
        return tensor.reshape(batch_size, -1, *tensor.shape[1:])
    return tensor.transpose(0, 1) if dim else tensor


def _tensors_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors among arguments, also those in a list or tuple."""
    found: list[Tensor] = []
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += [part for part in value if isinstance(part, Tensor)]
    return found


def _refuse_complex(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], sources: Sequence[Parameter | Derivation]
) -> None:
    """NoRuleError where parameters meet complex numbers: rules multiply without conjugates, and sums are real."""
    if any(tensor.is_complex() for tensor in _tensors_in(args, kwargs)):
        roots = tuple(root for s in sources for root in (s.roots if isinstance(s, Derivation) else (s,)))
        raise NoRuleError(
            f"A trained parameter meets the examples in {func.__name__} of complex numbers (torch.fft, "
            "torch.view_as_complex), for which dpcore has no rule; wrap that operation in a module of its own.",
            tuple(dict.fromkeys(roots)),
        )


def _is_channels_last(tensor: Tensor) -> bool:
    return tensor.dim() == 4 and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=torch.channels_last)


@handles(torch.autograd.grad, torch.autograd.backward, Tensor.backward)
def _inner_gradient(tape: Tape, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if kwargs.get("create_graph"):
        raise UnsupportedError(SECOND_ORDER)
    inputs = kwargs.get("inputs", args[1] if func is torch.autograd.grad and len(args) > 1 else None)
    if (inputs is None and tape.attached) or any(map(tape.is_source, tree_flatten(inputs)[0])):
        raise UnsupportedError(OF_PARAMETERS)
    return tape.gradient_within_forward(func, args, kwargs)


@handles(Tensor.register_hook)
def _register_hook(tape: Tape, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if isinstance(args[0], Tensor):
        tape.give_way(args[0])
    return func(*args, **kwargs)
