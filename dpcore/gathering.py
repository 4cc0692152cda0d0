"""Gathering the numbers of sharded parameters, and how long they stay gathered.

``fully_shard`` lets go of a layer's parameters behind its forward pass and behind its backward pass. Where a batch goes
through the model in several pieces, each gathers all of them anew, twice where a layer is not the root. Kept between
the pieces they are gathered once a batch; a rank then holds the whole parameters from the first piece to the last.
"""

from __future__ import annotations

import operator
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import Parameter

from dpcore.distributed import Ranks
from dpcore.errors import warn_caller
from dpcore.free_memory import free_bytes

SHARE_OF_FREE = 0.5
"""The share of the memory that is free behind the first batch which all ranks of a machine, or of a GPU, may take."""


class Gathering:
    """Brings the numbers of sharded parameters together, unit by unit.

    ``units``: as of :class:`dpcore.reduction.Sharded`. ``is_all``: whether whole parameters are gathered, and not parts
    of layers. ``everyone``: all ranks that train the model.
    """

    def __init__(
        self,
        shards: Mapping[Parameter, Any],
        units: Mapping[Any, Sequence[Parameter]],
        is_all: bool,
        everyone: Ranks,
    ) -> None:
        self.shards, self.modules, self.is_all = shards, [*units], is_all
        self._units = [*units.values()]
        self._read: dict[Parameter, set[Parameter]] = {}
        self.kept = Kept(self, everyone)

    @property
    def waiting(self) -> Iterable[Parameter]:
        """Return those of which :meth:`note_read` was told."""
        return self._read.keys()

    def note_read(self, params: Iterable[Parameter], read: Iterable[Parameter]) -> None:
        """Note, on all ranks, that gradients of ``params`` by example are formed of the numbers of those ``read``."""
        for param in params:
            self._read.setdefault(param, set()).update(read)

    def in_turns(self) -> Iterator[list[Parameter]]:
        """Gather what was noted, unit by unit, on all ranks; yield those whose gradients can then be formed."""
        turns: dict[tuple[int, ...], list[Parameter]] = {}
        for param, read in self._read.items():
            turns.setdefault(self._units_of(read), []).append(param)
        for units, params in sorted(turns.items(), key=lambda turn: turn[0]):
            with self._gathered(units):
                yield params

    def whole_of(self, module: nn.Module) -> list[Parameter]:
        """Return the whole parameters of a part of the model, whether it is gathered now or not."""
        held = {*module.parameters()}
        return [whole for whole, shard in self.shards.items() if whole in held or shard in held]

    def gathered(self, module: nn.Module) -> AbstractContextManager[None]:
        """Within, the numbers of a part of the model are there; all ranks come here."""
        return self._gathered(self._units_of(self.whole_of(module)))

    def let_go(self) -> None:
        """Let go of what a pass without a backward one has left whole."""
        for module in self.modules:
            module.reshard()

    @property
    def are_whole(self) -> list[bool]:
        """Return of every unit whether its numbers are there now."""
        return [any(param.untyped_storage().size() for param in unit) for unit in self._units]

    @property
    def versions(self) -> list[int]:
        """Return how often each whole parameter was changed in place."""
        return [param._version for unit in self._units for param in unit]

    @property
    def whole_bytes(self) -> list[int]:
        """Return of every unit how many bytes its parameters have where they are whole."""
        return [sum(param.numel() * param.element_size() for param in unit) for unit in self._units]

    @property
    def numbers(self) -> int:
        """Return how many numbers all parameters have."""
        return sum(param.numel() for unit in self._units for param in unit)

    @contextmanager
    def _gathered(self, units: Iterable[int]) -> Iterator[None]:
        stay = self.kept.whole_on_all()
        modules = [self.modules[k] for k in units if not stay[k]]
        for module in modules:
            module.unshard()
        try:
            yield
        finally:
            for module in modules:
                module.reshard()

    def _units_of(self, params: Iterable[Parameter]) -> tuple[int, ...]:
        wanted = {*params}
        return tuple(k for k, unit in enumerate(self._units) if not wanted.isdisjoint(unit))


def gathering_of(module: nn.Module) -> Gathering | None:
    """Return what gathers the parameters of ``module``; None where they are always whole."""
    return getattr(getattr(module, "reduction", None), "gathering", None)


def end_keeping(module: nn.Module) -> None:
    """Shard again what was kept gathered for the next pieces of a batch."""
    if (gathering := gathering_of(module)) is not None:
        gathering.kept.end()


class Batch(Protocol):
    """Knows about the logical batch under way."""

    @property
    def goes_on(self) -> bool:
        """Whether more pieces of the batch follow the one whose pass begins."""
        ...


