"""One image per set of locked files, built without a network from the wheelhouse.

Frameworks with equal pins share an image, as they share an environment. Labels say what an image was made of: the hash
of the lock, the base, and the build recipe; a run refuses an image whose labels are not those of the lock in the
repository.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from packaging.utils import canonicalize_name
from packaging.version import Version

from harness.environments.containers import engine, lockfile
from harness.environments.containers.engine import Engine
from harness.environments.containers.lockfile import Lock
from harness.environments.venv import EnvironmentFault, Log
from harness.errors import BadInput
from harness.paths import ROOT
from harness.plan.registry import Framework
from harness.store import cache

RECIPE = ROOT / "dockerfiles"
DEFAULT_BASE = "python:3.11-slim"
DEBOOTSTRAP = "dpbench/debootstrap"
DEBIAN = "bookworm"
"""The Debian whose Python is 3.11."""
PACKAGES = ("python3", "python3-venv", "python3-dev", "g++")
"""A compiler, because torch.compile is part of what some contestants are."""
BASE_TAG = "dpbench/base"
TAG = "dpbench/env"
LOCK_LABEL, PINS_LABEL, BASE_LABEL, RECIPE_LABEL = "dpbench.lock", "dpbench.pins", "dpbench.base", "dpbench.recipe"
MADE_FOR_LABEL = "dpbench.made-for"


@dataclass(frozen=True)
class Image:
    """``digest``: the engine's own hash of the image (its id); ``base``: that of the base. ``lock``: SHA-256 of the
    lock it was built from; ``pins``: :attr:`Framework.lock_hash` of the framework that it was made for."""

    tag: str
    digest: str
    base: str
    lock: str
    made_for: str
    mib: int
    pins: str


def tag_of(framework: Framework, device: str = "cpu") -> str:
    """Return the tag of a framework's image."""
    return f"{TAG}:{framework.lock_hash}" + ("" if device == "cpu" else f"-{device}")


def base_tag(device: str = "cpu") -> str:
    """Return the tag of the base that the images stand on."""
    return f"{BASE_TAG}:{device}"


def recipe_hash() -> str:
    """Return the hash of the recipe that images are built by."""
    digest = hashlib.sha256()
    for name in ("framework.Dockerfile", "install.py"):
        digest.update((RECIPE / name).read_bytes())
    return digest.hexdigest()[:16]


def existing(on: Engine) -> list[Image]:
    """Return all framework images of the engine."""
    with engine.errors():
        found = on.client.images.list(filters={"label": LOCK_LABEL})
    return sorted((_image(one, tag) for one in found for tag in one.tags), key=lambda image: image.tag)


def _image(found: Any, tag: str) -> Image:
    labels = found.labels
    size = int(found.attrs["Size"]) // 2**20
    made_for, made_of = labels.get(MADE_FOR_LABEL, ""), labels.get(PINS_LABEL, "")
    return Image(tag, found.id, labels[BASE_LABEL], labels[LOCK_LABEL], made_for, size, made_of)


def find(on: Engine, tag: str) -> Image | None:
    """Return the image with that tag, or None where the engine has none."""
    import docker.errors

    with engine.errors():
        try:
            found = on.client.images.get(tag)
        except docker.errors.ImageNotFound:
            return None
    return _image(found, tag) if LOCK_LABEL in found.labels else None


def named(on: Engine, name: str, option: str) -> Image:
    """Return the image that a tag or digest names. ``option``: what asks for it. Raises :class:`BadInput` where there
    is no such image, or it is none of a framework."""
    import docker.errors

    remedy = "name a tag or digest that `dpbench image list` shows, or build one with `dpbench image build`"
    with engine.errors():
        try:
            found = on.client.images.get(name)
        except docker.errors.ImageNotFound:
            raise BadInput(f"{option} is 'image:{name}', which {on.host} does not have; {remedy}.") from None
        except docker.errors.APIError as error:
            why = error.explanation or error
            raise BadInput(f"{option} is 'image:{name}', which names no image ({why}); {remedy}.") from None
    if LOCK_LABEL not in found.labels:
        raise BadInput(f"{option} is 'image:{name}', which is no framework's: it lacks the label of a lock; {remedy}.")
    return _image(found, name)


def base_digest(on: Engine, device: str = "cpu") -> str | None:
    """Return the base that images are built on, or None where there is none yet."""
    import docker.errors

    with engine.errors():
        try:
            return str(on.client.images.get(base_tag(device)).id)
        except docker.errors.ImageNotFound:
            return None


