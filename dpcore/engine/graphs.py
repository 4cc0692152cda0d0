"""Micro-batches of fixed lengths as one compiled graph each: forward and backward pass, norms, factors and sums.

The engine's own pass is traced with tensors that have shapes but no values, so that nothing of a batch can be baked
into the graph, and ``torch.compile`` turns what was traced into code. Parameters, buffers and clip bounds are inputs of
the graph, read anew at every call. Batches are cut into pieces of a few lengths; a piece is filled up to the next
length with masked copies of its first example. What the eager pass decides by values (is a norm not finite, or rounding
error?) is an output here: where the answer is yes, nothing of the graph's result is used, and the eager pass does the
piece.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

from dpcore.errors import PrivacyError, UnsupportedError
from dpcore.numerics.precision import full_precision, matmul_precision
from dpcore.tree import flatten, unflatten

Traced = Callable[[Any, Any, Tensor, Sequence[Tensor]], tuple[Tensor, ...]]
"""(x, y, mask [m], bounds) -> (flat sums, norms [groups, m], factors [groups, m], any doubtful, losses [m])."""

CPU_GRAPH_EXAMPLES = 128
"""Examples at once, at most: mnist-cnn's graph took 157 us an example at 64, 149 at 128 and 180 at 512
(results/findings)."""

MOST_EXACT = 8
"""Graphs of lengths that are not rungs, for a kind of batch: each takes its compiler some 20 seconds."""


def rung(count: int) -> int:
    """Return the smallest number not below ``count`` of 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, ...

    There are four per octave, so that batches of all lengths need few graphs and at most a fifth of a graph's rows is
    filling.
    """
    step = 1 << max(0, count.bit_length() - 3)
    return max(4, -(-count // step) * step)


def graph_size(count: int, most: int) -> int:
    """Length of the graph for a batch of ``count`` examples, about ``most`` of them at once: the fewest rows in all."""
    fewest = -(-count // most)
    sizes = [rung(-(-count // pieces)) for pieces in (fewest, fewest + 1)]
    return min(sizes, key=lambda size: -(-count // size) * size)


class Graphs:
    """Compiled graphs of the pass ``traced`` of ``model``, one per kind of batch.

    They are made when first needed, by ``backend``, as torch.compile names them. Lengths are numbers of examples, of
    ``group`` rows each.
    """

    def __init__(self, model: nn.Module, traced: Traced, backend: str = "inductor", group: int = 1) -> None:
        known = torch.compiler.list_backends(None)
        if backend not in known:
            raise ValueError(f"compile is {backend!r}; it must be True, False or a backend of torch.compile: {known}.")
        for name, module in model.named_modules():
            if isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
                raise UnsupportedError(
                    f"{name or 'The model'} is a recurrent layer, whose loop over time a graph would unroll; build the "
                    "engine with compile=False (its loop has a compiled kernel of its own: python -m dpcore.native)."
                )
        self.model = model
        self.traced = traced
        self.backend = backend
        self.group = group
        self._graphs: dict[Hashable, _Graph] = {}
        self._exact: dict[Hashable, set[int]] = {}

    def length(self, kind: Hashable, count: int, most: int, filled: bool) -> int:
        """Length of the graphs for a batch of ``count`` examples, about ``most`` of them at once.

        ``filled``: with a mask, hence of a length that the caller has chosen: cut into equal parts and not filled up
        once more, unless there turn out to be many such lengths of this ``kind``.
        """
        if filled:
            exact = self._exact.setdefault(kind, set())
            equal = -(-count // -(-count // most))
            if equal in exact or len(exact) < MOST_EXACT:
                exact.add(equal)
                return equal
        return graph_size(count, most)

    @property
    def sizes(self) -> list[int]:
        """Lengths of the graphs that were made."""
        return sorted({graph.size for graph in self._graphs.values()})

    def run(
        self,
        x: Any,
        y: Any,
        mask: Tensor | None,
        size: int,
        bounds: Sequence[float],
        device: torch.device,
        depends: tuple[Hashable, ...],
    ) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
        """(flat sums, norms, factors, losses) of up to ``size`` examples, at least one; None where the graph's result
        must not be used. ``device``: of the parameters. ``depends``: what else a graph holds for. UnsupportedError
        where the pass cannot be traced or compiled.
        """
        structure: Any = None  # two tensors, as a batch usually is
        leaves = [x, y]
        if not (isinstance(x, Tensor) and isinstance(y, Tensor)):
            leaves, structure = flatten((x, y))
        for leaf in leaves:
            if not isinstance(leaf, Tensor):
                raise UnsupportedError(
                    f"A batch with an entry of type {type(leaf).__name__} cannot be compiled: the graph would keep its "
                    f"value for ever; pass tensors, or {REMEDY}"
                )
            if leaf.dim() == 0 or len(leaf) != len(leaves[0]):
                # One label for all would let an example move the contributions of the others.
                raise UnsupportedError(
                    f"A batch has tensors of shapes {tuple(leaves[0].shape)} and {tuple(leaf.shape)}; each must have "
                    "one row per example."
                )
        key = (
            size,
            _hashable(structure),
            tuple((t.shape[1:], t.dtype, t.device) for t in leaves),
            len(bounds),
            depends,
            *(_state(module) for module in self.model.modules()),
            torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type),
            torch.get_num_threads(),
            torch.are_deterministic_algorithms_enabled(),
            matmul_precision(),
        )
        graph = self._graphs.get(key)
        if graph is None:
            graph = self._graphs[key] = _Graph(self, leaves, structure, size, len(bounds), device.type)
        # Norms and the clipped sums are in the graph, too; a setting that lowers their precision is not, but is read
        # when it runs.
        with full_precision():
            if not torch.is_autocast_enabled(device.type):
                return graph.run(leaves, mask, bounds)
            with torch.autocast(device.type, enabled=False):  # its casts are in the graph
                return graph.run(leaves, mask, bounds)


class _Graph:
    """One graph, and the memory that pieces are brought to its length in."""

    def __init__(
        self, of: Graphs, leaves: Sequence[Tensor], structure: Any, size: int, groups: int, device: str
    ) -> None:
        self.size, self._group = size, of.group
        self._inputs = [_rows_like(leaf, size * of.group) for leaf in leaves]
        self._full = torch.ones(size * of.group, dtype=torch.bool, device=leaves[0].device)
        bounds = torch.ones(groups, dtype=torch.float64, device=leaves[0].device)

        def flat(mask: Tensor, bounds: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
            x, y = leaves if structure is None else unflatten(structure, list(leaves))
            # A clipping rule may write to its bound, which is a number to the eager pass: here, to a copy.
            return of.traced(x, y, mask, bounds.clone().unbind(0))

        try:
            # Without values: whatever would read one fails here instead of becoming a constant of the graph.
            with _left_as_it_was(of.model), _NoValues():
                made = make_fx(flat, tracing_mode="fake", _allow_non_fake_inputs=True)(
                    self._full, bounds, *self._inputs
                )
        except (UnsupportedError, PrivacyError):
            raise
        except Exception as error:
            raise UnsupportedError(f"The step cannot be traced into one graph ({_brief(error)}); {REMEDY}") from error
        if _writes_to_constants(made):
            raise UnsupportedError(
                "The model's forward pass or the loss changes a buffer or another tensor that it keeps, which a graph "
                f"would do for the rows that it is filled up with, too; {REMEDY}"
            )
        # While the graph is there, the ids in its key belong to these.
        self._held = [
            (module, *module._parameters.values(), *module._buffers.values()) for module in of.model.modules()
        ]
        self._live = _lift(made, [*of.model.parameters(), *of.model.buffers()])
        self._bounds = (1.0,) * groups, bounds
        # Straight to the backend: torch.compile itself would first make sure, at every call, of what the key in
        # ``Graphs`` and the buffers here already promise, which takes some ten times as long as starting the graph.
        # Without autocast, whose casts are in the graph: a backend traces it once more, and would cast the norms.
        from torch._dynamo import lookup_backend

        with torch.no_grad(), torch.autocast(device, enabled=False), full_precision():
            try:
                compiler: Callable[..., Any] = lookup_backend(of.backend)
                self._call = compiler(made, [self._full, bounds, *self._inputs, *self._live])
            except Exception as error:
                raise UnsupportedError(f"The step's graph cannot be compiled ({_brief(error)}); {REMEDY}") from error

    def run(
        self, leaves: Sequence[Tensor], mask: Tensor | None, bounds: Sequence[float]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
        count = len(leaves[0])
        full = self._full
        if mask is not None or count < len(full):
            full = torch.zeros_like(full)
            full[:count] = True if mask is None else mask
        if tuple(bounds) != self._bounds[0]:
            self._bounds = tuple(bounds), torch.tensor(bounds, dtype=torch.float64, device=full.device)
        with torch.no_grad():
            for buffer, leaf in zip(self._inputs, leaves, strict=True):
                if count == len(full):
                    buffer.copy_(leaf)
                    continue
                buffer[:count].copy_(leaf)
                # Copies of an example of this piece are as finite as it is: they raise no doubt of their own.
                buffer[count:] = buffer[:1]
            sums, norms, factors, doubtful, losses = self._call(full, self._bounds[1], *self._inputs, *self._live)
        if bool(doubtful):
            return None
        if sums.is_cuda:
            # A captured graph writes its next results where these lie.
            norms, factors, losses = norms.clone(), factors.clone(), losses.clone()
        count //= self._group
        return sums, norms[:, :count], factors[:, :count], losses[:count]


REMEDY = "build the engine with compile=False."


def _hashable(structure: Any) -> Any:
    """Return a key for a batch's structure: torch 2.6 cannot hash one that has a dict in it."""
    try:
        hash(structure)
    except TypeError:
        return repr(structure)
    return structure


