"""The cache of converted data sets: one folder each, memory-mappable arrays and a ``meta.json``.

    <cache>/data/mnist/            train_x.npy train_y.npy test_x.npy test_y.npy meta.json
    <cache>/data/mnist-synthetic/  the synthetic twin, if somebody asked for it

Standard library and numpy only.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from harness.errors import BadInput, did_you_mean

CACHE_VARIABLE = "DPBENCH_CACHE"
OF_FULL_TASKS = ("words-gpt2", "words-llama-512", "words-llama-1024", "words-roberta", "pictures-224", "clicks-large")
"""Those that only the full tasks read: made where a run needs one or somebody names it, not where all are meant."""
NAMES = ("mnist", "cifar10", "imdb", "imdb-wordpiece", "adult", "brown", "clicks", "clicks-1m", *OF_FULL_TASKS)
OWN = re.compile(r"own-[a-z0-9][a-z0-9.-]*")
"""Names of a user's data sets (``dpbench data add``)."""
MADE = ("clicks", "clicks-1m", *OF_FULL_TASKS)
"""Those that are synthetic whether asked for or not: there is no genuine one."""
ARRAYS = ("train_x", "train_y", "test_x", "test_y")
META = "meta.json"
LAYOUT = 1
"""Version of the folder's layout, in ``meta.json``; another number is fetched again."""


@dataclass(frozen=True)
class Dataset:
    """One split, ready for a network.

    x: float32 [n, C, H, W] in [0, 1] for images, int32 [n, tokens] for tokens, float32 [n, 104] for Adult.
    y: int32 [n], or int32 [n, tokens] of a language model.
    meta: the ``meta.json`` of the folder; ``meta["synthetic"]`` must follow every number made from it.
    """

    x: np.ndarray
    y: np.ndarray
    meta: dict[str, Any]


def cache_folder() -> Path:
    """The folder named by DPBENCH_CACHE, else ``dpbench`` in XDG_CACHE_HOME (``~/.cache`` where that is not set, or is
    relative and thus void; a folder for temporary files, of this user's own, where there is no home). Not created."""
    named = os.environ.get(CACHE_VARIABLE)
    return Path(os.path.expanduser(named)) if named else usual_cache()


def usual_cache() -> Path:
    """Return the cache of a user who names none."""
    caches = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if caches.is_absolute():
        return caches / "dpbench"
    there = home()
    return Path(tempfile.gettempdir(), f"dpbench-{os.getuid()}") if there is None else there / ".cache" / "dpbench"


def home() -> Path | None:
    """Return the user's home folder; None where nobody has given this user one (``docker run --user 12345``)."""
    there = Path(os.path.expanduser("~"))
    return there if there.is_absolute() else None


def folder(name: str, synthetic: bool = False) -> Path:
    """Return where data set ``name`` lives, whether it is there or not; of one that is always synthetic, that one.
    BadInput for an unknown name."""
    if name not in NAMES and not OWN.fullmatch(name):
        near = did_you_mean(name, NAMES)
        raise BadInput(
            f"Unknown data set {name!r}{near}: choose one of {', '.join(NAMES)}, or one of your own, own-NAME."
        )
    if synthetic and OWN.fullmatch(name):
        raise BadInput(f"Data set {name} is your own and has no synthetic twin; leave out --synthetic.")
    return cache_folder() / "data" / (f"{name}-synthetic" if synthetic or name in MADE else name)


def describe(name: str, synthetic: bool = False) -> dict[str, Any] | None:
    """The ``meta.json`` of a data set that is in the cache, or None. BadInput where the folder is damaged."""
    target = folder(name, synthetic)
    try:
        meta = json.loads((target / META).read_text())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise damaged(name, synthetic, f"{META} cannot be read ({error})") from error
    if not isinstance(meta, dict) or meta.get("layout") != LAYOUT:
        raise damaged(name, synthetic, f"{META} is not of layout {LAYOUT}")
    return meta


