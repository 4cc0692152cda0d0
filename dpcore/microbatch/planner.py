"""Choices that the user need not make: how each parameter's norm is taken, and how many examples go through at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import Parameter

from dpcore import native
from dpcore.gpu import tuned
from dpcore.native.products import Product
from dpcore.tape.uses import Use

# What a micro-batch leaves behind should still be in the last-level cache when its norms and sums are taken. Every
# piece costs some 0.5 ms of operator starts whatever its size, so smaller pieces that fit a smaller cache were slower.
CPU_STASH_BYTES = 32 * 2**20
# Unless an example is as much work as several hundred starts are: then pieces of that many bytes are large enough.
CPU_FEWEST_EXAMPLES = 16
CPU_LARGE_STASH_BYTES = 48 * 2**20
CPU_FEWEST_LARGE_EXAMPLES = 4
CPU_FEWEST_IN_A_LOOP = 64
# An example holds more than in ordinary training, up to about twice as much: beside the layers' inputs their outputs'
# gradients and the rules' temporaries. A third of a batch at once needs no more than ordinary training of all of it;
# below 384 examples a half must do, since pieces of fewer than 100 cost too much time.
# What takes next to nothing, or little beside the parameters, is left whole: every piece passes over the sums of them
# all.
HALVES_FROM = 192
THIRDS_FROM = 384
CPU_LEAST_STASH_BYTES = 4 * 2**20
CPU_LEAST_STASH_IN_PARAMETERS = 64
# A small batch that does not fit the cache is cut into thirds too, unless the sums over which a piece passes have more
# bytes than it leaves behind. A piece that leaves behind less than five times the sums takes markedly longer than a
# larger one, whatever fits the cache; a half of the batch still needs less memory than ordinary training of all of it.
CPU_STASH_IN_SUMS = 5
# On a CPU whose heap keeps its pages larger pieces were never slower: a small GPT-2's 64 examples in two pieces took
# 0.94 of the time of seven, a CNN's in two 0.94 of that of three, 16 of a LoRA as a whole 0.91 of it in three. So what
# is small is left whole, what is larger is cut into no more than halves, and neither where a piece would leave behind
# more than so many bytes. Halves cost nothing from 32 examples and 16 MB on (0.99 to 1.005 of the whole's time on nine
# networks, a Zen 4, by turns), and a CNN's 64 then took 0.45 to 0.7 of the peak: what fits the cache fragments a heap.
CPU_HALVES_FROM = 32
CPU_MOST_STASH_BYTES = 320 * 2**20
CPU_WHOLE_STASH_BYTES = 16 * 2**20
CUDA_FREE_FRACTION = 0.25


# A gradient of fewer numbers is written and read in less time than it takes to start the operators of one more example.
FEWEST_IN_TURN = 2**15


_CPU = torch.device("cpu")
MOST_REMEMBERED = 256


@dataclass(slots=True)  # not frozen, which would take four times as long to make
class Choice:
    """How one parameter's contribution is computed.

    ``ghost``: the norm without per-sample gradients, then a weighted contraction. ``keep``: per-sample gradients,
    formed once for all examples and used for both. ``turn``: the same for one example after the other, when the norms
    of all parameters that are not formed in turn are known: formed, squared, added. ``product``: what
    kernels form then.
    """

    param: Parameter
    uses: tuple[Use, ...]
    method: str
    product: Product | None = None


def choose(uses: Sequence[Use], turns: bool = True) -> list[Choice]:
    """One choice per parameter that was used; none for one without numbers, whose gradient is known.

    A parameter used more than once has cross terms between its uses, which only its per-sample gradient contains: it is
    formed. ``turns`` False: where a loop over the examples cannot be (a graph of any values).
    """
    by_param: dict[Parameter, list[Use]] = {}
    for use in uses:
        if use.grad is not None:
            for param in use.params:
                if param.numel():
                    by_param.setdefault(param, []).append(use)
    choices = [Choice(param, tuple(of), _method(param, of, turns)) for param, of in by_param.items()]
    return _turned(choices) if turns else choices


class Choices:
    """Gives the choices for uses, and remembers those for small gradients by what decided about them."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], list[tuple[int, int, str]]] = {}

    def __call__(self, uses: Sequence[Use], turns: bool = True) -> list[Choice]:
        """Return what :func:`choose` returns."""
        key = self._key(uses) if turns else None
        known = None if key is None else self._known.get(key)
        if known is not None:
            return [Choice(uses[i].params[k], (uses[i],), method) for i, k, method in known]
        choices = choose(uses, turns)
        if key is not None and all(len(c.uses) == 1 and c.method != "turn" for c in choices):
            places = {(id(use), param): (i, k) for i, use in enumerate(uses) for k, param in enumerate(use.params)}
            if len(self._known) >= MOST_REMEMBERED:  # of texts that are all of other lengths
                self._known.clear()
            self._known[key] = [(*places[id(c.uses[0]), c.param], c.method) for c in choices]
        return choices

    @staticmethod
    def _key(uses: Sequence[Use]) -> tuple[Any, ...] | None:
        """Return what the choices depend on: the uses, which of them share a parameter, kernels and measured costs."""
        found: list[Any] = [native.available(), tuned.costs(_CPU)]
        for use in uses:
            kind = use.kind()
            if kind is None:
                return None
            found.append(kind)
        return tuple(found)


