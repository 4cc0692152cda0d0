"""``results/croissant.json``: what the committed records are, for programs that look for data sets (Croissant 1.0)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness import __version__
from harness.published.index import FOLDER, Index
from harness.store.record import PACKED

FILE = FOLDER / "croissant.json"
RECORDS = "records"
LICENCE = "https://www.apache.org/licenses/LICENSE-2.0"
DESCRIPTION = (
    "Measurements of frameworks that train with differential privacy (DP-SGD) on CPUs: a record of each process, with "
    "its readings, seeds, hashes of code, pins and data, what was installed, the machine, and the verdict of a gate "
    "that compares the private update with an exact float64 reference. results/index.toml says which runs hold today "
    "and why others do not. No name of a person is in it."
)
FIELDS: Mapping[str, tuple[str, str]] = {
    "purpose": ("sc:Text", "What the process was for: time, memory, gate or probe."),
    "state": ("sc:Text", "How it ended: ok, or the kind of failure. Only what is ok has readings that count."),
    "cell.kind": ("sc:Text", "e2e (training of a task), layer, or frontier (the largest batch in a budget)."),
    "cell.task": ("sc:Text", "Model and data that were trained; empty for layers."),
    "cell.layer": ("sc:Text", "The layer that was timed, for records of layers."),
    "cell.framework": ("sc:Text", "The library that was measured."),
    "cell.variant": ("sc:Text", "Which of the library's ways to train."),
    "cell.private": ("sc:Boolean", "Whether it trains with differential privacy."),
    "cell.batch_size": ("sc:Integer", "Expected examples of a logical batch."),
    "cell.protocol": ("sc:Text", "Rules of the measurement."),
    "cell.device": ("sc:Text", "cpu or cuda."),
    "cell.isolation": ("sc:Text", "How the process was kept apart: a virtual environment or a container."),
    "epoch_seconds": ("sc:Float", "Seconds of each epoch."),
    "memory.peak_resident_growth": ("sc:Integer", "Peak resident bytes above the loaded data and model."),
    "machine.cpu": ("sc:Text", "The processor."),
    "machine.id": ("sc:Text", "A hash that tells machines apart."),
    "machine.threads": ("sc:Integer", "Threads of the measured process."),
    "block.run": ("sc:Text", "The run; only records of one run and round are compared with each other."),
    "block.round": ("sc:Integer", "The replicate."),
    "source.commit": ("sc:Text", "Commit of the code that measured."),
    "started": ("sc:Text", "When the process began, with the offset from UTC."),
}
"""Path in a record -> type and meaning. A record has more; harness/store/record.py describes all."""
CONTEXT = {
    "@language": "en",
    "@vocab": "https://schema.org/",
    "cr": "http://mlcommons.org/croissant/",
    "rai": "http://mlcommons.org/croissant/RAI/",
    "dct": "http://purl.org/dc/terms/",
    "sc": "https://schema.org/",
    "conformsTo": "dct:conformsTo",
    "data": {"@id": "cr:data", "@type": "@json"},
    "dataType": {"@id": "cr:dataType", "@type": "@vocab"},
    "examples": {"@id": "cr:examples", "@type": "@json"},
    # Croissant's own words, as its context lists them.
    **{
        word: f"cr:{word}"
        for word in (
            *("citeAs", "column", "equivalentProperty", "extract", "field", "fileObject", "fileProperty", "fileSet"),
            *("format", "includes", "isLiveDataset", "jsonPath", "key", "md5", "parentField", "path", "recordSet"),
            *("references", "regex", "repeated", "replace", "samplingRate", "separator", "source", "subField"),
            "transform",
        )
    },
}


def text(index: Index) -> str:
    """Return the metadata of all runs of the index that hold records."""
    entries = sorted((entry for entry in index.run if entry.holds_records), key=lambda entry: entry.file)
    files = [_file(e.file, "application/jsonlines", f"{e.what} [{e.status}] {e.note}".strip()) for e in entries]
    toml = _file("index.toml", "application/toml", "Every run, its status and why.")
    every = {
        "@type": "cr:FileSet",
        "@id": RECORDS,
        "name": RECORDS,
        "description": "All runs; a record a line, compressed by gzip.",
        "encodingFormat": "application/jsonlines",
        "includes": f"records/*{PACKED[-1]}",
    }
    made = {
        "@context": CONTEXT,
        "@type": "sc:Dataset",
        "conformsTo": "http://mlcommons.org/croissant/1.0",
        "name": "dpsgd-bench-records",
        "description": DESCRIPTION,
        "license": LICENCE,
        "citeAs": f"The dpbench authors: dpbench, version {__version__}",
        "creator": {"@type": "sc:Organization", "name": "The dpbench authors"},
        "datePublished": str(max(entry.date for entry in entries)),
        "version": __version__,
        "distribution": [toml, *files, every],
        "recordSet": [
            {
                "@type": "cr:RecordSet",
                "@id": "processes",
                "name": "processes",
                "description": "A record of each measuring process. A failure is a record, too.",
                "field": [_field(path, kind, meaning) for path, (kind, meaning) in FIELDS.items()],
            }
        ],
    }
    return json.dumps(made, indent=1, ensure_ascii=False) + "\n"


def _file(name: str, kind: str, description: str) -> dict[str, Any]:
    content = (FOLDER / name).read_bytes()
    return {
        "@type": "cr:FileObject",
        "@id": name,
        "name": Path(name).name,
        "description": description,
        "contentUrl": name,
        "contentSize": f"{len(content)} B",
        "encodingFormat": kind,
        "sha256": hashlib.sha256(content).hexdigest(),
    }


def _field(path: str, kind: str, meaning: str) -> dict[str, Any]:
    column, _, rest = path.partition(".")
    source: dict[str, Any] = {"fileSet": {"@id": RECORDS}, "extract": {"column": column}}
    return {
        "@type": "cr:Field",
        "@id": f"processes/{path}",
        "name": path,
        "description": meaning,
        "dataType": kind,
        **({"repeated": True} if path == "epoch_seconds" else {}),
        "source": source | ({"transform": {"jsonPath": rest}} if rest else {}),
    }
