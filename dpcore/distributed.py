"""Several processes that train one model on one data set, each on its own examples.

Every rank clips its own examples, keeps the sum, and adds its share of one noise to it; one all-reduce at the end of
the logical batch gives all ranks the same private sum, so that their parameters stay equal. (In secure mode noise comes
after the sum and takes a second all-reduce, so that the release lies on the noise's grid.) Nothing is exchanged before,
so ranks may cut their batches into different numbers of pieces, and a rank without examples joins with zeros.
"""

from __future__ import annotations

import hashlib
import secrets
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Sampler, SequentialSampler

from dpcore.errors import PrivacyError, UnsupportedError
from dpcore.secret_seeds import Seeded, derived_seed


class Ranks:
    """The processes of a group (all, by default), which call the same methods in the same order.

    ``device``: where the group's backend wants its tensors ("cpu" for gloo, the rank's own GPU for NCCL). ``sharded``:
    the module exchanges tensors in every pass, so that all ranks must go through equally many passes of one kind.
    ``parts``: those of them that have a part of every layer each and work on the same examples as this rank.
    ``copies``: those that have the same part, each with examples of its own.
    """

    def __init__(
        self,
        device: torch.device | str = "cpu",
        group: dist.ProcessGroup | None = None,
        sharded: bool = False,
        parts: Ranks | None = None,
        copies: Ranks | None = None,
    ) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise ValueError(
                "There is no process group; start the script with torchrun and call "
                "torch.distributed.init_process_group() first."
            )
        self.group = group
        self.device = torch.device(device)
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.sharded = sharded
        self.parts, self.copies = parts, copies
        deals = self if parts is None else copies
        self.deals = deals is not None
        """Whether the examples of a batch are dealt out: into ``shares``, of which this one has ``share_number``."""
        self.share_number, self.shares = (0, 1) if deals is None else (deals.rank, deals.size)

    def largest(self, value: int) -> int:
        """The largest of the ranks' values."""
        found = torch.tensor(value, device=self.device)
        self._together(lambda: dist.all_reduce(found, dist.ReduceOp.MAX, group=self.group))
        return int(found)

    def least(self, value: int) -> int:
        """The smallest of the ranks' values."""
        return -self.largest(-value)

    def sum_(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks, in place, the same on each of them. PrivacyError where a rank does not come."""
        self._together(lambda: dist.all_reduce(tensor, group=self.group))
        return tensor

    def begin_scatter(self, chunks: Tensor) -> tuple[Tensor, Callable[[], None]]:
        """Begin to add up ``chunks`` [ranks, n] over the ranks, each of which gets the sum of its own.

        Returns:
            This rank's [n], and what waits until it is there, with a PrivacyError where a rank does not come;
            ``chunks`` must stay until then.
        """
        mine = torch.empty_like(chunks[0])
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # its former name
        begun = self._together(lambda: scatter(mine, chunks.view(-1), group=self.group, async_op=True))
        return mine, lambda: self._together(begun.wait)

    def take_first_(self, tensor: Tensor) -> None:
        """Set ``tensor``, one block of memory, to that of the first rank."""
        self._together(lambda: dist.broadcast(tensor, group=self.group, group_src=0))

    def stacked(self, mine: Tensor) -> Tensor:
        """Return [ranks, ...]: the tensors of all ranks, of one shape, in their order."""
        everyone = [torch.empty_like(mine) for _ in range(self.size)]
        self._together(lambda: dist.all_gather(everyone, mine, group=self.group))
        return torch.stack(everyone)

    def gather(self, value: Any) -> list[Any]:
        """The ranks' values, which can be pickled, in their order."""
        everyone: list[Any] = [None] * self.size
        self._together(lambda: dist.all_gather_object(everyone, value, group=self.group))
        return everyone

    def share(self, value: Any, source: int) -> Any:
        """The value of rank number ``source``, which can be pickled; what others give is ignored."""
        values = [value]
        here = self.device if self.device.type != "cpu" else None
        self._together(lambda: dist.broadcast_object_list(values, group=self.group, group_src=source, device=here))
        return values[0]

    def share_seed(self, seed: int | None, generator: torch.Generator | None = None) -> int:
        """``seed``, which must be the same on all ranks, or for None a number of 128 bits that rank 0 draws.

        It is secret, or that of rank 0's ``generator``; those of other ranks may differ.
        """
        self.agree({"seed": seed})
        if seed is not None:
            return seed
        if generator is None:
            drawn = [secrets.randbits(62) for _ in range(3)]
        else:
            drawn = torch.randint(2**62, (3,), generator=generator, device=generator.device).tolist()
        words = torch.tensor(drawn, dtype=torch.int64, device=self.device)
        self.take_first_(words)
        high, middle, low = words.tolist()
        return (high << 124 | middle << 62 | low) % 2**128

    def join_seed(self, source: Seeded) -> None:
        """Give all ranks one seed where some have another: each draws its part of one stream."""
        if self._differing({"seed": source.seed})[0]:
            source.seed = derived_seed(0, *self.gather(source.seed))

    def join_batches(self, loader: Any) -> None:
        """Give all ranks one seed of the batches of a loader of which each takes its share, or all."""
        if self.draw_one(loader):
            self.join_seed(loader.sampler_state)
            if self.deals:
                loader.sampler_state.take(self.share_number, self.shares)
            if self.parts is not None:
                loader.sampler_state.shared = self.parts.share

    def draw_one(self, loader: Any) -> bool:
        """Return whether all ranks draw the same lists, of which each takes a part, or all."""
        return getattr(loader, "is_dealt", False) or (self.parts is not None and hasattr(loader, "sampler_state"))

    def _differing(self, values: dict[str, Any], told: Sequence[int] = ()) -> tuple[list[str], list[list[int]]]:
        """Return the names of the values whose text is not the same on all ranks, and what each has ``told``."""
        digests = [_digest([repr(_plain(v)).encode()]) for v in values.values()]
        everyone = self.stacked(torch.tensor([*digests, *told], device=self.device))
        of_values, of_all = everyone.split([len(digests), len(told)], dim=1)
        differs = (of_values != of_values[0]).any(0).tolist()
        return [name for name, is_other in zip(values, differs, strict=True) if is_other], of_all.tolist()

    def agree(self, values: dict[str, Any], told: Sequence[int] = (), everyone: Ranks | None = None) -> list[list[int]]:
        """PrivacyError unless every value has the same text on all ranks; the message names it but not its value.

        Args:
            values: What is compared.
            told: Numbers that may differ.
            everyone: Who shall stop, too, where these ranks are a group of them.

        Returns:
            What each rank has told.
        """
        names, of_all = self._differing(values, told)
        if everyone is not None and everyone.largest(len(names)):
            names = [*values]
        if names:
            raise PrivacyError(
                f"The ranks differ in {', '.join(names)}: what they would release together is not what the accountant "
                "counts. Give every rank the same settings and seed, and the same weights: wrap the module in "
                "DifferentiallyPrivateDistributedDataParallel on all ranks, and load checkpoints on all of them."
            )
        return of_all

    def agree_where_known(self, what: str, value: Any) -> None:
        """PrivacyError unless ``value`` has the same text on all ranks on which it is not None."""
        mine = torch.tensor([0 if value is None else _digest([repr(value).encode()])], device=self.device)
        if len({int(found) for found in self.stacked(mine)} - {0}) > 1:
            raise PrivacyError(
                f"The ranks differ in {what}: with parts of two lists an example may be in both. Every rank must use "
                "its loader's batches in their order, as many for a step as the others."
            )

    def raise_together(self, error: PrivacyError | None) -> None:
        """Raise a rank's ``error`` on all ranks, each of which calls this: its own, or else that of the first one."""
        if not self.largest(int(error is not None)):
            return
        first = next((rank, text) for rank, text in enumerate(self.gather(error and str(error))) if text is not None)
        raise error or PrivacyError(f"Rank {first[0]} refuses the step: {first[1]}")

    def agree_on_examples(self, inputs: Iterable[Any]) -> None:
        """PrivacyError unless all ranks have the same inputs of a pass, where each has a part of every layer."""
        told = [value for value in inputs if isinstance(value, Tensor | bool | int | float | str)]
        shown = [(tuple(v.shape), v.dtype, fingerprint([v])) if isinstance(v, Tensor) else v for v in told]
        if self._differing({"inputs": shown})[0]:
            raise PrivacyError(
                "The ranks of a tensor-parallel model were called with different batches, and each of them has a part "
                "of every layer: examples would mix, and one could move the sum by several clip norms. Call the model "
                "on all ranks with its loader's batches in their order; what changes an example at random must draw "
                "the same numbers on all ranks."
            )

    def agree_on_losses(self, outputs: Iterable[Any]) -> None:
        """Let backward() raise PrivacyError where the loss has other gradients of ``outputs`` than on the first rank.

        A layer that is split adds up the gradients of its input, so that behind it those of two targets look alike.
        """
        for output in outputs:
            if isinstance(output, Tensor) and output.requires_grad:
                output.register_hook(self._check_loss)

    def _check_loss(self, grad: Tensor) -> None:
        if not grad.numel():
            return  # as on all ranks, whose inputs are the same
        rows = grad.detach().reshape(len(grad) if grad.dim() else 1, -1)
        norms = torch.linalg.vector_norm(rows, dim=1, dtype=torch.promote_types(rows.dtype, torch.float32)).double()
        found = self.stacked(torch.stack([_projections(grad.detach()), norms]).to(self.device))
        apart, known = (found[:, 0] - found[0, 0]).abs(), found.isfinite()
        if bool(((apart > 1e-3 * found[0, 1]) | (known != known[0]).any(1)).any()):  # on like ranks not by a bit
            raise PrivacyError(
                "The loss has different gradients of the model's output on the ranks of a tensor-parallel model: "
                "examples would mix. Give all ranks the same targets, the same loss and the same random numbers "
                "(dropout: call torch.manual_seed with one seed on all), and output_layouts=Replicate() to a last "
                "layer that is split."
            )

    def _together(self, collective: Callable[[], Any]) -> Any:
        try:
            return collective()
        except RuntimeError as error:
            raise PrivacyError(
                f"Rank {self.rank} of {self.size} did not get an answer from the other ranks; nothing was released. "
                "Every rank must call backward() and optimizer.step() for each batch of its loader, empty ones "
                "included, every rank must save what the others save, and none may stop before the others. (The group "
                f"says: {str(error).splitlines()[0]})"
            ) from error


class DifferentiallyPrivateDistributedDataParallel(nn.Module):
    """``model`` on every rank, with rank 0's parameters and buffers; hand it to ``PrivacyEngine.make_private``.

    Takes the place of torch's ``DistributedDataParallel``, which averages gradients before they are clipped. Build it
    before the optimiser, on all ranks.

    Args:
        model: The model, on its device.
        device_mesh: For a model whose layers ``parallelize_module`` has split over one dimension of a mesh: the other
            dimension, ``mesh["data"]``, over which copies of it are trained.

    Raises:
        UnsupportedError: the model's parameters are sharded, and there is no mesh of copies, or one that is not needed.
        ValueError: there is no process group.
    """

    def __init__(self, model: nn.Module, device_mesh: Any = None) -> None:
        super().__init__()
        self.ranks = _joined(model, device_mesh)
        self.module = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


_REPLICATED: weakref.WeakKeyDictionary[nn.Module, Ranks] = weakref.WeakKeyDictionary()
"""Modules that all ranks train without a wrapper around them, and their parts."""


def replicate(module: nn.Module) -> Ranks:
    """Let all ranks train ``module`` together, from rank 0's parameters and buffers on, without a wrapper around it.

    For a module that a training library calls by itself. Call it on all ranks, and then ``make_private`` for the module
    or a part of it; the names of parameters stay as they are.

    Args:
        module: The module, on its device, not sharded.

    Returns:
        The ranks.

    Raises:
        UnsupportedError: its parameters are sharded.
        ValueError: there is no process group.
    """
    ranks = _joined(module)
    for part in module.modules():
        _REPLICATED[part] = ranks
    return ranks


def grid_of(mesh: Any, copies: Ranks | None) -> Ranks:
    """Return all ranks, of which those along ``mesh`` have parts of layers, and ``copies`` the same parts.

    UnsupportedError, on all ranks, where they form no grid.
    """
    parts = Ranks(mesh.device_type, mesh.get_group())
    ranks = Ranks(mesh.device_type, sharded=True, parts=parts, copies=copies)
    if copies is None and parts.size != ranks.size:
        raise UnsupportedError(
            f"The mesh of tensor parallelism has {parts.size} of {ranks.size} processes, and all of them must train "
            "one model. Make the mesh of all processes; or, where the others train copies of it on other examples, "
            'give parallelize_module mesh["tensor"] and make_private DifferentiallyPrivateDistributedDataParallel('
            'model, device_mesh=mesh["data"]), of one mesh of two dimensions.'
        )
    groups = [tuple(dist.get_process_group_ranks(of.group)) if of else () for of in (parts, copies)]
    found = ranks.gather((mesh.mesh.tolist(), (parts.size, ranks.shares), parts.rank, ranks.share_number, *groups))
    for order, *_ in found:
        if order != sorted(order):
            raise UnsupportedError(f"The mesh of tensor parallelism has the ranks in the order {order}; sort them.")
    sizes, places = {size for _, size, *_ in found}, {(part, share) for *_, part, share, _, _ in found}
    rows, columns = {(share, of) for *_, share, of, _ in found}, {(part, of) for *_, part, _, _, of in found}
    if len(sizes) > 1 or (len(places), len(rows), len(columns)) != (ranks.size, ranks.shares, parts.size):
        raise UnsupportedError(
            f"The {ranks.size} processes are no grid of {parts.size} parts of the layers and {ranks.shares} copies of "
            'them; take both dimensions of one mesh of all processes, mesh["tensor"] for parallelize_module and '
            'mesh["data"] for fully_shard or device_mesh.'
        )
    return ranks


def _joined(module: nn.Module, mesh: Any = None) -> Ranks:
    """Rank 0's parameters and buffers in ``module``, on all ranks: those of ``mesh`` where it is given."""
    meshes = {p.device_mesh for p in module.parameters() if hasattr(p, "device_mesh")}  # to import DTensor is slow
    if meshes and (mesh is None or any(hasattr(part, "unshard") for part in module.modules())):
        raise UnsupportedError(
            "The module's parameters are sharded, so each rank holds other ones; pass a whole module, or give "
            "make_private the module to which fully_shard was applied, without a wrapper. Of layers that are split "
            'over mesh["tensor"] by parallelize_module pass the other dimension, too: device_mesh=mesh["data"].'
        )
    if mesh is not None and [of.ndim for of in (mesh, *meshes)] != [1, 1]:
        raise UnsupportedError(
            "device_mesh is the one dimension of a mesh over which there are copies of a model whose layers are split "
            "over the other one; split them by parallelize_module first, or leave device_mesh out: all processes then "
            "train one whole model."
        )
    parameter = next(module.parameters(), None)
    ranks = Ranks("cpu" if parameter is None else parameter.device, None if mesh is None else mesh.get_group())
    if mesh is not None:
        grid_of(meshes.pop(), ranks)  # before parts of other layers than this rank's are taken for its own
    for tensor in [*module.parameters(), *module.buffers()]:
        held = getattr(tensor, "_local_tensor", tensor).detach()
        for dim, stride in enumerate(held.stride()):
            held = held if stride else held[(slice(None),) * dim + (slice(1),)]  # one number stands for many
        # A collective wants one block of memory.
        whole = held.contiguous()
        ranks.take_first_(whole)
        if whole.data_ptr() != held.data_ptr():
            held.copy_(whole)
    return ranks


def ranks_of(module: nn.Module) -> Ranks | None:
    """The ranks that train ``module`` together, None for a module that trains alone.

    UnsupportedError for torch's DistributedDataParallel, and where only a part of the module is distributed.
    """
    inner = getattr(module, "_module", module)
    wrapped = isinstance(inner, DifferentiallyPrivateDistributedDataParallel)
    for name, part in inner.named_modules():
        if isinstance(part, DistributedDataParallel):
            raise UnsupportedError(
                "torch's DistributedDataParallel averages the gradients of whole batches before any example is "
                "clipped; wrap the bare module in dpcore.distributed.DifferentiallyPrivateDistributedDataParallel."
            )
        known = isinstance(part, DifferentiallyPrivateDistributedDataParallel)
        if name and inner not in _REPLICATED and (known or (part in _REPLICATED and not wrapped)):
            raise UnsupportedError(
                f"Only the part {name!r} of the module is distributed; the weights around it would drift apart. Wrap "
                "the whole module in DifferentiallyPrivateDistributedDataParallel."
            )
    if inner in _REPLICATED:
        return _REPLICATED[inner]
    if isinstance(getattr(inner, "ranks", None), Ranks):
        return inner.ranks  # type: ignore[return-value]
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        warnings.warn(
            f"{dist.get_world_size()} processes are running, but the module is not distributed: each of them trains a "
            "model of its own, and a release of several costs the sum of their budgets. Wrap it in "
            "DifferentiallyPrivateDistributedDataParallel to train one.",
            stacklevel=4,
        )
    return None


def fingerprint(tensors: Iterable[Tensor]) -> int:
    """A number that changes with any bit of the tensors."""
    return _digest(t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for t in tensors)


def _projections(rows: Tensor) -> Tensor:
    """Return [m]: a number for each of ``rows`` [m, ...], which other numbers in the row would hardly have."""
    generator = torch.Generator().manual_seed(0)
    while rows.dim() > 1:
        rows = rows @ torch.randn(rows.shape[-1], generator=generator).to(rows)
    return rows.double().view(-1)


def _plain(value: Any) -> Any:
    """Return ``value`` with numbers in the place of tensors, whose text has but four digits."""
    if isinstance(value, Tensor):
        return value.dtype, value.tolist()
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, list | tuple) else value


