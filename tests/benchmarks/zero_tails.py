"""JPEG files of many encoders: none that Pillow decodes whole is refused, and none whose tail is zeros is accepted.

    python tests/benchmarks/zero_tails.py IMAGES [ZERO_TAILED] [OTHER_IMAGES ...]

IMAGES are folders of pictures of any format. Each is decoded as it is, and encoded again by each encoder that this
machine has; encoders that it lacks are named and left out. A file that Pillow alone decodes, with the pixels of the
complete file, must be accepted. Then the tail of ZERO_TAILED files (5,000), chosen at random, is replaced by zeros from
a random place between 2 % and 99 % of the file on; each must be refused. The exit code is 1 if a file fails. At the end
stand tails of other bytes, other formats, and what the check costs.
"""

from __future__ import annotations

import contextlib
import io
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from extract.images.decoding import check_whole, decode

Pixels = NDArray[np.uint8]
PICTURES = 60  # of IMAGES, encoded by each encoder
SMALL = {"guetzli"}  # encoders that take a minute for a megapixel
SMALL_PICTURES = 4


def pillow(pixels: Pixels, kind: str = "JPEG", mode: str = "RGB", **options: object) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(file, kind, **options)
    return file.getvalue()


def program(*command: str, kind: str = "PPM") -> Callable[[Pixels], bytes]:
    """An encoder that reads a picture from its standard input and writes to its standard output."""

    def encode(pixels: Pixels) -> bytes:
        return subprocess.run(command, input=pillow(pixels, kind), check=True, capture_output=True).stdout

    return encode


def with_files(*command: str, suffix: str = ".png") -> Callable[[Pixels], bytes]:
    """An encoder that is given the names of two files in place of IN and OUT."""

    def encode(pixels: Pixels) -> bytes:
        with tempfile.TemporaryDirectory() as folder:
            names = {"IN": f"{folder}/in{suffix}", "OUT": f"{folder}/out.jpg"}
            Image.fromarray(pixels).save(names["IN"])
            subprocess.run([names.get(word, word) for word in command], check=True, capture_output=True)
            return Path(names["OUT"]).read_bytes()

    return encode


def with_thumbnail(pixels: Pixels) -> bytes:
    """A JPEG whose EXIF data have a thumbnail with markers of its own."""
    thumbnail = pillow(pixels[::8, ::8])
    ifd = lambda *entries: len(entries).to_bytes(2, "little") + b"".join(entries)  # noqa: E731
    entry = lambda tag, kind, value: (  # noqa: E731
        tag.to_bytes(2, "little") + kind.to_bytes(2, "little") + (1).to_bytes(4, "little") + value.to_bytes(4, "little")
    )
    first = ifd() + (14).to_bytes(4, "little")
    second = ifd(entry(259, 3, 6), entry(513, 4, 56), entry(514, 4, len(thumbnail))) + bytes(4)
    exif = b"Exif\0\0II*\0\x08\0\0\0" + first + second
    return pillow(pixels, exif=exif + thumbnail)


def multi_picture(pixels: Pixels) -> bytes:
    return pillow(pixels, "MPO", save_all=True, append_images=[Image.fromarray(pixels[::-1])])


def opencv(*options: int) -> Callable[[Pixels], bytes]:
    def encode(pixels: Pixels) -> bytes:
        import cv2

        return cv2.imencode(".jpg", np.ascontiguousarray(pixels[..., ::-1]), list(options))[1].tobytes()

    return encode


def torchvision(pixels: Pixels) -> bytes:
    import torch
    from torchvision.io import encode_jpeg

    return encode_jpeg(torch.from_numpy(pixels.copy()).permute(2, 0, 1).contiguous()).numpy().tobytes()


def simplejpeg(pixels: Pixels) -> bytes:
    import simplejpeg

    return bytes(simplejpeg.encode_jpeg(np.ascontiguousarray(pixels), quality=90))


def imagecodecs(pixels: Pixels) -> bytes:
    import imagecodecs

    return bytes(imagecodecs.jpeg8_encode(pixels, level=90, optimize=True))


def mozjpeg(pixels: Pixels) -> bytes:
    import mozjpeg_lossless_optimization

    return mozjpeg_lossless_optimization.optimize(pillow(pixels))


def jpegoptim(pixels: Pixels) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(f"{folder}/in.jpg")
        path.write_bytes(pillow(pixels))
        subprocess.run(["jpegoptim", "--force", "-m80", path], check=True, capture_output=True)
        return path.read_bytes()


