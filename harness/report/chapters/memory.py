"""The laws of memory against what was measured: by us, and by the paper itself."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd

from harness.analysis import layer_frames
from harness.analysis import memory_law as law
from harness.analysis.layer_frames import CELL, MEGABYTE
from harness.analysis.memory_law import Parts
from harness.analysis.tidy import SECTION, rows_of
from harness.layers import PAPER, SWEEP, SWEEP_ROWS

GROUPS = {
    "Conv": "convolution",
    "LayerNorm": "other torch.nn layers",
    "InstanceNorm": "other torch.nn layers",
    "GroupNorm": "other torch.nn layers",
    "Linear": "other torch.nn layers",
    "Embedding": "other torch.nn layers",
    "MHA": "attention and recurrent layers",
    "RNN": "attention and recurrent layers",
    "GRU": "attention and recurrent layers",
    "LSTM": "attention and recurrent layers",
}
"""Row of the paper's tables -> what it averages over together: "the other supported torch.nn layers" are those that
Opacus supports directly, without a module of its own."""
NON_DP, PAPER_DP, OPACUS_DP, DPCORE_DP = "bC + 2L", "bC + (1 + b)L", "bC + 2L + 2bL", "dpcore"
QUOTED_SHARES = {
    ("other torch.nn layers", NON_DP): "56.5% ± 8.7%",
    ("other torch.nn layers", PAPER_DP): "57.5% ± 14.9%",
    ("convolution", NON_DP): "17.7% ± 7.1%",
    ("convolution", PAPER_DP): "6.15% ± 0.03%",
}
"""The share explained by the paper's text: mean and standard deviation."""
QUOTED_ERRORS = {"L/C << b": "+41% ± 17.6%", "L/C >> b": "-23.3% ± 6.3%"}
"""The predicted overhead over the embedding sweep by the paper's text."""


def of_the_paper() -> pd.DataFrame:
    """Return the laws on the paper's own tables: predicted and measured MB, share explained, overhead and its error."""
    peaks = layer_frames.published("memory").set_index(["paper_row", "batch_size"])
    rows = []
    for r in rows_of(layer_frames.published("memory_breakdown")):
        peak = peaks.loc[(r.paper_row, r.batch_size)]
        parts = Parts(r.batch_size, r.input_mb, r.labels_mb, r.L_mb)
        for name, predicted, measured in (
            (NON_DP, law.non_private(parts.batch_size, parts.C, parts.L), peak.nn_module_mb),
            (PAPER_DP, law.paper_private(parts.batch_size, parts.C, parts.L), peak.gsm_module_mb),
            (OPACUS_DP, law.opacus_private(parts.batch_size, parts.C, parts.L), peak.gsm_module_mb),
        ):
            rows.append(
                {
                    "paper_row": r.paper_row,
                    "group": GROUPS[r.paper_row],
                    "batch_size": r.batch_size,
                    "law": name,
                    "predicted_mb": predicted,
                    "measured_mb": measured,
                    "share": law.share_explained(predicted, measured),
                    "error": law.relative_error(predicted, measured),
                    **_overhead(parts, peak.gsm_module_mb / peak.nn_module_mb),
                }
            )
    return pd.DataFrame(rows)


def _overhead(parts: Parts, measured: float) -> dict[str, Any]:
    """Return the overhead by the paper's laws (exact and by its approximations), and the error against the measured
    one."""
    exact, approximate = law.overhead(parts.batch_size, parts.C, parts.L), law.overhead_by_regime(parts)
    return {
        "regime": parts.regime,
        "overhead": measured,
        "predicted_overhead": exact,
        "overhead_error": law.relative_error(exact, measured),
        "approximate_overhead": approximate,
        "approximate_error": law.relative_error(approximate, measured),
    }


def predictions(cells: pd.DataFrame) -> pd.DataFrame:
    """Return every measured peak beside the laws that are about it, in MB."""
    rows = []
    for r in cells[cells.peak.notna()].to_dict("records"):
        for name, predicted in _laws(r):
            rows.append(
                {
                    **{c: r[c] for c in [*CELL, "framework", "column", "paper_row", "kind", "micro_batch"]},
                    "group": GROUPS.get(r["paper_row"] or "", "layers that the paper has not"),
                    "law": name,
                    "predicted_mb": predicted / MEGABYTE,
                    "measured_mb": r["peak"] / MEGABYTE,
                    "share": law.share_explained(predicted, r["peak"]),
                    "error": law.relative_error(predicted, r["peak"]),
                }
            )
    return pd.DataFrame(rows)


def _laws(r: dict[str, Any]) -> Iterable[tuple[str, float]]:
    """Yield (name, bytes) of every law that claims something of this cell."""
    b, C, L = int(r["batch_size"]), float(r["C"]), float(r["L"])
    if r["column"] != "dp":
        yield NON_DP, law.non_private(b, C, L)
    elif r["framework"] == "dpcore" and r["passes"] == "clipped":
        if not math.isnan(r["micro_batch"]):
            yield DPCORE_DP, _dpcore(r, b, C, L)
    elif r["contestant"] == "opacus-ghost":
        # Norms without per-sample gradients: the module and the ordinary gradient of the second backward pass.
        yield NON_DP, law.non_private(b, C, L)
    elif materialises(r):
        yield PAPER_DP, law.paper_private(b, C, L)
        if r["framework"] == "opacus":
            yield OPACUS_DP, law.opacus_private(b, C, L)


def materialises(r: Mapping[str, Any]) -> bool:
    """Return whether a contestant holds a gradient per example, which is what the paper's law with DP is about."""
    clips_without = r["framework"] == "dpcore" and r["passes"] == "clipped"
    return r["column"] == "dp" and not clips_without and r["contestant"] != "opacus-ghost"


