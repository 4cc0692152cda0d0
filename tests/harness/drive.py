"""``dpbench`` with fake contestants: their environment is this interpreter, and the gate lets them in.

Only for tests of the run loop; what the gate says of real contestants is tested elsewhere.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

FAKES = Path(__file__).resolve().parent.parent / "fakes"
os.environ["DPBENCH_FRAMEWORKS"] = str(FAKES)

from harness import cli, env, gatekeeper, report  # noqa: E402
from harness.gatekeeper import Verdict  # noqa: E402
from harness.record import Gate  # noqa: E402


class _ThisPython(env.Environment):
    @property
    def python(self) -> Path:
        return Path(sys.executable)


def install() -> None:
    env.ensure = lambda framework, say: _ThisPython(Path(), framework.lock_hash, (framework.name,), 0.0)
    gatekeeper.judge = lambda contestant, task, *rest, **named: Verdict(
        "ok", None, Gate(passed=contestant.variant.name != "unfit", key="fake", checks=[]), {}
    )
    if "DRIVE_WITH_REPORT" not in os.environ:  # figures take longer than the fake cells
        report.write = lambda records, out, plots: []


if __name__ == "__main__":
    install()
    cli.main()
