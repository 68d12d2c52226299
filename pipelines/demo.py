"""Run the main jobs on real images, offline: `layertap demo`.

scikit-learn's handwritten digits (1,797 scans of 8x8 pixels, ten classes; Alpaydin and Kaynak, UCI repository) are
written as an image folder. `embed` runs on the folder with the bundled weights, `probe` measures how well a linear
classifier separates the digits by these features, and `report` writes an HTML page about the results.
"""

from __future__ import annotations

from pathlib import Path

import click

from extract.system.optional_libraries import library
from pipelines.embed.config import EmbedConfig
from pipelines.probe.config import ProbeConfig
from pipelines.terminal.commands import command
from pipelines.terminal.config import checked
from pipelines.terminal.text_output import print_line

__all__ = ["demo"]

_READING = """\
from layertap import FeatureReader
reader = FeatureReader("{out}")
x, y = reader["embedding"][:], reader.labels"""


def _write_digits(folder: Path) -> int:
    """Write the digits as `folder/<digit>/<number>.png`, unless they exist, and return their number.

    Raises:
        LayertapError: scikit-learn is not installed.
    """
    load_digits = library("sklearn.datasets", "demo", "layertap demo").load_digits
    import numpy as np
    from PIL import Image

    digits = load_digits()
    for number, (pixels, digit) in enumerate(zip(digits.images, digits.target, strict=True)):
        path = folder / str(digit) / f"{number:04d}.png"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray((pixels * (255 / 16)).astype(np.uint8)).save(path)  # grey levels 0 to 16
    return len(digits.images)


@command(hidden=True, short_help="Run embed, probe and report on handwritten digits.")
@click.option("-o", "--out", type=click.Path(path_type=Path), default=Path("outputs/demo"), show_default=True)
@click.pass_context
def demo(ctx: click.Context, out: Path) -> None:
    """Run `embed`, `probe` and `report` on 1,797 scans of handwritten digits, offline, with real weights.

    Takes about a minute on 2 cores.
    """
    for module in ("sklearn", "threadpoolctl", "matplotlib"):
        library(module, "demo", "layertap demo")
    from pipelines.data_sets.report.page import run_report
    from pipelines.embed.job import embed, print_summary
    from pipelines.probe.report import print_outcome, probe_and_write

    config = checked(EmbedConfig, {"images": out / "digits", "out": out / "features"})
    print_line(f"{_write_digits(out / 'digits'):,} digits in {config.images}", err=True)
    outcome = embed(config)
    print_summary(outcome, print_line)
    if outcome.signal:
        ctx.exit(128 + outcome.signal)
    probe_config = ProbeConfig(out=[str(out / "features")], results=out / "probe")
    probe_outcome, files = probe_and_write(probe_config, lambda text: print_line(text, err=True))
    print_outcome(probe_outcome, print_line)
    print_line("figures: " + ", ".join(str(file) for file in files if file.suffix == ".png"))
    report = run_report(out / "features", probe_results=[out / "probe"])
    print_line(f"report, to be opened in a browser: {report}")
    print_line("To read the features:\n\n" + _READING.format(out=config.folder))