def _digest(texts: Iterable[bytes]) -> int:
    """63 bits of SHA-256."""
    sha = hashlib.sha256()
    for text in texts:
        sha.update(len(text).to_bytes(8, "little") + text)
    return int.from_bytes(sha.digest()[:8], "little") >> 1


def share_of(sampler: Any, data_set: Any, ranks: Ranks) -> Any:
    """Return a rank's examples in the order of the data set, where ``sampler`` goes through all of them in that order.

    Any other sampler as it is; :func:`check_shares` judges it. For loaders without Poisson sampling.
    """
    if type(sampler) is not SequentialSampler or len(sampler) != len(data_set):
        return sampler
    # Without padding, which would repeat an example.
    share: Sampler[int] = DistributedSampler(data_set, ranks.size, ranks.rank, shuffle=False, drop_last=True)
    return share


def order_of(loader: Any) -> Any:
    """Return what decides about the order of examples of which ranks take parts by torch's sampler; else None."""
    sampler = getattr(loader, "sampler", None)
    return (sampler.seed, sampler.epoch) if isinstance(sampler, DistributedSampler) and sampler.shuffle else None


def check_shares(loader: DataLoader[Any], ranks: Ranks) -> None:
    """PrivacyError, on all ranks, unless no example of a loader without Poisson sampling reaches two shares."""
    if not ranks.deals:
        return  # all work on the same examples
    sampler, own = loader.sampler, (ranks.share_number, ranks.shares)
    is_own = isinstance(sampler, DistributedSampler) and (sampler.rank, sampler.num_replicas) == own
    if ranks.least(int(is_own)) == 0:
        raise PrivacyError(
            f"Without Poisson sampling each of the {ranks.shares} ranks would process every example, and one example "
            "would move the sum by several clip norms. Use poisson_sampling=True, or, where the loader is yours, give "
            "it a torch.utils.data.DistributedSampler, of which each rank takes its own part (rank and num_replicas: "
            'where layers are split, those of mesh["data"]).'
        )
    assert isinstance(sampler, DistributedSampler)
    if sampler.total_size > len(loader.dataset):  # type: ignore[arg-type]
        raise PrivacyError(
            "The DistributedSampler repeats some examples to give all ranks equally many, and a repeated example moves "
            "the sum by two clip norms. Pass drop_last=True to it."
        )
