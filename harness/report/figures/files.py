"""Files of a figure: SVG, and from it PNG and PDF, with title and provenance."""

from __future__ import annotations

import io
from collections.abc import Iterable
from pathlib import Path
from xml.sax.saxutils import escape

from harness.report.model import Picture
from harness.store.cache import check_replaceable

SCALE = 1.5
"""Scale of the PNG, for 144 dots per inch, where SVG has 96."""


def draw(pictures: Iterable[Picture], folder: Path) -> list[Path]:
    """Draw figures into ``folder`` (which must exist); return the files written."""
    return [path for shown in pictures for path in save(shown, folder)]


def save(shown: Picture, folder: Path) -> list[Path]:
    """Write SVG and PNG, with title and provenance but no date, and PDF.

    The same records make the same bytes of SVG and PNG; the objects of the PDF come in no fixed order.
    """
    import vl_convert

    drawn = vl_convert.vegalite_to_svg(shown.draw())
    about = f"<title>{escape(shown.title)}</title><desc>{escape(shown.provenance)}</desc>"
    contents = {
        ".pdf": vl_convert.svg_to_pdf(drawn),
        ".svg": drawn.replace(">", f' role="img">{about}', 1).encode(),
        ".png": _png_with_info(vl_convert.svg_to_png(drawn, scale=SCALE), shown),
    }
    for suffix, content in contents.items():
        check_replaceable(folder / f"{shown.stem}{suffix}").write_bytes(content)
    return [folder / f"{shown.stem}{suffix}" for suffix in contents]


def _png_with_info(png: bytes, shown: Picture) -> bytes:
    """Return the picture with title and provenance as texts of its file."""
    from PIL import Image, PngImagePlugin

    about, written = PngImagePlugin.PngInfo(), io.BytesIO()
    about.add_itxt("Title", shown.title)
    about.add_itxt("Description", shown.provenance)
    Image.open(io.BytesIO(png)).save(written, "PNG", pnginfo=about)
    return written.getvalue()