def load(name: str, split: str = "train", synthetic: bool = False) -> Dataset:
    """One split of a data set from the cache; never fetches and never falls back to the synthetic twin.

    Raises BadInput where the data set is missing or damaged, with the command that mends it.
    """
    if split not in ("train", "test"):
        raise BadInput(f"Unknown split {split!r}: choose train or test.")
    meta = describe(name, synthetic)
    if meta is None:
        what = f"The synthetic twin of {name}" if synthetic else f"Data set {name}"
        raise BadInput(f"{what} is not in {cache_folder()}: run `{_remedy(name, synthetic)}`.")
    stored = np.asarray(_open(name, synthetic, meta, f"{split}_x"))
    y = np.array(_open(name, synthetic, meta, f"{split}_y"))
    # dtype is given because numpy 1 would pick float16 for uint8 / scalar.
    x = np.divide(stored, 255, dtype=np.float32) if stored.dtype == np.uint8 else np.array(stored)
    return Dataset(x, y, meta)


def arrays(name: str, synthetic: bool = False) -> dict[str, np.ndarray]:
    """The four stored arrays, memory-mapped and read-only, as they lie on disk (images uint8)."""
    meta = describe(name, synthetic)
    if meta is None:
        raise BadInput(f"Data set {name} is not in {cache_folder()}: run `{_remedy(name, synthetic)}`.")
    return {array: _open(name, synthetic, meta, array) for array in ARRAYS}


def _open(name: str, synthetic: bool, meta: Mapping[str, Any], array: str) -> np.ndarray:
    path = folder(name, synthetic) / f"{array}.npy"
    try:
        values = np.load(path, mmap_mode="r", allow_pickle=False)
        declared = meta["arrays"][array]
        agrees = list(values.shape) == declared["shape"] and values.dtype.str == declared["dtype"]
    except (OSError, ValueError, KeyError, TypeError, EOFError) as error:
        raise damaged(name, synthetic, f"{path.name} cannot be read ({error})") from error
    if not agrees:
        raise damaged(name, synthetic, f"{path.name} is {values.dtype} {values.shape}, {META} says otherwise")
    return values


def damaged(name: str, synthetic: bool, what: str) -> BadInput:
    return BadInput(f"{folder(name, synthetic)} is damaged: {what}; run `{_remedy(name, synthetic)}` to replace it.")


def _remedy(name: str, synthetic: bool) -> str:
    if OWN.fullmatch(name):
        return f"dpbench data add {name} FILE.npz"
    return f"dpbench data fetch {name}" + (" --synthetic" if synthetic else "")


def add(name: str, file: Path) -> dict[str, Any]:
    """Put a user's data set into the cache and return its meta.

    Args:
        name: ``own-`` and letters.
        file: an ``.npz`` with ``train_x``, ``train_y``, ``test_x``, ``test_y``: uint8, float32 or int32; labels int32.

    Raises:
        BadInput: another name, or a file that does not hold these arrays.
    """
    if not OWN.fullmatch(name):
        raise BadInput(f"The data set is called {name!r}; one of your own has a name like own-xrays.")
    try:
        with np.load(file, allow_pickle=False) as found:
            values = {array: found[array] for array in ARRAYS}
    except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
        raise BadInput(
            f"{file} is no .npz file with {', '.join(ARRAYS)} ({error}); write one by numpy.savez."
        ) from None
    for array, value in values.items():
        allowed = ("uint8", "float32", "int32") if array.endswith("_x") else ("int32",)
        if value.dtype.name not in allowed or len(value) != len(values[f"{array[:-1]}y"]):
            raise BadInput(
                f"{file}: {array} is {value.dtype} {value.shape}; it has to be {' or '.join(allowed)}, with a row for "
                "each label."
            )
    facts = {"title": name, "origin": f"{file.name}, by the user", "licence": "the user's", "obtained": "data add"}
    return write(name, False, values, {**facts, "archives": {}, "known_sha256": False})


def digest(values: Mapping[str, np.ndarray]) -> str:
    """SHA-256 (hex) over the name, type, shape and bytes of the four arrays, in the order of ARRAYS."""
    total = hashlib.sha256()
    for name in ARRAYS:
        value = np.ascontiguousarray(values[name])
        total.update(f"{name} {value.dtype.str} {value.shape}\n".encode())
        total.update(value.data)
    return total.hexdigest()


def verify(name: str, synthetic: bool = False) -> dict[str, Any]:
    """Hashes the arrays again and returns the meta; BadInput where the bytes are not those that were written."""
    values = arrays(name, synthetic)
    meta = describe(name, synthetic)
    assert meta is not None  # arrays() has just read it
    found = digest(values)
    if found != meta["sha256"]:
        raise damaged(name, synthetic, f"its SHA-256 is {found[:12]}…, written was {str(meta['sha256'])[:12]}…")
    for file, written in meta.get("files", {}).items():
        if hashlib.sha256(further_file(name, file, synthetic)).hexdigest() != written:
            raise damaged(name, synthetic, f"{file} is not what was written")
    return meta