def _turned(choices: list[Choice]) -> list[Choice]:
    """Let the gradients that kernels form in one call for each example take turns, where all of them together are large
    enough for it.
    """
    found = {c.param: c.uses[0].product(c.param) for c in choices if c.method != "ghost" and len(c.uses) == 1}
    taken = {param: product for param, product in found.items() if product is not None}
    if not taken or sum(param.numel() for param in taken) < _fewest_in_turn(next(iter(taken)).device):
        return choices
    return [replace(c, method="turn", product=taken[c.param]) if c.param in taken else c for c in choices]


def _fewest_in_turn(device: torch.device) -> float:
    costs = tuned.costs(device)
    return FEWEST_IN_TURN if costs is None else costs.fewest_in_turn


def _method(param: Parameter, uses: Sequence[Use], turns: bool) -> str:
    if len(uses) == 1 and uses[0].ghost_is_cheaper(param):
        return "ghost"
    large = param.numel() >= _fewest_in_turn(param.device)
    return "turn" if turns and large and all(use.takes_turns(param) for use in uses) else "keep"


def stash_bytes(choices: Sequence[Choice], uses: Sequence[Use], batch_size: int) -> float:
    """Bytes per example of inputs, output gradients and kept per-sample gradients."""
    kept = sum(choice.param.nbytes for choice in choices if choice.method == "keep")
    return kept + sum(use.stash_bytes() for use in uses) / batch_size


@dataclass(frozen=True)
class MicroBatches:
    """How a batch is cut. The clipped sum is associative: the result does not depend on it.

    ``most``: examples at once, by cache or memory. ``least``: fewer are not worth a piece of their own. ``whole``: so
    many, or fewer, are left whole whatever they take. ``worth``: so many outweigh a pass over the sums.
    ``bearable``: up to so many at once a batch is left whole or cut into halves. ``per_example``: bytes that one leaves
    behind.
    """

    most: int
    least: int
    whole: int = 2**62
    worth: int = 1
    bearable: int = 0
    per_example: float = 0.0

    def size(self, batch_size: int) -> int:
        """The largest piece of a batch of ``batch_size`` examples."""
        size = self._by_memory(batch_size)
        if batch_size >= HALVES_FROM:  # from there on it is memory that counts
            return size
        pieces = 1 if batch_size < CPU_HALVES_FROM else 2
        return max(size, min(-(-batch_size // pieces), self.bearable))

    def _by_memory(self, batch_size: int) -> int:
        if batch_size < HALVES_FROM:
            if batch_size <= self.whole:
                return self.most
            return min(self.most, max(-(-batch_size // 3), min(self.worth, -(-batch_size // 2))))
        pieces = 2 if batch_size < THIRDS_FROM else 3
        return min(self.most, max(self.least, -(-batch_size // pieces)))


def micro_batches(
    choices: Sequence[Choice], uses: Sequence[Use], batch_size: int, device: torch.device
) -> MicroBatches:
    """Return the plan by what ``batch_size`` examples left behind."""
    per_example = max(stash_bytes(choices, uses, batch_size), 1.0)
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        most = max(1, int(CUDA_FREE_FRACTION * free / per_example))
        return MicroBatches(most, most, per_example=per_example)
    several = int(CPU_LARGE_STASH_BYTES / per_example)
    fewest = min(CPU_FEWEST_EXAMPLES, max(CPU_FEWEST_LARGE_EXAMPLES, several))
    fewest = CPU_FEWEST_IN_A_LOOP if any(use.sequential for use in uses) else fewest
    parameters = sum(choice.param.nbytes for choice in choices)
    worthwhile = max(CPU_LEAST_STASH_BYTES, CPU_LEAST_STASH_IN_PARAMETERS * parameters)
    summed = sum(choice.param.nbytes for choice in choices if _sums_by_piece(choice))
    most, least = (max(fewest, int(stash / per_example)) for stash in (CPU_STASH_BYTES, worthwhile))
    whole = int(max(CPU_WHOLE_STASH_BYTES, 3 * summed) / per_example)
    worth = int(CPU_STASH_IN_SUMS * summed / per_example)
    bearable = max(1, int(CPU_MOST_STASH_BYTES / per_example))
    if worth <= most:
        return MicroBatches(most, least, whole, bearable=bearable, per_example=per_example)
    return MicroBatches(worth, max(least, worth), whole, worth, bearable, per_example)


def _sums_by_piece(choice: Choice) -> bool:
    """Return whether every piece passes over all of a parameter's sum: not if examples do, or few rows are added to."""
    return choice.method != "turn" and not all(use.sparse for use in choice.uses)