def mismatch(image: Image, lock: Lock, on: Engine, device: str = "cpu") -> str | None:
    """Return why this image is not the one that the repository describes, or None."""
    if image.lock != lock.sha256:
        return f"it was built from another lock ({image.lock[:12]}, the repository's is {lock.sha256[:12]})"
    base = base_digest(on, device)
    if base is not None and base != image.base:
        return f"it stands on another base ({image.base[7:19]}, {base_tag(device)} is {base[7:19]})"
    return None


def up_to_date(framework: Framework, on: Engine, device: str = "cpu") -> Image | None:
    """Return the framework's image if it matches its lock. Raises :class:`EnvironmentFault` without a lock."""
    lock = lockfile.load(framework, device)
    image = find(on, tag_of(framework, device))
    return image if image is not None and mismatch(image, lock, on, device) is None else None


ANY_IMAGE = "say --any-image to measure with it all the same"


def ensure(
    framework: Framework, on: Engine, log: Log, device: str = "cpu", any_image: bool = False, otherwise: str = ANY_IMAGE
) -> Image:
    """Return the framework's image, built where it is missing.

    Raises :class:`EnvironmentFault` where it cannot be built, :class:`BadInput` where there is one that does not match
    the lock (unless ``any_image``): which of the two is meant, only the user knows. ``otherwise``: what the user does
    who means the image.
    """
    lock = lockfile.load(framework, device)
    image = find(on, tag_of(framework, device))
    if image is None:
        return build(framework, on, log, device)
    why = mismatch(image, lock, on, device)
    if why and not any_image:
        raise BadInput(
            f"The image {image.tag} of {framework.name} is not the one that is locked: {why}; run `dpbench image build "
            f"{framework.name}` to make it anew, or {otherwise}."
        )
    return image


def build(framework: Framework, on: Engine, log: Log, device: str = "cpu", fresh: bool = False) -> Image:
    """Build the framework's image from its lock with the network off. ``fresh``: without the engine's cache of layers.

    Raises :class:`EnvironmentFault` where the files cannot be had or the build fails, :class:`BadInput` without a base.
    """
    start = time.monotonic()
    lock = lockfile.load(framework, device)
    base = base_digest(on, device) or make_base(on, log, device=device)
    files = lockfile.collect(framework, lock, log)
    tag = tag_of(framework, device)
    log(f"Image of {framework.name}: building {tag} from {len(files)} files, network off")
    made = {
        LOCK_LABEL: lock.sha256,
        PINS_LABEL: framework.lock_hash,
        BASE_LABEL: base,
        RECIPE_LABEL: recipe_hash(),
        MADE_FOR_LABEL: framework.name,
    }
    texts = {
        "Dockerfile": (RECIPE / "framework.Dockerfile").read_text(),
        "install.py": (RECIPE / "install.py").read_text(),
        **_halves(lock, files),
    }
    # One at a time: the pruning of one build would take the first stage of another.
    with cache.locked(cache.folder("base") / "build.lock"), _context(texts, files) as context:
        _build(on, context, tag, {"BASE": base}, made, fresh)
        _drop_builders(on)
    image = find(on, tag)
    assert image is not None
    log(f"Image of {framework.name}: {tag} is ready after {time.monotonic() - start:.0f} s, {image.mib:,} MiB")
    return image


def _halves(lock: Lock, files: list[Path]) -> dict[str, str]:
    sources = {lockfile.name_and_version(path.name)[0] for path in files if path.suffix != ".whl"}
    return {
        "wheels.txt": "".join(f"{pin}\n" for pin in lock.pins if pin.name not in sources),
        "sources.txt": "".join(f"{pin}\n" for pin in lock.pins if pin.name in sources),
    }


class _context:
    """The build context as a tar file on disk (a TensorFlow is too large for memory): no times, no owners, sorted."""

    def __init__(self, texts: dict[str, str], files: Iterable[Path]) -> None:
        self._file = tempfile.TemporaryFile(dir=lockfile.folder())  # noqa: SIM115 (closed in __exit__)
        with tarfile.open(fileobj=self._file, mode="w") as tar:
            for name in sorted(texts):
                add_bytes(tar, name, texts[name].encode())
            for path in sorted(files):
                with path.open("rb") as content:
                    tar.addfile(entry(path.name, path.stat().st_size), content)
        self._file.seek(0)

    def __enter__(self) -> IO[bytes]:
        return self._file

    def __exit__(self, *rest: object) -> None:
        self._file.close()