def _state(module: nn.Module) -> tuple[Hashable, ...]:
    """Return the state of a module that a graph holds for.

    That is dropout as it was switched, hooks, these parameters and buffers as they lie in memory (``module.to(...)``
    gives a parameter other data).
    """
    tensors = (*module._parameters.items(), *module._buffers.items())
    return (
        id(module),
        module.training,
        *[(n, None if t is None else (id(t), t.shape, t.stride(), t.dtype, t.device)) for n, t in tensors],
        *module._forward_pre_hooks,
        *module._forward_hooks,
    )


class _NoValues(TorchFunctionMode):
    """Refuses what reads a tensor's value, which would be a constant of the graph: of buffers and parameters, too."""

    REFUSED = frozenset(
        getattr(Tensor, name)
        for name in ("item", "tolist", "numpy", "__array__", "__bool__", "__float__", "__int__", "__index__")
    )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.REFUSED:
            raise UnsupportedError(
                f"The step cannot be traced into one graph: model or loss reads a tensor's value by "
                f"{func.__name__}(), which the graph would keep for ever; {REMEDY}"
            )
        return func(*args, **(kwargs or {}))


@contextmanager
def _left_as_it_was(model: nn.Module) -> Iterator[None]:
    """Put back attributes that a forward pass sets (caches, say), which get tensors without values while it is traced.

    UnsupportedError where it sets a buffer anew, whose changes would be lost, or changes it in place.
    """
    before = [(module, dict(vars(module)), dict(module._buffers)) for module in model.modules()]
    values = [(name, b, b._version, b.clone()) for name, b in model.named_buffers() if not b.is_inference()]
    changed = ""
    try:
        yield
    finally:
        for name, buffer, version, value in values:
            if buffer._version != version:
                buffer.copy_(value)
                changed = changed or name
        for module, attributes, buffers in before:
            rebound = [name for name, value in buffers.items() if module._buffers.get(name) is not value]
            changed = changed or (rebound[0] if rebound else "")
            vars(module).clear()
            vars(module).update(attributes)
            module._buffers.clear()
            module._buffers.update(buffers)
    if changed:
        raise UnsupportedError(f"The model's forward pass changes its buffer {changed}, which a graph cannot; {REMEDY}")