def mupdf(pixels: Pixels) -> bytes:
    import pymupdf

    height, width = pixels.shape[:2]
    return bytes(pymupdf.Pixmap(pymupdf.csRGB, width, height, pixels.tobytes(), False).tobytes("jpeg"))


def jpegli(pixels: Pixels) -> bytes:
    import ajpegli

    return bytes(ajpegli.encode(np.ascontiguousarray(pixels)))


def kornia(pixels: Pixels) -> bytes:
    import kornia_rs

    with tempfile.TemporaryDirectory() as folder:
        kornia_rs.io.write_image_jpeg(f"{folder}/out.jpg", np.ascontiguousarray(pixels), "rgb", 90)
        return Path(f"{folder}/out.jpg").read_bytes()


def jpeglib(pixels: Pixels) -> bytes:
    import jpeglib

    with tempfile.TemporaryDirectory() as folder:
        jpeglib.from_spatial(np.ascontiguousarray(pixels)).write_spatial(f"{folder}/out.jpg")
        return Path(f"{folder}/out.jpg").read_bytes()


ENCODERS: dict[str, Callable[[Pixels], bytes]] = {
    "Pillow": pillow,
    "Pillow, 4:4:4, quality 95": lambda pixels: pillow(pixels, quality=95, subsampling=0),
    "Pillow, optimised": lambda pixels: pillow(pixels, optimize=True),
    "Pillow, progressive": lambda pixels: pillow(pixels, progressive=True),
    "Pillow, restart markers": lambda pixels: pillow(pixels, restart_marker_rows=2),
    "Pillow, grey": lambda pixels: pillow(pixels, mode="L"),
    "Pillow, CMYK": lambda pixels: pillow(pixels, mode="CMYK"),
    "Pillow, EXIF thumbnail": with_thumbnail,
    "Pillow, two pictures (MPO)": multi_picture,
    "cjpeg, arithmetic": program("cjpeg", "-arithmetic"),
    "cjpeg, float, restarts": program("cjpeg", "-dct", "float", "-restart", "1"),
    "jpegtran, progressive": lambda pixels: (
        subprocess.run(["jpegtran", "-progressive"], input=pillow(pixels), check=True, capture_output=True).stdout
    ),
    "jpegoptim": jpegoptim,
    "mozjpeg": mozjpeg,
    "jpegli": jpegli,
    "guetzli": with_files("guetzli", "IN", "OUT"),
    "OpenCV": opencv(),
    "OpenCV, progressive, optimised": opencv(2, 1, 3, 1),
    "FFmpeg mjpeg": with_files("ffmpeg", "-y", "-i", "IN", "-q:v", "3", "OUT"),
    "GraphicsMagick": program("gm", "convert", "ppm:-", "jpeg:-"),
    "ImageMagick": program("convert-im6.q16", "ppm:-", "jpeg:-"),
    "Netpbm": program("pnmtojpeg"),
    "torchvision": torchvision,
    "simplejpeg": simplejpeg,
    "imagecodecs": imagecodecs,
    "MuPDF": mupdf,
    "kornia-rs": kornia,
    "jpeglib": jpeglib,
}
# What is done to sound files without harm to their pixels.
CHANGES: dict[str, Callable[[bytes], bytes]] = {
    "as they are": lambda data: data,
    "no end marker": lambda data: data[:-2],
    "half an end marker": lambda data: data[:-1],
    "a line feed for an end marker": lambda data: data[:-2] + b"\r\n",
    "4 KiB of FF for an end marker": lambda data: data[:-2] + b"\xff" * 4096,
    "zeros behind": lambda data: data + bytes(4096),
    "FF behind": lambda data: data + b"\xff" * 512,
    "text behind": lambda data: data + b"Written by a camera\r\n",
    "markers behind": lambda data: data + b"\xff\xda\0\x0c" + bytes(99),
    "half of a picture behind": lambda data: data + data[: len(data) // 2],
}
# These cannot all be told from files that lack more than the marker: a scan may end in a zero.
ZEROS_FOR_AN_END = {
    "16 zeros for an end marker": lambda data: data[:-2] + bytes(16),
    "4 KiB of zeros for an end marker": lambda data: data[:-2] + bytes(4096),
}
NOT_ZEROS: dict[str, Callable[[int], bytes]] = {
    "FF": lambda size: b"\xff" * size,
    "55": lambda size: b"\x55" * size,
    "F6": lambda size: b"\xf6" * size,
    "DEADBEEF": lambda size: (b"\xde\xad\xbe\xef" * (size // 4 + 1))[:size],
    "noise": lambda size: random.Random(0).randbytes(size),
    "text": lambda size: (b"The quick brown fox jumps over the lazy dog. " * (size // 45 + 1))[:size],
}


def decoded_by_pillow(data: bytes) -> Pixels | None:
    try:
        with Image.open(io.BytesIO(data)) as image:
            image.load()
            return np.asarray(image)
    except Exception:
        return None


def accepted(data: bytes) -> bool:
    try:
        decode(data)
    except ValueError:
        return False
    return True


def encoded_by_all(paths: list[Path]) -> Iterator[tuple[str, bytes]]:
    for name, encode in ENCODERS.items():
        try:
            for path in paths[: SMALL_PICTURES if name in SMALL else PICTURES]:
                with Image.open(path) as image:
                    pixels = np.asarray(
                        image.convert("RGB").resize((96, 64)) if name in SMALL else image.convert("RGB")
                    )
                yield name, encode(pixels)
        except Exception as error:
            print(f"left out: {name}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")


def count_sound(files: list[tuple[str, bytes]]) -> int:
    """Print how many files of each kind are accepted; return how many are refused that Pillow decodes whole."""
    rows: dict[str, Counter[str]] = {}
    for name, data in files:
        whole = decoded_by_pillow(data)
        for change, apply in {**CHANGES, **ZEROS_FOR_AN_END}.items():
            changed = apply(data)
            pixels = decoded_by_pillow(changed)
            same = pixels is not None and whole is not None and np.array_equal(pixels, whole)
            refused = same and not accepted(changed)
            if refused and change in CHANGES:
                print(f"refused: {name}, {change}: {len(data):,} bytes, the last of them {data[-12:].hex()}")
            for row in (change, *([name] if change in CHANGES else [])):
                count = rows.setdefault(row, Counter())
                count["decoded whole by Pillow"] += same
                count["refused of these"] += refused
    print(f"{'sound files':36}{'decoded whole by Pillow':>26}{'refused of these':>18}")
    for name, count in rows.items():
        print(f"{name:36}{count['decoded whole by Pillow']:26,}{count['refused of these']:18,}")
    return sum(rows[change]["refused of these"] for change in CHANGES)


def count_zero_tailed(files: list[tuple[str, bytes]], number: int) -> int:
    """Print how many zero-tailed files are accepted, by encoder; return their number."""
    chance = random.Random(0)
    rows: dict[str, Counter[str]] = {}
    single = [(name, data) for name, data in files if b"MPF\0" not in data]  # of an MPO, the second picture may be cut
    for _ in range(number):
        name, data = chance.choice(single)
        tailed = zero_tailed(data, chance)
        count = rows.setdefault(name, Counter())
        count["files"] += 1
        count["by Pillow"] += decoded_by_pillow(tailed) is not None
        count["by layertap"] += accepted(tailed)
    print(f"\n{'zero-tailed files':36}{'files':>8}{'accepted by Pillow':>20}{'by layertap':>13}")
    for name, count in sorted(rows.items()):
        print(f"{name:36}{count['files']:8,}{count['by Pillow']:20,}{count['by layertap']:13,}")
    totals = sum(rows.values(), Counter())
    print(f"{'all':36}{totals['files']:8,}{totals['by Pillow']:20,}{totals['by layertap']:13,}")
    return totals["by layertap"]


def count_other_tails(files: list[tuple[str, bytes]], number: int) -> None:
    """Print how many files with other tails are accepted: what the check cannot know."""
    chance = random.Random(1)
    print(f"\n{'other tails':36}{'files':>8}{'accepted by Pillow':>20}{'by layertap':>13}")
    for name, tail in NOT_ZEROS.items():
        count: Counter[str] = Counter()
        for _ in range(number):
            _, data = chance.choice(files)
            kept = int(len(data) * chance.uniform(0.02, 0.99))
            tailed = data[:kept] + tail(len(data) - kept)
            count["by Pillow"] += decoded_by_pillow(tailed) is not None
            count["by layertap"] += accepted(tailed)
        print(f"{name:36}{number:8,}{count['by Pillow']:20,}{count['by layertap']:13,}")


FORMATS: dict[str, Callable[[Pixels], bytes]] = {
    "WebP": lambda pixels: pillow(pixels, "WEBP"),
    "WebP, lossless": lambda pixels: pillow(pixels, "WEBP", lossless=True),
    "AVIF": lambda pixels: pillow(pixels, "AVIF", speed=9),
    "HEIC": lambda pixels: pillow(pixels, "HEIF"),
    "JPEG 2000": lambda pixels: pillow(pixels, "JPEG2000"),
    "PNG": lambda pixels: pillow(pixels, "PNG"),
    "GIF": lambda pixels: pillow(pixels, "GIF"),
    "QOI": lambda pixels: pillow(pixels, "QOI"),
    "TIFF, LZW": lambda pixels: pillow(pixels, "TIFF", compression="tiff_lzw"),
    "TIFF, deflate": lambda pixels: pillow(pixels, "TIFF", compression="tiff_adobe_deflate"),
    "TIFF, JPEG": lambda pixels: pillow(pixels, "TIFF", compression="jpeg"),
    "TIFF, plain": lambda pixels: pillow(pixels, "TIFF"),
    "BMP": lambda pixels: pillow(pixels, "BMP"),
    "PPM": lambda pixels: pillow(pixels, "PPM"),
    "TGA": lambda pixels: pillow(pixels, "TGA"),
    "TGA, packed": lambda pixels: pillow(pixels, "TGA", compression="tga_rle"),
    "PCX": lambda pixels: pillow(pixels, "PCX"),
    "SGI": lambda pixels: pillow(pixels, "SGI"),
    "DDS": lambda pixels: pillow(pixels, "DDS"),
}


def count_other_formats(paths: list[Path], cuts: int = 20) -> None:
    """Print how many zero-tailed files of other formats have pixels that the whole file does not have."""
    chance = random.Random(2)
    print(f"\n{'zero-tailed files of other formats':36}{'files':>8}{'other pixels by Pillow':>24}{'by layertap':>13}")
    for name, encode in FORMATS.items():
        count: Counter[str] = Counter()
        for path in paths[:12]:
            with Image.open(path) as image:
                pixels = np.asarray(image.convert("RGB").resize((250, 200)))
            try:
                data = encode(pixels)
            except Exception as error:
                print(f"left out: {name}: {type(error).__name__}: {error}")
                break
            whole = decoded_by_pillow(data)
            for _ in range(cuts):
                tailed = zero_tailed(data, chance)
                found = decoded_by_pillow(tailed)
                is_wrong = found is not None and not np.array_equal(found, whole)
                count["files"] += 1
                count["by Pillow"] += is_wrong
                count["by layertap"] += is_wrong and accepted(tailed)
        print(f"{name:36}{count['files']:8,}{count['by Pillow']:24,}{count['by layertap']:13,}")


def zero_tailed(data: bytes, chance: random.Random) -> bytes:
    kept = int(len(data) * chance.uniform(0.02, 0.99))
    return data[:kept] + bytes(len(data) - kept)


def cost_ms(files: list[bytes]) -> float:
    """Return the least time of a check in milliseconds, as the mean of the files."""
    opened = [(data, Image.open(io.BytesIO(data))) for data in files]
    times = []
    for _ in range(5):
        started = time.perf_counter()
        for data, image in opened:
            with contextlib.suppress(ValueError):
                check_whole(data, image)
        times.append(time.perf_counter() - started)
    return 1000 * min(times) / len(files)


def main() -> None:
    folders = [Path(word) for word in sys.argv[1:] if not word.isdigit()]
    number = next((int(word) for word in sys.argv[1:] if word.isdigit()), 5000)
    found = [sorted(path for path in folder.rglob("*") if path.is_file()) for folder in folders]
    raw = [(f"as found in {folder.name}", path.read_bytes()) for folder, paths in zip(folders, found, strict=True)
           for path in random.Random(0).sample(paths, min(200, len(paths)))]  # fmt: skip
    files = [(name, data) for name, data in raw if data.startswith(b"\xff\xd8")]
    files += encoded_by_all([path for paths in found for path in paths[:: max(1, len(paths) * len(found) // PICTURES)]])
    print(f"{len(files):,} JPEG files of {len({name for name, _ in files})} encoders and folders\n")
    refused = count_sound(files)
    passed = count_zero_tailed(files, number)
    count_other_tails(files, 500)
    count_other_formats([path for paths in found for path in paths[:: max(1, len(paths) * len(found) // 12)]])
    sound = [data for _, data in raw if data.endswith(b"\xff\xd9")]
    size = sum(map(len, sound)) // len(sound)
    print(f"\na check of {size:,} bytes takes {cost_ms(sound):.4f} ms, and "
          f"{cost_ms([data + b'0' for data in sound]):.4f} ms with a byte behind the end")  # fmt: skip
    print(f"sound files refused: {refused}; zero-tailed files accepted: {passed}")
    sys.exit(bool(refused or passed))


if __name__ == "__main__":
    main()
