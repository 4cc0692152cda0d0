"""Files of a figure: SVG, and from it PNG and PDF, with title and provenance."""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Iterable
from pathlib import Path

from harness.report.model import Picture
from harness.store.cache import check_replaceable

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

    drawing, words = shown.draw(), (shown.title, shown.provenance)
    traced = drawing.svg(*words, reuse=False)  # the same picture in the form that is drawn fastest
    contents = {
        ".pdf": _pdf_with_info(vl_convert.svg_to_pdf(traced), shown),
        ".svg": drawing.svg(*words).encode(),
        ".png": _png_with_info(vl_convert.svg_to_png(traced, scale=SCALE), shown),
    }
    for suffix, content in contents.items():
        check_replaceable(folder / f"{shown.stem}{suffix}").write_bytes(content)
    return [folder / f"{shown.stem}{suffix}" for suffix in contents]


def _png_with_info(png: bytes, shown: Picture) -> bytes:
    """Return the picture with title and provenance as texts of its file, after its header."""
    end = len(b"\x89PNG\r\n\x1a\n") + len(_chunk(b"IHDR", bytes(13)))
    texts = b"".join(
        _chunk(b"iTXt", f"{key}\0\0\0\0\0{text}".encode())
        for key, text in (("Title", shown.title), ("Description", shown.provenance))
    )
    return png[:end] + texts + png[end:]


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def _pdf_with_info(pdf: bytes, shown: Picture) -> bytes:
    """Return the PDF with title and provenance, as an incremental update: only what is new is appended to the file."""
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