class Kept:
    """Keeps the parameters of ``gathering`` gathered from a logical batch's first piece to its last.

    ``asked``: whether the user wants it; None: from the second batch on, where memory allows. The ranks choose
    together, once. Before each pass of such a run they compare what they have whole, since one that gathered alone
    would wait for ever: where they differ (one has evaluated or saved within the batch), all let go.
    """

    def __init__(self, gathering: Gathering, everyone: Ranks) -> None:
        self.gathering, self.ranks = gathering, everyone
        self.asked: bool | None = None
        self.batch: Batch | None = None
        self.chosen: bool | None = None
        """What the ranks have chosen; None: nothing yet."""
        self._releases = 0
        self._settings: list[tuple[Any, Any, bool]] = []  # of FSDP's groups, as they were before
        self._versions: list[int] = []  # of whole parameters, which gathering them leaves as they are

    @property
    def are_held(self) -> bool:
        """Whether parameters stay gathered behind their layers' passes now."""
        return bool(self._settings)

    def begin_pass(self) -> None:
        """Let what the coming pass gathers stay until the batch's last piece; all ranks call this."""
        if self.chosen is False or self.asked is False or not self._can_be_set:
            return
        if self.asked is None and not self._releases:
            return  # which shows how much memory is left
        goes_on = self.batch is not None and self.batch.goes_on
        if self._compared(goes_on):
            if self.chosen is None:
                self.chosen = self.asked or self._fits()
            if self.chosen:
                self._hold(is_last=False)
        elif self.are_held:
            self._hold(is_last=True)

    def whole_on_all(self) -> list[bool]:
        """Return of every unit whether its kept numbers are there; all ranks call this."""
        if self.chosen:  # one rank may have saved since the pass
            self._compared(True)
        return self.gathering.are_whole if self.are_held else [False] * len(self.gathering.modules)

    def _compared(self, mine: bool) -> bool:
        """Let all ranks let go where they have not the same units whole; return whether ``mine`` is true on all."""
        held = [mine, self.are_held, *self.gathering.are_whole]
        found = self.ranks.stacked(torch.tensor(held, device=self.ranks.device))
        if bool((found[:, 1:] != found[0, 1:]).any()):
            self.end()
            self.gathering.let_go()
        return bool(found[:, 0].all())

    def end(self) -> None:
        """Shard again what was kept, and let FSDP do from now on as it was told by the user."""
        if not self._settings:
            return
        for group, forward, backward in self._settings:
            group.post_forward_mesh_info, group.reshard_after_backward = forward, backward
        self._settings = []
        is_changed = self.gathering.versions != self._versions
        self.gathering.let_go()
        if is_changed:
            warn_caller(
                "Parameters were changed in place between the pieces of a batch, while they were gathered: the change "
                "is lost, since the shards are what stays. Change them between batches, or set keep_gathered=False."
            )

    def note_release(self) -> None:
        """End, before weights change; all ranks call this."""
        self.end()
        self._releases += 1

    def _hold(self, is_last: bool) -> None:
        modules = self.gathering.modules
        if not self._settings:
            groups = [group for module in modules for group in _groups_of(module)]
            self._versions = self.gathering.versions
            self._settings = [(g, g.post_forward_mesh_info, g.reshard_after_backward) for g in groups]
        for module in modules:
            module.set_reshard_after_forward(False, recurse=False)
            module.set_reshard_after_backward(is_last, recurse=False)

    @property
    def _can_be_set(self) -> bool:
        """Whether there is something to gather, and this torch's FSDP can be told (2.8 and later)."""
        return self.ranks.size > 1 and all(hasattr(m, "set_reshard_after_forward") for m in self.gathering.modules)

    def _fits(self) -> bool:
        """Return whether every rank has the memory; all ranks call this."""
        device = next(iter(self.gathering.shards)).device
        here = socket.gethostname(), str(device)
        sharing = self.ranks.gather(here).count(here)
        is_enough = sum(self.gathering.whole_bytes) * sharing <= SHARE_OF_FREE * free_bytes(device)
        return bool(self.ranks.least(int(is_enough)))

    def explained(self, sums: int) -> str:
        """Return what was chosen, and what is sent; ``sums``: bytes that a piece scatters.

        By piece, since the number of pieces tells how long a batch was, which is private.
        """
        if self.ranks.size == 1:
            return "one rank gathers and scatters nothing"
        whole = self.gathering.whole_bytes
        before = {id(group): forward for group, forward, _ in self._settings}
        again = [
            any(before.get(id(g), g.post_forward_mesh_info) for g in _groups_of(m)) for m in self.gathering.modules
        ]
        sent = (sum(whole) + sum(map(operator.mul, whole, again)), sum(whole), sums)
        apiece, once, scattered = (f"{of / (4 * self.gathering.numbers):.2f}" for of in sent)
        said, memory = f"for each piece: {apiece}", f"{sum(whole) / 2**20:,.0f} MiB a rank"
        if self.chosen or (self.asked and self._can_be_set):
            said = f"once per logical batch: {once}, in place of {apiece} a piece, and kept meanwhile ({memory})"
        elif self.chosen is False:
            said += f" (once per logical batch: {once}, but {memory} are more than half of what is free)"
        elif self.asked is None and self._can_be_set:
            said += (
                f" (from the second batch on once per logical batch: {once}, where {memory} fit half of what is free)"
            )
        return (
            f"parameters are gathered {said}; sums are scattered for each piece: {scattered} (of 4 bytes a parameter)"
        )


def _groups_of(module: Any) -> list[Any]:
    """Return what FSDP remembers of a module that it gathers (of several, where layers have different meshes)."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    return [group for group in ([state._fsdp_param_group] if groups is None else groups) if group is not None]
