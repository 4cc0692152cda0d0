"""Files of a figure: SVG, and from it PNG and PDF, with title and provenance."""

from __future__ import annotations

import io
import re
import struct
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from harness.report.figures.drawing import Drawing
from harness.report.model import Picture
from harness.store.cache import check_replaceable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCALE = 1.5
"""Scale of the PNG, for 144 dots per inch, where SVG has 96."""


def draw(pictures: Iterable[Picture], folder: Path) -> list[Path]:
    """Draw figures into ``folder`` (which must exist); return the files written."""
    return [path for shown in pictures for path in save(shown, folder)]


def save(shown: Picture, folder: Path) -> list[Path]:
    """Write SVG, PNG and PDF, with title and provenance but no date.

    The same records make the same bytes of SVG and PNG; the objects of the PDF come in no fixed order.
    """
    import vl_convert

    svg, traced = _svg(shown)
    contents = {
        ".pdf": _pdf_with_info(vl_convert.svg_to_pdf(traced), shown),
        ".svg": svg.encode(),
        ".png": _png_with_info(vl_convert.svg_to_png(traced, scale=SCALE), shown),
    }
    for suffix, content in contents.items():
        check_replaceable(folder / f"{shown.stem}{suffix}").write_bytes(content)
    return [folder / f"{shown.stem}{suffix}" for suffix in contents]


def _svg(shown: Picture) -> tuple[str, str]:
    """(the file, the same picture in the form that is drawn fastest)."""
    drawn = shown.draw()
    if isinstance(drawn, Drawing):
        words = shown.title, shown.provenance
        return drawn.svg(*words), drawn.svg(*words, reuse=False)
    svg = _of_matplotlib(drawn, shown)
    return svg, svg


def _of_matplotlib(figure: Figure, shown: Picture) -> str:
    import matplotlib

    from harness.report.figures.axes import STYLE

    text = io.StringIO()
    metadata = {"Title": shown.title, "Description": shown.provenance, "Date": None}
    with matplotlib.rc_context(STYLE):
        figure.draw_without_rendering()
        area = figure.get_tightbbox().padded(0.06)
        # Layout and area are found; finding them anew would take most of the time.
        figure.set_layout_engine("none")
        figure.savefig(text, format="svg", metadata=metadata, bbox_inches=area)
    # White below the letters that stand outside of the figure's own area.
    start = text.getvalue().index("<g id=")
    ground = '<rect x="-9999" y="-9999" width="99999" height="99999" fill="#ffffff"/>'
    return text.getvalue()[:start] + ground + text.getvalue()[start:]


def _png_with_info(png: bytes, shown: Picture) -> bytes:
    """The picture with title and provenance as texts of its file, after its header."""
    end = len(b"\x89PNG\r\n\x1a\n") + len(_chunk(b"IHDR", bytes(13)))
    texts = b"".join(
        _chunk(b"iTXt", f"{key}\0\0\0\0\0{text}".encode())
        for key, text in (("Title", shown.title), ("Description", shown.provenance))
    )
    return png[:end] + texts + png[end:]


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def _pdf_with_info(pdf: bytes, shown: Picture) -> bytes:
    """The PDF with title and provenance, as an incremental update: only what is new is appended to the file."""
    trailer = pdf[pdf.rindex(b"trailer") :]
    size, root = (int(found[1]) for found in re.finditer(rb"/(?:Size|Root) (\d+)", trailer))
    before = int(trailer.split(b"startxref")[1].split()[0])

    def text(words: str) -> bytes:
        return b"<FEFF" + words.encode("utf-16-be").hex().upper().encode() + b">"

    at = len(pdf) + 1
    info = b"%d 0 obj\n<</Title %s /Subject %s>>\nendobj\n" % (size, text(shown.title), text(shown.provenance))
    xref = b"xref\n%d 1\n%010d 00000 n \n" % (size, at)
    ends = b"trailer\n<</Size %d /Root %d 0 R /Info %d 0 R /Prev %d>>" % (size + 1, root, size, before)
    return b"%s\n%s%s%s\nstartxref\n%d\n%%%%EOF\n" % (pdf, info, xref, ends, at + len(info))