def further_file(name: str, file: str, synthetic: bool = False) -> bytes:
    """Return a file that lies beside the arrays. BadInput where it is missing, or none that the meta names."""
    meta = describe(name, synthetic)
    if meta is None:
        raise BadInput(f"Data set {name} is not in {cache_folder()}: run `{_remedy(name, synthetic)}`.")
    try:
        if file in meta.get("files", {}):
            return (folder(name, synthetic) / file).read_bytes()
    except OSError as error:
        raise damaged(name, synthetic, f"{file} cannot be read ({error})") from error
    raise damaged(name, synthetic, f"{META} names no {file}")


def files(name: str, synthetic: bool = False) -> list[Path]:
    """The files that a measurement reads: the arrays, the meta, and what the meta names beside them."""
    beside = (describe(name, synthetic) or {}).get("files", {})
    return [folder(name, synthetic) / file for file in (*(f"{array}.npy" for array in ARRAYS), META, *beside)]


def size(name: str, synthetic: bool = False) -> int:
    """Bytes on disk."""
    return sum(path.stat().st_size for path in folder(name, synthetic).glob("*") if path.is_file())


def write(
    name: str,
    synthetic: bool,
    values: Mapping[str, np.ndarray],
    facts: Mapping[str, Any],
    texts: Mapping[str, str] | None = None,
    further: Mapping[str, bytes] | None = None,
) -> dict[str, Any]:
    """Puts a data set into the cache in one rename and returns its meta.

    ``values``: the four arrays; ``facts``: origin, licence and how it was obtained; ``texts``, ``further``: further
    files by name, of which the meta keeps the hashes of ``further``.
    A crash leaves the old folder or the new one (or, between two renames, none), never a mixture. The caller holds
    the lock of the data set.
    """
    target = folder(name, synthetic)
    meta = {
        "name": name,
        "synthetic": synthetic,
        "layout": LAYOUT,
        **facts,
        "sha256": digest(values),
        "arrays": {a: {"dtype": values[a].dtype.str, "shape": list(values[a].shape)} for a in ARRAYS},
        "class_counts": {
            split: np.bincount(values[f"{split}_y"]).tolist()
            for split in ("train", "test")
            if values["train_y"].ndim == 1
        },
    }
    if further:
        meta["files"] = {file: hashlib.sha256(content).hexdigest() for file, content in further.items()}
    with file_errors(target, f"data set {name}"):
        target.parent.mkdir(parents=True, exist_ok=True)
        _sweep(target)
        temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.new-", dir=target.parent))
        try:
            temporary.chmod(0o755)  # mkdtemp's 0700 would hide the data from a container's user
            for array in ARRAYS:
                _save(temporary / f"{array}.npy", values[array])
            for file, text in (texts or {}).items():
                (temporary / file).write_text(text, encoding="utf-8")
            for file, content in (further or {}).items():
                (temporary / file).write_bytes(content)
            (temporary / META).write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")
            if target.exists():
                target.rename(target.with_name(f".{target.name}.old-{os.getpid()}"))
            temporary.rename(target)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        _sweep(target)
    return meta


def _sweep(target: Path) -> None:
    """Removes what an interrupted write of this data set left behind."""
    for pattern in (f".{target.name}.new-*", f".{target.name}.old-*"):
        for left in target.parent.glob(pattern):
            shutil.rmtree(left, ignore_errors=True)


def _save(path: Path, value: np.ndarray) -> None:
    """Like numpy.save, but through file.write: the error of ndarray.tofile on a full disk carries no errno."""
    value = np.ascontiguousarray(value)
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(value))
        file.write(value.data)


@contextmanager
def file_errors(path: Path, what: str) -> Iterator[None]:
    """Turns an OSError of the block into one sentence about writing ``what`` to ``path``."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise no_space(path, what) from error
        reason = error.strerror or str(error)
        raise BadInput(
            f"Cannot write {what} to {path} ({reason}): set {CACHE_VARIABLE} to a folder that you can write to."
        ) from error


def no_space(path: Path, what: str) -> BadInput:
    return BadInput(
        f"No space is left for {what} in {path}: free some, or set {CACHE_VARIABLE} to a folder on a larger disk, "
        "and run the same command again (whole downloads are kept)."
    )
