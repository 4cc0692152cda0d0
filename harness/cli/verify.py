"""``dpbench verify``: a pack of somebody else's, accepted or why not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from harness.cli.options import FINDING, Json, Threads

MOST = 20
"""Faults of a kind that are printed."""


def verify(
    pack: Annotated[Path, typer.Argument(help="A .jsonl.gz by `dpbench pack` or `dpbench grid merge`.")],
    gate: Annotated[bool, typer.Option(help="Judge each contestant once more, here, on small networks.")] = True,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Compute every figure of a pack again, judge its contestants here, and say accepted, or why not.

    Exit code 1 where it is not accepted.
    """
    from rich.console import Console

    from harness.cli.gate import judge_one
    from harness.run.progress import Progress
    from harness.store.read import every
    from harness.verify import here, records

    loaded = every(pack)
    found = records.faults(loaded)
    if gate and not any(fault.kind == "protocol" for fault in found):
        with Progress(Console(stderr=as_json), quiet=as_json) as progress:
            found += here.faults(loaded, lambda one, task: judge_one(one, task, "cpu", threads, progress, False, True))
    undigested = here.undigested(loaded) if gate else []
    if as_json:
        said = {"accepted": not found, "records": len(loaded), "faults": [vars(one) for one in found]}
        print(json.dumps({**said, "no_digest": undigested}))
    kinds = dict.fromkeys(fault.kind for fault in found)
    for kind in () if as_json else kinds:
        some = [fault for fault in found if fault.kind == kind]
        for fault in some[:MOST]:
            print(f"{kind}: {fault.where}: {fault.text}")
        if len(some) > MOST:
            print(f"{kind}: and {len(some) - MOST} more")
    if undigested and not as_json:
        told = "; ".join(undigested[:MOST]) + ("; ..." if len(undigested) > MOST else "")
        print(f"no digest: not compared with the updates made here, but judged anew: {told}")
    if not as_json:
        by = "and the gate says the same here" if gate else "the gate was not asked"
        print(f"Not accepted: {', '.join(kinds)}." if found else f"Accepted: {len(loaded)} records agree, {by}.")
    raise typer.Exit(FINDING if found else 0)
