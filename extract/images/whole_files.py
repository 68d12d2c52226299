"""Check what decoders do not: that a file with checksums or an end mark is whole, and does not end in zeros instead.

A crash of a file system, or a download into a preallocated file, leaves a file of the right size whose tail is zeros.
Many decoders take zeros for pixels: Pillow decoded 548 of 5,000 such JPEG files (18 encoders,
`tests/benchmarks/zero_tails.py`). A missing end marker alone is no reason to refuse a JPEG: Pillow decodes complete
files without it. So the tail is replaced by another byte, and the file is refused if its pixels change. None of the
5,000 was accepted, and none of 1,568 sound files with nine changes was refused. Of files whose marker alone was
replaced by zeros, 17 of 1,309 are refused, since they cannot be told from files that lack more. A hole before an intact
end is not looked for: optimised JPEG of flat areas has up to 375 KB of zeros.

In formats without compression (BMP, PPM, TGA, most TIFF) zeros are black areas,
and such a file cannot be told from a sound one.
"""

from __future__ import annotations

import io
import re
import zlib

import numpy as np
import xxhash
from PIL import Image

__all__ = ["check_whole"]

_PNG = b"\x89PNG\r\n\x1a\n"
_QOI_END = bytes(7) + b"\1"  # specification of QOI, "End marker"

# JPEG (ISO/IEC 10918-1, B.1.1): a marker is FF, any number of further FF, and a code. In a scan, FF is followed by 0
# or by the code of a restart marker. Codes without a segment behind them: TEM, RST0 to RST7, SOI.
_MARKER = re.compile(rb"\xff+([\x01-\xfe])")
_SCAN_END = re.compile(rb"\xff[\x01-\xcf\xd8-\xfe]")
_ALONE = frozenset({0x01, *range(0xD0, 0xD9)})
_START_OF_SCAN, _END_OF_IMAGE = 0xDA, 0xD9

# JPEG 2000 (ISO/IEC 15444-1, A.4): SOC with SIZ behind it, start of a tile-part, end of the codestream.
_CODESTREAM, _TILE_PART, _END_OF_CODESTREAM = b"\xff\x4f\xff\x51", b"\xff\x90", b"\xff\xd9"

# Compressed data that end in so many zeros are not complete. No encoder that was tried ends its data in zeros, but
# lossy WebP and optimised JPEG do for flat areas. A sound JPEG ends in its marker.
_ZEROS = 16
# Of a JPEG without end marker: bytes other than zero that fill the tail, and bytes that are not of the picture.
_REPEATED, _BEHIND = 16, 8

_COMPRESSION, _OFFSETS, _COUNTS = 259, (273, 324), (279, 325)  # TIFF 6.0 tags of strips, and of tiles
_JPEG_TABLES = 347  # TIFF Technical Note 2: from SOI to EOI; libtiff writes them behind the strips
_LEAST_ZEROS_IN_TIFF = {7: 2, 8: _ZEROS, 32946: _ZEROS}  # JPEG, which ends in its marker; Deflate, with two numbers


def check_whole(data: bytes, image: Image.Image) -> None:
    """Check that the file of an image was written to its end.

    Checked are the checksums of PNG, also inside icons; the ends of JPEG, JPEG 2000 and QOI; and whether pixels come
    from zeros in place of compressed data in AVIF, HEIC, WebP, and TIFF with Deflate or JPEG. Of such files whose tail
    is zeros, Pillow decodes 83 % (HEIC) to 100 % (WebP); it refuses TIFF with LZW or PackBits itself.

    Args:
        data: content of the file.
        image: the file as opened by Pillow; it is not loaded here.

    Raises:
        ValueError: the file is damaged or truncated.
    """
    kind = image.format
    if kind in ("PNG", "ICO", "ICNS"):
        start = data.find(_PNG)
        while start >= 0:
            start = data.find(_PNG, _end_of_png(data, start + len(_PNG)))
    elif kind == "QOI" and data.endswith(b"\0\0") and _QOI_END not in data:
        raise ValueError("truncated: the end marker is missing")
    elif kind in ("JPEG", "MPO"):
        if not data.endswith(b"\xff\xd9") and not _has_end_of_jpeg(data) and _is_cut(data):
            raise ValueError("truncated: the end-of-image marker is missing")
    elif kind == "JPEG2000":
        if not _has_end_of_codestream(data):
            raise ValueError("truncated: the end of the codestream is missing")
    elif data.endswith(b"\0\0"):
        tables = getattr(image, "tag_v2", {}).get(_JPEG_TABLES)
        if isinstance(tables, bytes) and b"\xff\xd9" not in tables:
            raise ValueError("truncated: its JPEG tables end in zeros")
        zeros = _zeros_of_data(data, image)
        # Flat areas of lossy WebP are zeros up to the last one; of a cut file, the decoder leaves some zeros unread.
        is_flat = kind == "WEBP" and _is_decoded(data, zeros[-_ZEROS:], kind)
        if _is_decoded(data, zeros, kind) and not is_flat:
            raise ValueError(f"truncated: it ends in {len(zeros):,} zeros in place of compressed data")


