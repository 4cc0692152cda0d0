"""Builds dpcore's wheels and its source archive for a release, from nothing but Python: `make wheels`.

The compiler is clang as the package ziglang has it, pinned here: it compiles for any Linux from glibc 2.28 on and for
processors that this machine is not, and its bytes do not depend on the machine. Everything is built twice from one
commit; the bytes must be the same. Written beside the wheels: SHA256SUMS, a bill of materials (CycloneDX), and a
statement of provenance (in-toto, SLSA): which commit and which tools gave these bytes. A release's job signs it.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ("build==1.6.1", "setuptools==84.2.1", "ziglang==0.17.1", "auditwheel==6.8.2", "twine==7.0.0")
GLIBC = "2.28"
PLATFORMS = {machine: f"manylinux_{GLIBC.replace('.', '_')}_{machine}" for machine in ("x86_64", "aarch64")}


def main() -> None:
    """Build, compare, check and describe."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    out = parser.parse_args().out.resolve()
    commit = git("rev-parse", "HEAD").decode().strip()  # once: a commit that is made meanwhile changes nothing
    with tempfile.TemporaryDirectory() as folder:
        python = tools(Path(folder) / "tools")
        first, second = Path(folder) / "first", Path(folder) / "second"
        for target in (first, second):
            build_all(python, commit, Path(folder) / f"source-{target.name}", target)
        if {path.name for path in first.iterdir()} != {path.name for path in second.iterdir()}:
            sys.exit("Two builds differ: they made files of different names.")
        differing = [path.name for path in first.iterdir() if path.read_bytes() != (second / path.name).read_bytes()]
        if differing:
            sys.exit(f"Two builds differ: {', '.join(differing)}.")
        print("Two builds have the same bytes.")
        check(python, first)
        out.mkdir(parents=True, exist_ok=True)
        for path in sorted(first.iterdir()):
            shutil.copy(path, out / path.name)
    describe(out, commit)
    for path in sorted(out.iterdir()):
        print(f"{path.stat().st_size:>9,} {path.name}")


def tools(folder: Path) -> Path:
    """Return the Python of a new environment with the pinned tools."""
    print("==> the tools:", ", ".join(TOOLS), flush=True)
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *TOOLS], check=True)
    return python


def git(*arguments: str) -> bytes:
    """Return what git says of the repository."""
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, check=True).stdout


def build_all(python: Path, commit: str, source: Path, target: Path) -> None:
    """Build the source archive, the pure wheel, and a wheel with kernels per machine, from a commit."""
    with tarfile.open(fileobj=io.BytesIO(git("archive", f"{commit}:dpcore"))) as files:
        files.extractall(source, filter="data")
    when = git("log", "-1", "--format=%ct", commit).decode().strip()
    common = {**os.environ, "SOURCE_DATE_EPOCH": when, "PYTHONHASHSEED": "0"}
    frontend = [str(python), "-m", "build", "--no-isolation", "--outdir", str(target)]
    print("==> source archive and pure wheel", flush=True)
    run([*frontend, "--sdist", str(source)], common)
    for made in target.glob("*.tar.gz"):
        without_times(made, int(when))
    run([*frontend, "--wheel", str(source)], common | {"DPCORE_KERNELS": "none"})
    for machine, tag in PLATFORMS.items():
        print(f"==> {tag}", flush=True)
        shutil.rmtree(source / "build", ignore_errors=True)
        compiler = f"{python} -m ziglang c++ -target {machine}-linux-gnu.{GLIBC}"
        chosen = {"DPCORE_KERNELS": machine, "DPCORE_PLATFORM": tag, "CXX": compiler}
        run([*frontend, "--wheel", str(source)], common | chosen)