def entry(name: str, size: int) -> tarfile.TarInfo:
    """Return a file that everybody may read and that says nothing of when and by whom it was made."""
    info = tarfile.TarInfo(name)
    info.size, info.mode, info.mtime = size, 0o644, 0
    return info


def add_bytes(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    """Add a file with that content to an archive."""
    tar.addfile(entry(name, len(content)), io.BytesIO(content))


def _build(
    on: Engine, context: IO[bytes], tag: str, arguments: dict[str, str], labels: dict[str, str], fresh: bool
) -> None:
    """Raise :class:`EnvironmentFault` with the last lines of a build that failed."""
    import docker.errors

    with engine.errors():
        try:
            on.client.images.build(
                fileobj=context,
                custom_context=True,
                tag=tag,
                buildargs=arguments,
                labels=labels,
                network_mode="none",
                use_config_proxy=False,
                nocache=fresh,
                pull=False,
                rm=True,
                forcerm=True,
            )
        except docker.errors.BuildError as error:
            lines = [str(line.get("stream") or line.get("error") or "").strip() for line in error.build_log]
            text = " ".join(line for line in lines if line)[-400:]
            raise EnvironmentFault(f"the image {tag} could not be built: {text}") from None
        except docker.errors.APIError as error:
            raise EnvironmentFault(f"the engine refused to build {tag}: {error.explanation}") from None


def _drop_builders(on: Engine) -> None:
    """The first stages hold a second copy of every wheel."""
    with engine.errors():
        on.client.images.prune(filters={"dangling": True, "label": "dpbench.stage=builder"})


def make_base(on: Engine, log: Log, source: str | None = None, device: str = "cpu") -> str:
    """Tags the base that images are built on, from an image that the engine has or can pull; its digest.

    Raises :class:`BadInput` where there is no such image.
    """
    import docker.errors

    wanted = source or DEFAULT_BASE
    with engine.errors():
        try:
            on.client.images.get(wanted)
        except docker.errors.ImageNotFound:
            log(f"Base: pulling {wanted}")
            try:
                on.client.images.pull(wanted)
            except docker.errors.APIError as error:
                raise BadInput(
                    f"The base image {wanted} is not on the engine and cannot be pulled ({_short(error)}); name "
                    "another with `dpbench image base --from IMAGE`, or make one with --from-debootstrap."
                ) from None
    log(f"Base: {base_tag(device)} from {wanted}")
    with _context({"Dockerfile": (RECIPE / "base.Dockerfile").read_text()}, []) as context:
        try:
            _build(on, context, base_tag(device), {"FROM_IMAGE": wanted}, {}, fresh=False)
        except EnvironmentFault as fault:
            raise BadInput(f"{wanted} cannot be a base, for it needs a Python 3.11 with venv: {fault}") from None
    digest = base_digest(on, device)
    assert digest is not None
    return digest


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:160]


def debootstrap(on: Engine, log: Log, mirror: str | None = None) -> str:
    """Make Debian's smallest system with Python on this machine, give it to the engine, and return its tag.

    Raises :class:`BadInput` without root or debootstrap, or where it fails.
    """
    if os.geteuid() != 0:
        raise BadInput("--from-debootstrap needs root (it makes device files); use sudo, or --from with an image.")
    if shutil.which("debootstrap") is None:
        raise BadInput("--from-debootstrap needs debootstrap; install it (`apt install debootstrap`).")
    log(f"Base: debootstrap of {DEBIAN} with {', '.join(PACKAGES)}")
    with tempfile.TemporaryDirectory(dir=cache.folder("base")) as temporary:
        root = Path(temporary, "root")
        command = ["debootstrap", "--variant=minbase", f"--include={','.join(PACKAGES)}", DEBIAN, str(root)]
        done = subprocess.run(command + ([mirror] if mirror else []), capture_output=True, text=True)
        if done.returncode:
            lines = (done.stdout + done.stderr).strip().splitlines()
            raise BadInput(f"debootstrap ended with {done.returncode} ({' '.join(lines[-2:])[-300:]}).")
        for waste in ("var/cache/apt", "var/lib/apt/lists", "var/log", "usr/share/doc", "usr/share/man", "dev"):
            shutil.rmtree(root / waste, ignore_errors=True)
            (root / waste).mkdir(parents=True)
        archive = Path(temporary, "root.tar")
        subprocess.run(["tar", "-C", str(root), "-cf", str(archive), "."], check=True)
        with engine.errors():
            on.client.api.import_image_from_file(str(archive), repository=DEBOOTSTRAP, tag=DEBIAN)
    return f"{DEBOOTSTRAP}:{DEBIAN}"


