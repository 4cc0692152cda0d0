"""An engine whose large tables get their noise row by row, when a row is needed."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from dpcore.arguments import check_divisor
from dpcore.engine import checks
from dpcore.engine.batch_sums import ClippedSum, LossFn
from dpcore.engine.engine import Engine
from dpcore.errors import PrivacyError, UnsupportedError
from dpcore.lazy_tables.checks import check_noise, check_table, check_unchanged, settings_of
from dpcore.lazy_tables.copies import Copies
from dpcore.lazy_tables.history import History, Step
from dpcore.lazy_tables.hooks import watch, watch_optimizer
from dpcore.lazy_tables.share import share_of
from dpcore.lazy_tables.table import Table, bring_up
from dpcore.lazy_tables.window import NoiseOfWindows, Window
from dpcore.noise import GaussianNoise

RowsOf = Callable[[Any], Tensor]
EXACT_STEPS = 8


class LazyEngine:
    """An :class:`dpcore.Engine` for models with huge embedding tables: a step takes the time of the rows that it reads.

    It releases what ``Engine`` releases. A row that no batch has read for at most ``exact_steps`` steps gets, when it
    is needed, the very numbers that those steps would have added; after more of them one normal of the same variance
    (of the same covariance with its momentum), which has the same law. Beside a table, and its momentum where there is
    one, there are 4 bytes for each of its rows; the first step after a flush copies both.

    Between steps the table's parameter, and its momentum, show NaN: rows that wait for their noise must not be seen.
    ``model.state_dict()``, ``optimizer.state_dict()`` and calls of the table's module bring up to date what they read;
    :meth:`flush` does so for all rows, and gives the values back until the next step. Call it before anything else
    reads, copies or moves the model or the optimizer, and after a call of the model that Ctrl-C ended.

    Args:
        model: The module, in training mode. It stays the caller's; while a step is made, windows stand in for tables.
            One in ``DifferentiallyPrivateDistributedDataParallel`` (or replicated) is trained by all ranks together;
            each holds all of the tables, and hands every step its own share of one batch, also an empty one.
        loss_fn: As for ``Engine``.
        tables: Names of the modules (``nn.Embedding``, or ``nn.EmbeddingBag`` by sum or mean) whose weights are drawn
            lazily: float32 on a CPU. Their rows are those that the integers of a batch ``x`` name; a mapping gives, by
            name, a function that finds them in ``x``, or None.
        optimizer: ``torch.optim.SGD`` without dampening and nesterov, over the tables and what else it is to update.
            Learning rates, weight decay and a momentum above 0 may change between steps.
        noise: The source of noise; None draws a secret seed. It must be one by seed.
        exact_steps: See above; more take longer where rows are read again soon.
        shard_tables: Whether each of several ranks holds of every table, of its momentum, and of what is saved of both,
            the rows ``[rank::ranks]`` only, to which the model's are cut. A table that no machine holds is first one
            number, ``nn.Embedding(V, d, _weight=torch.zeros(1, 1).expand(V, d))``; its rows are written afterwards, on
            all ranks. The model is then called within :meth:`reading`.
        **options: Those of ``Engine``, but for ``compile``.

    Raises:
        UnsupportedError: the optimizer is not linear in what it has added up, a table is none that can be lazy, or the
            model is in shards.
        ValueError: a setting is out of its range.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        *,
        tables: Sequence[str] | Mapping[str, RowsOf | None],
        optimizer: torch.optim.Optimizer,
        noise: GaussianNoise | None = None,
        exact_steps: int = EXACT_STEPS,
        shard_tables: bool = False,
        **options: Any,
    ) -> None:
        if not isinstance(exact_steps, int) or exact_steps < 1:
            raise ValueError(f"exact_steps is {exact_steps!r}; it must be a whole number of steps, 1 or more.")
        if isinstance(tables, str) or not tables:
            raise ValueError(
                f"tables is {tables!r}; it must hold the name of one table or more, as tables=['items']. For a model "
                "without huge tables use Engine."
            )
        if options.pop("compile", False):
            raise UnsupportedError("Lazy tables read rows by their values, which no compiled graph has: compile=False.")
        if any(hasattr(param, "device_mesh") for param in model.parameters()):
            raise UnsupportedError(
                "The model is in shards or its layers are split (fully_shard, parallelize_module), which lazy tables "
                "are not; wrap the whole model in DifferentiallyPrivateDistributedDataParallel, with shard_tables=True "
                "for tables of which each rank holds a part, or use Engine for shards."
            )
        self.model, self.optimizer = model, optimizer
        self.noise = check_noise(GaussianNoise() if noise is None else noise)
        self._exact, self._owner = exact_steps, _here()
        self._rows_of = dict(tables) if isinstance(tables, Mapping) else dict.fromkeys(tables)
        share = share_of(model, shard_tables)
        self._modules = {name: check_table(model, name, share) for name in self._rows_of}
        self._weights = {name: dict(module.named_parameters())["weight"] for name, module in self._modules.items()}
        counts = {self._weights[name]: module.num_embeddings for name, module in self._modules.items()}
        places = _addresses(model, counts)
        self._parts = 2 if settings_of(optimizer, list(self._weights.values()))[2] else 1
        self._windows = {name: Window(module, name) for name, module in self._modules.items()}
        of_windows = NoiseOfWindows(self.noise)
        with self._swapped():
            self.engine = Engine(model, loss_fn, noise=of_windows, optimizer=optimizer, **options)
        if self.engine.expected_batch_size is None:
            raise ValueError("expected_batch_size is not set; it is the public divisor of the update.")
        for p, count in counts.items():  # not before all else is known to be well
            share.cut(p, optimizer.state.get(p, {}), count)
        states = partial(_states_of, optimizer) if self._parts == 2 else None
        self._tables = {
            name: Table(p, places[p], self.noise, states, share, counts[p]) for name, p in self._weights.items()
        }
        behind = {self._windows[name].rows: (self._windows[name], table) for name, table in self._tables.items()}
        of_windows.tables, of_windows.accumulator = behind, self.engine.accumulator
        self._others = {name for param, name in self.engine.accumulator.names.items() if param not in behind}
        self._history = History(0, exact_steps, self._parts)
        self._copies = Copies(self.engine.together, [*self._tables.values()], self.noise, (exact_steps, self._parts))
        for name, module in self._modules.items():
            watch(module, self._tables[name], self)
        if self._parts == 2:
            watch_optimizer(optimizer, self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise PrivacyError("A LazyEngine is not copied or pickled; call flush(), and build another one from the model.")

    def __repr__(self) -> str:
        return f"LazyEngine({', '.join(self._modules)} of {type(self.model).__name__}, steps={self.steps})"

    @property
    def steps(self) -> int:
        """Return how many steps were made, the next one's number. Set it, before the first step, to resume a run."""
        return self.engine.steps

    @steps.setter
    def steps(self, value: int) -> None:
        self.flush()
        self.engine.steps = self._copies.made = value

    @property
    def noise_multiplier(self) -> float:
        """σ; it may be set between steps."""
        return self.engine.noise_multiplier

    @noise_multiplier.setter
    def noise_multiplier(self, value: float) -> None:
        self.engine.noise_multiplier = value

    def step(self, x: Any, y: Any, mask: Tensor | None = None) -> ClippedSum:
        """Make one private update.

        Args:
            x: Inputs, as for ``Engine``.
            y: Targets, likewise.
            mask: Bool [B]; examples whose entry is False contribute nothing.

        Returns:
            The result of ``Engine.privatize``, without the sums of tables.

        Raises:
            PrivacyError: another process or thread asks while rows wait for their noise, a table was replaced or is no
                longer trained, inference mode is on, a step was interrupted on one of several ranks while it wrote, or
                as ``Engine.step``.
            UnsupportedError: a table reads a row that was not found in ``x``; the optimizer has other settings than it
                may; or as ``Engine.step``.
        """
        with self._copies.attempt():
            self._check_owner()
            check_unchanged(self.model, self._modules, self._weights)
            self._copies.check(self.steps)
            checks.check_optimizer(self.optimizer, self.engine.accumulator.names)
            settings = self._settings()
            if self._history.is_full:
                self.flush()
            own = [self._read(name, x) for name in self._tables]
        self._show(own, is_step=True)
        with self._copies.attempt(), self._swapped():
            std, result = self._deviation(), self.engine.privatize(x, y, mask)
        self._copies.forget()
        made = Step(self.noise.name(self.steps - 1), std, *settings)
        self._history.note(made)
        for name, table in self._tables.items():
            window = self._windows[name]
            assert window.rows.grad is not None
            grad = table.share.of(window.shown, window.part(window.rows.grad))
            table.update(table.share.held(window.shown), grad, made, self._history.steps)
            window.rows.grad = None
        self.optimizer.step()
        self._copies.made = self.steps
        # Not those of tables, which would tell which rows were read.
        shown = {name: s for name, s in result.sums.items() if name in self._others}
        return replace(result, sums=shown)

    @contextmanager
    def reading(self, x: Any) -> Iterator[None]:
        """Within, the model may be called on inputs ``x``, by all ranks, each on its own, where tables are shared out.

        Raises:
            PrivacyError: as :meth:`step`.
        """
        if not self._copies.shares:
            yield  # calls read by themselves
            return
        with self._copies.attempt():
            self._check_owner()
            own = [self._read(name, x) for name in self._tables]
        self._show(own, is_step=False)
        with self._swapped():
            yield

    def _show(self, own: Sequence[Tensor], is_step: bool) -> None:
        """Let windows have the rows of each table that any rank reads, of which these are this one's ``own``."""
        rows, read = self._copies.gather(own, self.steps, self.optimizer, is_step)
        for window, of in zip(self._windows.values(), rows, strict=True):
            window.make_room(len(of))  # on all ranks, also on one that fails below: their sums are of one length
        with self._copies.attempt():
            if read is None:
                self.flush()
        self._copies.compare()
        with self._copies.attempt():
            if read is not None and self._is_hidden:
                bring_up(read, self._history)
            if is_step:
                self._hide()
            held = self._copies.held(rows)
            values = bring_up(held, self._history) if self._is_hidden else [t.parameter.data[of] for t, of in held]
        for window, *shown in zip(self._windows.values(), rows, self._copies.spread(values, rows), strict=True):
            window.show(*shown)

    def _hide(self) -> None:
        """Take the rows out of the tables' parameters."""
        if not self._is_hidden:
            self._history = History(self.steps, self._exact, self._parts)
        for table in self._tables.values():
            table.hide(self._history.steps)

    @property
    def _is_hidden(self) -> bool:
        return any(table.is_hidden for table in self._tables.values())

    def flush(self) -> None:
        """Bring all rows of all tables up to date, and show them until the next step.

        Raises:
            PrivacyError: another process or thread asks while rows wait for their noise.
        """
        if self._is_hidden:
            self._check_owner()
        for table in self._tables.values():
            table.flush(self._history)

    def read(self, table: Table, rows: Tensor) -> None:
        """Bring ``rows`` of a table up to date, which is not flushed.

        Raises:
            PrivacyError: another process or thread asks while rows wait for their noise.
        """
        self._check_owner()
        read = _within(rows.long().unique(), table.count)
        self._copies.note_read(table, read)
        bring_up([(table, read)], self._history)

    @property
    def is_owner(self) -> bool:
        """Return whether the thread that asks is the one that makes the steps."""
        return self._owner == _here()

    def _deviation(self) -> float:
        """Return the standard deviation of a step's noise, as the engine has it now."""
        divisor = check_divisor(self.engine.expected_batch_size)
        return self.engine.accumulator.check_noise(self.noise_multiplier, 1.0 / divisor)

    def _check_owner(self) -> None:
        """Let nobody but the thread that makes the steps touch rows that wait: two would draw or lose their noise."""
        if self.is_owner:
            return
        process, thread = self._owner
        is_forked = process != os.getpid()
        if self._is_hidden and (is_forked or thread.is_alive()):
            who = "process was forked" if is_forked else "model or the engine is used by another thread"
            raise PrivacyError(
                f"The {who} while rows of a table waited for their noise: two would draw it, and their difference "
                "would be bare. Call flush() before that, where the steps are made."
            )
        self._owner = _here()

    def _settings(self) -> tuple[float, float, float]:
        found = settings_of(self.optimizer, list(self._weights.values()))
        if (found[2] > 0.0) != (self._parts == 2):
            raise UnsupportedError(
                f"The momentum is {found[2]} now, and was {'above 0' if self._parts == 2 else '0'} when the LazyEngine "
                "was made, which keeps that of the tables or none. Call flush(), and build another one."
            )
        return found

    def _read(self, name: str, x: Any) -> Tensor:
        """Return the rows of a table that a batch may read, ascending."""
        of, count = self._rows_of[name], self._modules[name].num_embeddings
        found = [of(x)] if of is not None else [t for t in checks.tensors_of(x) if isinstance(t, Tensor)]
        whole = (torch.int64, torch.int32, torch.int16, torch.uint8)
        ids = [t.reshape(-1).long() for t in found if t.dtype in whole]
        rows = torch.cat(ids).unique() if ids else torch.zeros(0, dtype=torch.int64)
        return _within(rows, count)

    @contextmanager
    def _swapped(self) -> Iterator[None]:
        """Within, the model has windows in the places of its tables."""
        for name, window in self._windows.items():
            _put(self.model, name, window.train(self._modules[name].training))
        try:
            yield
        finally:
            for name, module in self._modules.items():
                _put(self.model, name, module)


def _here() -> tuple[int, threading.Thread]:
    """Return the process and the thread that ask."""
    return os.getpid(), threading.current_thread()


def _states_of(optimizer: torch.optim.Optimizer) -> Any:
    return optimizer.state


def _within(rows: Tensor, count: int) -> Tensor:
    """Return those of a table: the noise of an address before or behind it is another parameter's."""
    return rows[(rows >= 0) & (rows < count)]


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, own = name.rpartition(".")
    model.get_submodule(parent)._modules[own] = module


def _addresses(model: nn.Module, counts: Mapping[Parameter, int]) -> dict[Parameter, int]:
    """Return the address of the first number of every trained parameter, those of tables with so many rows."""
    found, address = {}, 0
    for param in model.parameters():
        if param.requires_grad:
            found[param] = address
            address += counts[param] * param.shape[1] if param in counts else param.numel()
    return found
