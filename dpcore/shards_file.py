"""The shards of a checkpoint, in a folder beside it that any number of ranks can read (torch.distributed.checkpoint).

A file's entries keep a text in the place of every sharded tensor. The file is written last, and names its folder: until
then, and where a process dies meanwhile, the file of before and its folder are as they were.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from glob import escape, glob
from typing import Any

import torch
import torch.distributed as dist

from dpcore.distributed import Ranks
from dpcore.errors import PrivacyError

FOLDER = "shards"
"""The entry that names the folder."""
_PLACE = "dpcore shards "


def put(entries: dict[str, Any], of: Sequence[str], path: str, name: str, ranks: Ranks) -> dict[str, Any]:
    """Write the sharded tensors in some of the ``entries``, which all ranks call; return what is left of all.

    Args:
        entries: Of a checkpoint: nested dictionaries.
        of: The names of those in which there are sharded tensors.
        path: The checkpoint's file.
        name: What no other checkpoint of this file is called.
        ranks: Those that hold the shards.
    """
    import torch.distributed.checkpoint as dcp  # slow to import

    found: dict[str, Any] = {}
    left = {key: _without(value, (key,), found) if key in of else value for key, value in entries.items()}
    dcp.save(found, checkpoint_id=f"{path}.{name}", process_group=ranks.group)
    if not ranks.least(int(os.path.exists(os.path.join(f"{path}.{name}", ".metadata")))):  # which rank 0 writes last
        raise PrivacyError(f"The shards of {path} are on several disks; give a path on one that all ranks share.")
    return {**left, FOLDER: f"{os.path.basename(path)}.{name}"}


def check_disk(path: Any, ranks: Ranks, is_loading: bool) -> None:
    """Compare over the ranks of a sharded module, which all call this, what they are about to do with a file.

    Raises:
        PrivacyError: on all ranks, because some load the file and others save it, or do not see it.
    """
    told = ranks.gather(is_loading and (not isinstance(path, (str, os.PathLike)) or os.path.exists(path)))
    if is_loading and not any(told):
        return  # who reads it says so
    if not all(told) and any(told):
        there = [rank for rank, is_there in enumerate(told) if is_there]
        raise PrivacyError(
            f"The checkpoint {path} is there for the ranks {there} of {len(told)} alone; give a path on a disk that "
            "all ranks share, and load it or save it on all of them."
        )


def forget_others(path: str, entries: dict[str, Any]) -> None:
    """Remove what belongs to earlier files of that name, once the file with these ``entries`` is there."""
    for folder in glob(f"{escape(path)}.*-{FOLDER}"):
        if os.path.basename(folder) != entries[FOLDER]:
            shutil.rmtree(folder, ignore_errors=True)
    for file in glob(f"{escape(path)}.rank*"):  # of an earlier version of dpcore, or of a whole model
        if file.removeprefix(f"{path}.rank").isdigit():
            os.remove(file)


def bring_back(
    entries: dict[str, Any], path: str, ranks: Ranks, like: Callable[[tuple[Any, ...]], Any]
) -> dict[str, Any]:
    """Return the entries with this rank's shards of what :func:`put` has taken out, which all ranks call.

    Args:
        entries: As they were read.
        path: The file that they are of.
        ranks: Those that hold the shards now.
        like: Gives, for the keys that lead to a tensor, one that is sharded as it shall be.

    Raises:
        PrivacyError: the folder is not there, or is of a model of another shape.
    """
    import torch.distributed.checkpoint as dcp

    left = dict(entries)
    folder = os.path.join(os.path.dirname(path), left.pop(FOLDER))
    if not os.path.isdir(folder):
        raise PrivacyError(
            f"The checkpoint {path} has its shards in the folder {folder}, which is not there; copy it with the file."
        )
    saved: dict[str, Any] = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    wanted: dict[str, Any] = {}
    for keys, name in _places(left, ()):
        if name not in saved:  # a text of the user's
            continue
        mine, size = like(keys), saved[name].size
        if mine is None or mine.shape != size:
            here = "has none in shards" if mine is None else f"has one of {tuple(mine.shape)}"
            raise PrivacyError(
                f"The checkpoint's {name} has the shape {tuple(size)}, and this run {here}; build the model (LoRA and "
                "all) and the optimizer as the saved ones."
            )
        wanted[name] = torch.zeros_like(mine, dtype=saved[name].properties.dtype, requires_grad=False)
    dcp.load(wanted, checkpoint_id=folder, process_group=ranks.group)
    return dict(_filled(left, wanted))


def write_whole(entries: dict[str, Any], path: Any, options: dict[str, Any]) -> None:
    """Write a file so that its name has the old content or the new one, whatever happens meanwhile."""
    torch.save(entries, f"{path}.new", **options)
    os.replace(f"{path}.new", path)


def wait_for(ranks: Ranks) -> None:
    """Wait until all ranks are here."""
    dist.barrier(ranks.group)


def _without(value: Any, keys: tuple[Any, ...], found: dict[str, Any]) -> Any:
    if isinstance(value, dict):
        return {key: _without(part, (*keys, key), found) for key, part in value.items()}
    if not hasattr(value, "device_mesh"):
        return value
    name = "/".join(map(str, keys))
    found[name] = value
    return _PLACE + name


def _places(value: Any, keys: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], str]]:
    if isinstance(value, dict):
        for key, part in value.items():
            yield from _places(part, (*keys, key))
    elif isinstance(value, str) and value.startswith(_PLACE):
        yield keys, value.removeprefix(_PLACE)


def _filled(value: Any, found: dict[str, Any]) -> Any:
    if isinstance(value, dict):
        return {key: _filled(part, found) for key, part in value.items()}
    return found.get(value.removeprefix(_PLACE), value) if isinstance(value, str) and _PLACE in value else value