def remove(on: Engine, tag: str) -> None:
    """Remove the image with that tag."""
    with engine.errors():
        on.client.images.remove(tag, force=True)


VERIFIER = """
import base64, hashlib, importlib.metadata as m, json, pathlib, sys
root = pathlib.Path("/opt/env")
found, bad, listed = {}, [], set()
for d in m.distributions(path=[p for p in sys.path if p.startswith("/opt/env")]):
    found[d.metadata["Name"]] = d.version
    for f in d.files or []:
        p = pathlib.Path(d.locate_file(f)).resolve()
        listed.add(p)
        if f.hash is None:
            continue
        digest = hashlib.new(f.hash.mode, p.read_bytes()).digest() if p.exists() else b""
        if base64.urlsafe_b64encode(digest).rstrip(b"=").decode() != f.hash.value:
            bad.append(str(p))
content = hashlib.sha256()
files = 0
for p in sorted(root.rglob("*")):
    if p.is_file() and not p.is_symlink() and p.suffix != ".pyc":
        files += 1
        content.update(str(p).encode() + b"\\0" + hashlib.sha256(p.read_bytes()).digest())
        if "site-packages" in p.parts and p.resolve() not in listed:
            bad.append("unlisted " + str(p))
print(json.dumps({"found": found, "bad": bad[:20], "files": files, "content": content.hexdigest()}))
"""


@dataclass(frozen=True)
class Verdict:
    """``faults`` is empty where the image holds exactly what its lock says. ``content``: hash over all of its files but
    the compiled ones; the same lock on the same base gives the same."""

    tag: str
    faults: tuple[str, ...]
    files: int
    content: str


def verify(framework: Framework, on: Engine, device: str = "cpu") -> Verdict:
    """Looks into the image: its packages are those of the lock, every file is the one its package lists, none is more.

    Raises :class:`EnvironmentFault` where there is no such image or no lock.
    """
    lock = lockfile.load(framework, device)
    image = find(on, tag_of(framework, device))
    if image is None:
        raise EnvironmentFault(f"{framework.name} has no image; run `dpbench image build {framework.name}`.")
    with engine.errors():
        status, output = engine.run_once(on, image.digest, VERIFIER)
    if status:
        raise EnvironmentFault(f"nothing could be read in the image {image.tag} (exit code {status}).")
    seen = json.loads(output)
    installed = {canonicalize_name(name): version.partition("+")[0] for name, version in seen["found"].items()}
    locked = {canonicalize_name(pin.name): pin.version for pin in lock.pins}
    faults = [f"{name} {installed.get(name, 'missing')} instead of {locked.get(name, 'nothing')}"
              for name in sorted(installed.keys() | locked.keys())
              if not _same_version(installed.get(name), locked.get(name))]  # fmt: skip
    faults += [f"file {path}" for path in seen["bad"]]
    why = mismatch(image, lock, on, device)
    return Verdict(image.tag, tuple(faults + ([why] if why else [])), seen["files"], seen["content"])


def _same_version(installed: str | None, locked: str | None) -> bool:
    return installed is not None and locked is not None and Version(installed) == Version(locked)


def rows(on: Engine, known: Iterable[Framework], device: str = "cpu") -> Iterator[dict[str, Any]]:
    """Yield a row per framework: its image, and whether it matches the lock."""
    for framework in known:
        image = find(on, tag_of(framework, device))
        row: dict[str, Any] = {"framework": framework.name, "tag": "-", "digest": "-", "mib": 0}
        if image is not None:
            row |= {k: v for k, v in asdict(image).items() if k in row}
            row["digest"] = image.digest.removeprefix("sha256:")[:12]
        try:
            lock = lockfile.load(framework, device)
            state = "not built" if image is None else mismatch(image, lock, on, device) or "matches its lock"
        except EnvironmentFault as fault:
            state = str(fault)
        yield {**row, "state": state}
