"""Makes the one folder that is carried to a machine with a GPU and no network: `make gpu-folder`.

It holds the commit's source tree, the packages that such a machine lacks (unpacked, for Python 3.12 on x86-64), and
`run.sh`, which makes the run that docs/bench-gpu.md describes. A folder above the limit is refused: it could not be
carried.
"""

from __future__ import annotations

import argparse
import io
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = Path(__file__).with_name("requirements-gpu-folder.txt")
MIB = 1 << 20
LIMIT_MIB = 64.0
PYTHON = "3.12"
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
UNUSED = ("tests", "test", "__pycache__")
"""Folders of packages that no run imports."""

RUN = """#!/bin/sh
# The short run of dpbench with the Python that is here (PYTHON=...); results go to OUT. More options: --help
here=$(cd "$(dirname "$0")" && pwd)
cd "$here/dpbench" || exit 2
export PYTHONPATH="$here/packages${PYTHONPATH:+:$PYTHONPATH}"
export DPBENCH_CACHE="${DPBENCH_CACHE:-$here/cache}"
found=${PYTHON:-$(command -v python3)}
OUT=${OUT:-$here/results}
mkdir -p "$OUT" && cp "$here/commit.txt" "$OUT"
exec "$found" -m harness run gpu --python "$found" --out "$OUT" "$@"
"""


def main() -> int:
    """Make the folder; return 0, or 2 where it is too large to be carried."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "results/local/gpu-folder")
    parser.add_argument("--limit", type=float, default=LIMIT_MIB, metavar="MIB")
    parser.add_argument("--requirements", type=Path, default=PACKAGES, help="what is packed; a test packs less")
    options = parser.parse_args()
    out = options.out.resolve()
    if out.exists() and not (out / "run.sh").exists() and any(out.iterdir()):
        print(f"{out} holds other things: give an empty folder by --out.", file=sys.stderr)
        return 2
    shutil.rmtree(out, ignore_errors=True)
    unpack_tree(out / "dpbench")
    (out / "commit.txt").write_text(git("rev-parse", "HEAD").decode())
    install(options.requirements, out / "packages")
    script = out / "run.sh"
    script.write_text(RUN)
    script.chmod(0o755)
    parts = {path.name: size(path) for path in sorted(out.iterdir())}
    total = sum(parts.values()) / MIB
    print(f"{out}: {total:.1f} MiB (" + ", ".join(f"{name} {n / MIB:.1f}" for name, n in parts.items()) + ")")
    if total > options.limit:
        shutil.rmtree(out)
        print(
            f"It has {total:.1f} MiB and may have {options.limit:g}: leave out packages of {PACKAGES.name}.",
            file=sys.stderr,
        )
        return 2
    return 0


def unpack_tree(folder: Path) -> None:
    """Write what the commit holds; say so where the working tree differs."""
    if subprocess.run(["git", "diff", "--quiet", "HEAD"], cwd=ROOT, check=False).returncode:
        print("What is not committed is not carried along.", file=sys.stderr)
    with tarfile.open(fileobj=io.BytesIO(git("archive", "HEAD"))) as tar:
        tar.extractall(folder, filter="data")


def git(*arguments: str) -> bytes:
    """Return what git prints."""
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True).stdout


def install(requirements: Path, folder: Path) -> None:
    """Unpack the wheels into ``folder``, for the Python of the other machine."""
    platforms = [word for name in PLATFORMS for word in ("--platform", name)]
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--python-version", PYTHON, "--implementation", "cp", *platforms]
    command += ["--no-compile", "--target", str(folder), "-r", str(requirements)]
    subprocess.run(command, check=True)
    shutil.rmtree(folder / "bin", ignore_errors=True)
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.name in UNUSED and path.is_dir():
            shutil.rmtree(path)


def size(path: Path) -> int:
    """Bytes of a file, or of all files below a folder."""
    return path.stat().st_size if path.is_file() else sum(p.stat().st_size for p in path.rglob("*") if p.is_file())


if __name__ == "__main__":
    sys.exit(main())