def _writes_to_constants(module: fx.GraphModule) -> bool:
    """Return whether the graph changes one of its constants (a buffer, say) or a view of it."""
    constants: set[fx.Node] = set()
    for node in module.graph.nodes:
        if node.op == "get_attr":
            constants.add(node)
        if node.op != "call_function":
            continue
        schema = getattr(node.target, "_schema", None)
        if schema is None:  # an entry of what several views came in
            if constants & set(node.all_input_nodes):
                constants.add(node)
            continue
        given = dict(zip((a.name for a in schema.arguments), node.args, strict=False)) | node.kwargs
        for argument in schema.arguments:
            values = given.get(argument.name)
            if argument.alias_info is None or not constants.intersection(
                values if isinstance(values, list | tuple) else [values]
            ):
                continue
            if argument.alias_info.is_write:
                return True
            constants.add(node)
    return False


def _brief(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__


def _rows_like(tensor: Tensor, count: int) -> Tensor:
    """Zeros [count, ...] laid out in memory as ``tensor`` is (channels-last, for instance)."""
    inner = torch.zeros((count, *tensor.shape[1:]), dtype=tensor.dtype, device=tensor.device)
    channels_last = tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    return inner.contiguous(memory_format=torch.channels_last) if channels_last else inner


def _lift(module: fx.GraphModule, tensors: Iterable[Tensor]) -> list[Tensor]:
    """Makes inputs, behind the others, of those constants of the graph that are among ``tensors``; returns these."""
    wanted = {id(tensor) for tensor in tensors}
    graph = module.graph
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]
    inputs: dict[int, fx.Node] = {}
    live: list[Tensor] = []
    for node in list(graph.nodes):
        if node.op != "get_attr":
            continue
        value = getattr(module, str(node.target))
        if id(value) not in wanted:
            continue
        if id(value) not in inputs:
            with graph.inserting_after(last):
                last = inputs[id(value)] = graph.placeholder(f"live_{len(live)}")
            live.append(value)
        node.replace_all_uses_with(inputs[id(value)])
        graph.erase_node(node)
    module.recompile()
    return live