def without_times(path: Path, when: int) -> None:
    """Write a source archive anew with one time for everything: setuptools takes the files' and the build's."""
    with tarfile.open(path) as archive:
        members = [(member, archive.extractfile(member)) for member in archive.getmembers()]
        contents = [(member, file.read() if file else None) for member, file in members]
    with gzip.GzipFile(path, "wb", mtime=when) as packed, tarfile.open(fileobj=packed, mode="w") as archive:
        for member, content in sorted(contents, key=lambda pair: pair[0].name):
            member.mtime, member.uid, member.gid, member.uname, member.gname = when, 0, 0, "", ""
            member.pax_headers = {}  # they hold the time with its fractions
            archive.addfile(member, None if content is None else io.BytesIO(content))


def run(command: list[str], environment: dict[str, str]) -> None:
    """Run a build; on failure show what it said, and exit."""
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")


def check(python: Path, folder: Path) -> None:
    """Ask auditwheel whether the platform tags are true, and twine whether the metadata can be shown.

    Each library must hold kernels: a linker that drops them says nothing.
    """
    for machine in PLATFORMS:
        (wheel,) = folder.glob(f"*{machine}.whl")
        command = [str(python), "-m", "auditwheel", "show", str(wheel)]
        said = " ".join(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())
        print(said)
        consistent = re.search(r'consistent with the following platform tag: "manylinux_2_(\d+)_', said)
        if consistent is None or int(consistent[1]) > int(GLIBC.split(".")[1]):
            sys.exit(f"{wheel.name} is not what its tag says.")
        with zipfile.ZipFile(wheel) as files:
            libraries = {name: files.read(name) for name in files.namelist() if name.endswith(".so")}
        empty = [name for name, content in libraries.items() if b"dpcore_add_normals" not in content]
        if empty or not libraries:
            sys.exit(f"{wheel.name} has no kernels in {', '.join(empty) or 'any file'}.")
    subprocess.run([python, "-m", "twine", "check", "--strict", *sorted(folder.iterdir())], check=True)


def describe(out: Path, commit: str) -> None:
    """Write SHA256SUMS, the SBOM and the provenance of what lies in ``out``."""
    files = sorted(path for path in out.iterdir() if path.suffix in {".whl", ".gz"})
    sums = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    (out / "SHA256SUMS").write_text("".join(f"{digest}  {name}\n" for name, digest in sums.items()))
    tools_used = [{"type": "application", "name": name, "version": version} for name, version in map(split, TOOLS)]
    parts = [{"type": "file", "name": n, "hashes": [{"alg": "SHA-256", "content": s}]} for n, s in sums.items()]
    bill = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "component": {"type": "library", "name": "dpcore", "licenses": [{"license": {"id": "Apache-2.0"}}]},
            "tools": {"components": tools_used},
            "properties": [{"name": "commit", "value": commit}],
        },
        "components": parts,
    }
    (out / "dpcore.cdx.json").write_text(json.dumps(bill, indent=1) + "\n")
    statement = provenance(sums, commit)
    (out / "dpcore.intoto.json").write_text(json.dumps(statement, indent=1) + "\n")


def provenance(sums: dict[str, str], commit: str) -> dict[str, object]:
    """Return the statement that these bytes come from ``commit`` by this script with these tools.

    It says nothing of a time or a machine, for the bytes depend on neither.
    """
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": name, "digest": {"sha256": digest}} for name, digest in sums.items()],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": "urn:dpbench:make-wheels",
                "externalParameters": {"commit": commit, "folder": "dpcore", "platforms": list(PLATFORMS.values())},
                "internalParameters": {"script": ".ci/build_wheels.py", "python": platform.python_version()},
                "resolvedDependencies": [
                    {"name": "dpbench", "digest": {"gitCommit": commit}},
                    *({"uri": f"pkg:pypi/{name}@{version}"} for name, version in map(split, TOOLS)),
                ],
            },
            "runDetails": {"builder": {"id": "urn:dpbench:" + os.environ.get("GITHUB_WORKFLOW_REF", "by-hand")}},
        },
    }


def split(pin: str) -> tuple[str, str]:
    """Return name and version of a pin."""
    name, _, version = pin.partition("==")
    return name, version


if __name__ == "__main__":
    main()