def _end_of_png(data: bytes, start: int) -> int:
    """Return the offset after the IEND chunk. `start` is the offset of the first chunk.

    Raises:
        ValueError: a critical, tRNS or fdAT chunk has a wrong checksum (PNG specification, 5.3), or IEND is missing.
    """
    while start + 12 <= len(data):
        length, kind = int.from_bytes(data[start : start + 4], "big"), data[start + 4 : start + 8]
        stop = start + 12 + length
        if stop > len(data):
            break
        needed = not kind[0] & 0x20 or kind in (b"tRNS", b"fdAT")
        if needed and zlib.crc32(data[start + 4 : stop - 4]) != int.from_bytes(data[stop - 4 : stop], "big"):
            raise ValueError(f"damaged: its part {kind.decode('latin-1')} does not match its checksum")
        if kind == b"IEND":
            return stop
        start = stop
    raise ValueError("truncated: the end is missing")


def _has_end_of_jpeg(data: bytes) -> bool:
    """Return whether the first picture of a JPEG or MPO file has an end-of-image marker.

    The segments are followed as libjpeg does: markers of an EXIF thumbnail, of later pictures and of bytes behind the
    picture do not count.
    """
    position = 2
    while marker := _MARKER.search(data, position):
        code, position = marker[1][0], marker.end()
        if code == _END_OF_IMAGE:
            return True
        if code in _ALONE:
            continue
        position += int.from_bytes(data[position : position + 2], "big")
        if code == _START_OF_SCAN:
            end = _SCAN_END.search(data, position)
            if end is None:
                return False
            position = end.start()
    return False


def _has_end_of_codestream(data: bytes) -> bool:
    """Return whether the first codestream of a JPEG 2000 file has all its tile-parts and the end marker.

    OpenJPEG refuses most files that are cut, but it decodes a tile-part that lacks a few of its bytes.
    """
    position = data.find(_CODESTREAM) + 2
    while data[position : position + 2] not in (_TILE_PART, b""):  # segments of the main header
        length = int.from_bytes(data[position + 2 : position + 4], "big")
        if length < 2:  # it counts its own bytes; a hostile header would take a step of two bytes for each marker
            return False
        position += 2 + length
    while data[position : position + 2] == _TILE_PART:
        length = int.from_bytes(data[position + 6 : position + 10], "big")
        if length == 0:  # the tile-part extends to the end marker (A.4.2)
            return _END_OF_CODESTREAM in data[position:]
        position += max(length, len(_TILE_PART))
    return data[position : position + 2] == _END_OF_CODESTREAM


def _is_cut(data: bytes) -> bool:
    """Return whether the data of a JPEG without end marker are not complete, although Pillow decodes it.

    Some encoders leave the marker out. Pillow decodes such files if their data are complete, so they are not refused.
    """
    last = data[-1:]
    start = len(data.rstrip(last))
    if data[start - 1 : start] == b"\xff":  # the zero behind it belongs to the data (B.1.1.5)
        start += 1
    if last != b"\xff" and len(data) - start >= (2 if last == b"\0" else _REPEATED):
        return _is_decoded(data, range(start, len(data)), "JPEG")
    # libjpeg takes no FF at the end for data. Of a complete file, the bytes before them are the end of the picture.
    stop = len(data.rstrip(b"\xff"))
    return not _is_decoded(data, range(max(0, stop - _BEHIND), stop), "JPEG")


def _zeros_of_data(data: bytes, image: Image.Image) -> range:
    """Return the offsets of the zeros in which compressed data at the end of a file end; empty if they are too few."""
    start, stop, least = len(data.rstrip(b"\0")), 0, _ZEROS
    if image.format in ("AVIF", "HEIF"):
        stop = _end_of_box(data, b"mdat", start)
    elif image.format == "WEBP":
        stop = 8 + int.from_bytes(data[4:8], "little")  # size of the RIFF chunk; zeros of metadata change no pixel
    elif image.format == "TIFF":
        tags = getattr(image, "tag_v2", {})
        least = _LEAST_ZEROS_IN_TIFF.get(tags.get(_COMPRESSION, 1), len(data))
        for offsets, counts in zip(_OFFSETS, _COUNTS, strict=True):
            extents = zip(tags.get(offsets, ()), tags.get(counts, ()), strict=False)
            stop = max([stop, *(int(offset) + int(count) for offset, count in extents)])
    zeros = range(start, min(len(data), stop))
    return zeros if len(zeros) >= least else range(0)


def _end_of_box(data: bytes, kind: bytes, offset: int) -> int:
    """Return the end of the last box of a kind that starts at or before an offset (ISO/IEC 14496-12, 4.2), or 0."""
    position = end = 0
    while position + 8 <= len(data) and position <= offset:
        size, head = int.from_bytes(data[position : position + 4], "big"), 8
        if size == 1:  # the size follows in 8 bytes
            size, head = int.from_bytes(data[position + 8 : position + 16], "big"), 16
        stop = position + size if size else len(data)
        if data[position + 4 : position + 8] == kind:
            end = stop
        if stop < position + head:
            break
        position = stop
    return end


def _is_decoded(data: bytes, tail: range, kind: str | None) -> bool:
    """Return whether the pixels depend on the bytes at these offsets."""
    if not tail:
        return False
    other = b"\x55" if data[tail.start] != 0x55 else b"\x2a"
    changed = data[: tail.start] + other * len(tail) + data[tail.stop :]
    expected = _hash_of_pixels(data, kind)
    try:
        return _hash_of_pixels(changed, kind) != expected
    except Exception:  # see `extract.images.decoding.decode`
        return True


def _hash_of_pixels(data: bytes, kind: str | None) -> bytes:
    with Image.open(io.BytesIO(data), formats=[kind] if kind else None) as image:
        return xxhash.xxh3_128_digest(np.asarray(image).tobytes())
