"""``dpbench image``: locks, the base, and the images of the frameworks. Everything heavy is imported when it runs."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from harness.cli.options import Json
from harness.cli.verbs import Verbs
from harness.errors import BadInput

app = typer.Typer(
    cls=Verbs, no_args_is_help=True, help="Lock, build, list and verify the frameworks' container images."
)

Device = Annotated[str, typer.Option(help="Each device has its own locks, base and images.", metavar="cpu|cuda")]
Frameworks = Annotated[list[str] | None, typer.Argument(help="Frameworks; default all.")]


def _chosen(names: list[str] | None) -> dict[str, Any]:
    """Return the frameworks named, the hidden ones included, by name."""
    from harness.plan import registry

    return {c.framework.name: c.framework for c in registry.select(names or ["all"], hidden=bool(names))}


def _say(as_json: bool) -> Any:
    return (lambda text: None) if as_json else print


def _check(device: str) -> None:
    if device not in {"cpu", "cuda"}:
        raise BadInput(f"--device is {device!r}: choose cpu or cuda.")


@app.command("lock", short_help="Write requirements.lock from the pins.")
def image_lock(names: Frameworks = None, device: Device = "cpu", as_json: Json = False) -> None:
    """Download what the pins mean on this machine and write requirements.lock: every package with its hashes.

    Hashes that a lock already has for the same version stay, so that locks can hold the builds of several registries.
    """
    from harness.cli import listing
    from harness.environments.containers import lockfile
    from harness.environments.venv import EnvironmentFault

    _check(device)
    rows: list[dict[str, Any]] = []
    written: dict[str, Any] = {}
    for framework in _chosen(names).values():
        row = {"framework": framework.name, "packages": 0, "lock": "-", "state": "written"}
        try:
            if framework.lock_hash not in written:
                written[framework.lock_hash] = lockfile.write_lock(framework, _say(as_json), device)
            lock = written[framework.lock_hash]
            lockfile.path_of(framework, device).write_text(lock.text)
            row |= {"packages": len(lock.pins), "lock": lock.sha256[:12]}
        except EnvironmentFault as fault:
            row["state"] = f"unsupported: {fault}"
        rows.append(row)
    listing.table("Locks", rows, as_json)


@app.command("base", short_help="Make the base that images are built on.")
def image_base(
    source: Annotated[
        str | None, typer.Option("--from", help="Image with a Python 3.11; default python:3.11-slim.", metavar="IMAGE")
    ] = None,
    from_debootstrap: Annotated[
        bool, typer.Option("--from-debootstrap", help="Make it on this machine, without an image registry; needs root.")
    ] = False,
    mirror: Annotated[str | None, typer.Option(help="Debian mirror for --from-debootstrap.", metavar="URL")] = None,
    device: Device = "cpu",
    as_json: Json = False,
) -> None:
    """Make the base that images are built on. Images built on another base no longer match."""
    from harness.cli import listing
    from harness.environments.containers import engine, images

    _check(device)
    if source and from_debootstrap:
        raise BadInput("--from and --from-debootstrap both name the base: choose one of them.")
    on = engine.connect()
    log = _say(as_json)
    if from_debootstrap:
        source = images.debootstrap(on, log, mirror)
    digest = images.make_base(on, log, source, device)
    listing.table("Base", [{"tag": images.base_tag(device), "digest": digest}], as_json)


@app.command("build", short_help="Build images from their locks, offline.")
def image_build(
    names: Frameworks = None,
    device: Device = "cpu",
    fresh: Annotated[bool, typer.Option(help="Without the engine's cache of layers.")] = False,
    as_json: Json = False,
) -> None:
    """Build images from their locks with the network off; what matches its lock already is left as it is."""
    import time

    from harness.cli import listing
    from harness.environments.containers import engine, images
    from harness.environments.venv import EnvironmentFault

    _check(device)
    on = engine.connect()
    rows: list[dict[str, Any]] = []
    for framework in _chosen(names).values():
        start = time.monotonic()
        row: dict[str, Any] = {"framework": framework.name, "digest": "-", "mib": 0, "seconds": 0, "state": "built"}
        try:
            image = images.up_to_date(framework, on, device) if not fresh else None
            if image is None:
                image = images.build(framework, on, _say(as_json), device, fresh)
                row["seconds"] = round(time.monotonic() - start)
            else:
                row["state"] = "there already" + (
                    f" (made for {image.made_for})" if image.made_for != framework.name else ""
                )
            row |= {"digest": image.digest.removeprefix("sha256:")[:12], "mib": image.mib}
        except EnvironmentFault as fault:
            row["state"] = f"unsupported: {fault}"
        rows.append(row)
    listing.table("Images", rows, as_json)


@app.command("list", short_help="List the images, and which match their locks.")
def image_list(names: Frameworks = None, device: Device = "cpu", as_json: Json = False) -> None:
    """List every framework's image, and whether it matches the lock in the repository."""
    from harness.cli import listing
    from harness.environments.containers import engine, images

    _check(device)
    listing.table("Images", list(images.rows(engine.connect(), _chosen(names).values(), device)), as_json)


@app.command("verify", short_help="Compare images with their locks.")
def image_verify(names: Frameworks = None, device: Device = "cpu", as_json: Json = False) -> None:
    """Look into the images: exactly the locked packages, every file as its package lists it. Exit code 1 where not."""
    from harness.cli import listing
    from harness.environments.containers import engine, images
    from harness.environments.venv import EnvironmentFault

    _check(device)
    on = engine.connect()
    rows: list[dict[str, Any]] = []
    seen: dict[str, Any] = {}
    for framework in _chosen(names).values():
        row: dict[str, Any] = {"framework": framework.name, "files": 0, "content": "-"}
        try:
            if framework.lock_hash not in seen:
                seen[framework.lock_hash] = images.verify(framework, on, device)
            verdict = seen[framework.lock_hash]
            state = "; ".join(verdict.faults) or "as locked"
            row |= {"files": verdict.files, "content": verdict.content[:16], "state": state}
        except EnvironmentFault as fault:
            row["state"] = f"no image: {fault}"
        rows.append(row)
    listing.table("Images", rows, as_json)
    bad = [row for row in rows if row["state"] != "as locked" and not row["state"].startswith("no image: ")]
    raise typer.Exit(1 if bad else 0)


@app.command("sweep", short_help="Remove what killed runs have left.")
def image_sweep(as_json: Json = False) -> None:
    """Remove containers that killed runs have left; every run does so when it begins."""
    from harness.cli import listing
    from harness.environments.containers import engine

    listing.table("Removed", [{"removed": name} for name in engine.sweep(engine.connect())], as_json)