def _dpcore(r: dict[str, Any], b: int, C: float, L: float) -> float:
    kept = 0.0 if math.isnan(r["kept_bytes"]) else float(r["kept_bytes"])
    # Convolutions' sums are formed apart where the gradient is not kept. Embeddings' are too on a CPU, but by scipy,
    # whose memory PyTorch's profiler does not see.
    apart = L if r["kind"].startswith("Conv") and kept < L / 2 else 0.0
    # The engine cuts the batch into equal pieces, none larger than what it planned.
    pieces = math.ceil(b / r["micro_batch"])
    return law.dpcore_private(b, C, L, math.ceil(b / pieces), float(r["output_bytes"]), kept, apart)


def reproduction(cells: pd.DataFrame) -> pd.DataFrame:
    """Return the paper's memory factors of Linear and Embedding, at the batch sizes that were measured and at its
    largest: published; over a baseline less one L; by today's law; and, as columns of their own, as measured of every
    contestant that holds a gradient per example.

    PyTorch 1.10's ``zero_grad`` kept ``.grad``, so that a third L stood in the paper's baseline beside the module and
    the gradient; since 2.0 it is freed.
    """
    peaks = layer_frames.published("memory").set_index(["paper_row", "batch_size"])
    sizes = layer_frames.published("memory_breakdown").set_index(["paper_row", "batch_size"])
    found = {(r["paper_row"], r["batch_size"], r["contestant"], r["passes"]): r for r in cells.to_dict("records")}
    pairs = list(dict.fromkeys((r["contestant"], r["passes"]) for r in found.values() if materialises(r)))
    rows = []
    for name in ("Linear", "Embedding"):
        here = sorted({size for row, size, *_ in found if row == name})
        largest = int(peaks.loc[name].index.max())
        layer = next(layer for layer in PAPER if layer.paper_row == name)
        for size in sorted({*here, largest} & set(peaks.loc[name].index)) if here else ():
            peak, L = peaks.loc[(name, size)], sizes.loc[(name, size)].L_mb
            C, own = layer.example_bytes, layer.parameter_bytes
            base = found.get((name, size, layer_frames.BASELINE, "plain"))
            rows.append(
                {
                    "layer": layer.name,
                    "batch_size": size,
                    "published": peak.gsm_module_mb / peak.nn_module_mb,
                    "without_old_gradient": peak.gsm_module_mb / (peak.nn_module_mb - L),
                    "todays_law": law.opacus_private(size, C, own) / law.non_private(size, C, own),
                    **{f"{c} ({p})": _measured_factor(found.get((name, size, c, p)), base) for c, p in pairs},
                }
            )
    return pd.DataFrame(rows)


def _measured_factor(mine: Mapping[str, Any] | None, base: Mapping[str, Any] | None) -> float:
    return math.nan if mine is None or base is None else float(mine["peak"] / base["peak"])


def shares(predicted: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """Return share explained and error of every law, mean ± standard deviation over the rows of each group, and how
    many rows it overestimates (``over``) and underestimates (``under``)."""
    rows = []
    for place, group in predicted.groupby([*by, "group", "law"], sort=False):
        share, error = law.spread(group.share.tolist()), law.spread(group.error.abs().tolist())
        rows.append(
            {
                **dict(zip([*by, "group", "law"], place, strict=True)),
                "share": share.mean,
                "share_sd": share.deviation,
                "mean_absolute_error": error.mean,
                "over": int((group.error > 0).sum()),
                "under": int((group.error < 0).sum()),
                "n": share.n,
            }
        )
    return pd.DataFrame(rows)


def sweep(factors: pd.DataFrame) -> pd.DataFrame:
    """Return the embedding sweep: measured factors of every contestant beside the predicted overhead, per size and
    batch."""
    rows = []
    for r in factors[factors.layer.isin([layer.name for layer in SWEEP])].to_dict("records"):
        b = int(r["batch_size"])
        layer = next(one for one in SWEEP if one.name == r["layer"])
        parts = Parts(b, b * layer.input_bytes, b * layer.label_bytes, layer.parameter_bytes)
        rows.append(
            {
                **{c: r[c] for c in [*CELL, "framework", "column"]},
                "materialises": materialises(r),
                "num_embeddings": layer.parameters["weight"][0],
                "L_over_C": parts.ratio,
                "paper_L_over_C": SWEEP_ROWS.get(layer.parameters["weight"][0], math.nan),
                "runtime": r["runtime"],
                "runtime_low": r["runtime_low"],
                "runtime_high": r["runtime_high"],
                "runtime_n": r["runtime_n"],
                "memory": r["memory"],
                **_overhead(parts, r["memory"]),
            }
        )
    return pd.DataFrame(rows)


def overhead_errors(swept: pd.DataFrame) -> pd.DataFrame:
    """Over- and underestimates of the predicted overhead over the sweep, per regime, as in the paper; of contestants
    that hold a gradient per example."""
    rows = []
    known = swept[swept.memory.notna() & swept.materialises] if len(swept) else swept
    for place, group in known.groupby([*SECTION, "contestant", "passes", "regime"], sort=False) if len(known) else ():
        exact, rough = law.spread(group.overhead_error.tolist()), law.spread(group.approximate_error.tolist())
        rows.append(
            {
                **dict(zip([*SECTION, "contestant", "passes", "regime"], place, strict=True)),
                "error": exact.mean,
                "error_sd": exact.deviation,
                "approximate_error": rough.mean,
                "approximate_sd": rough.deviation,
                "n": exact.n,
            }
        )
    return pd.DataFrame(rows)
