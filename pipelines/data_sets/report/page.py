"""The page of `layertap report`: one HTML file with its content as JSON; see `pipelines.terminal.page.assembly`.

Names of files and classes may come from any source: they are displayed as text, and the page's policy forbids scripts
other than its own and all downloads. These draw the map and charts. plotly took 4.6 of the 10 MB that a page may have,
and drew no pictures as points.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path

from extract.errors import InputError
from extract.store.format.dataset import DataSet
from extract.store.reader import FeatureReader
from extract.system.atomic_files import atomic_write, link_target
from pipelines.data_sets.report.content import ReportContent
from pipelines.data_sets.show import describe
from pipelines.terminal.page.assembly import assembled, is_page

__all__ = ["run_report"]

PAGE_BYTES = 10_000_000  # at most; thumbnails take the rest
_KIND = "report"
_SCRIPTS = ("map.js", "sections.js")  # joined in this order


def run_report(
    out: Path, *, output: Path | None = None, layer: str | None = None,
    maps: Sequence[str] = ("tsne", "pca"), probe_results: Sequence[Path] = (), images: str | None = None,
    thumbnails: int = 5000, seed: int = 0, say: Callable[[str], None] = lambda text: None,
) -> Path:  # fmt: skip
    """Write the page and return its path.

    Args:
        out: folder of the data set, which may be incomplete.
        output: HTML file; None: OUT/report.html.
        layer: layer by which images are compared; None: `embedding`, or the last layer.
        maps: some of pca, tsne and umap; the page opens on the first.
        probe_results: folders or files of results besides OUT/probe.
        images: location of the images; None: the recorded location, unless images would be fetched from a URL.
        thumbnails: maximum number of thumbnails; 0: no thumbnails.
        seed: seed of random choices.
        say: receives a line about each step.

    Raises:
        InputError: `out` is not a data set, the layer does not exist, or the file cannot be written.
        LayertapError: a library for a map is missing, or the data set cannot be read.
    """
    output, written_to = (out / "report.html",) * 2 if output is None else (output, link_target(output))
    if output.is_dir() or not output.resolve().parent.is_dir():
        problem = "it is a folder" if output.is_dir() else "no such folder"
        raise InputError(f"{output} cannot be written: {problem}")
    if output.is_file() and not is_page(_KIND, output):
        raise InputError(f"{output} already exists and is not a layertap report", hint="name another file")
    folder = resources.files("pipelines.data_sets.report")
    scripts = [(folder / name).read_text(encoding="utf-8") for name in _SCRIPTS]
    say("reading the description")
    described = describe(out)
    dataset = DataSet.open(out)
    with FeatureReader(out, partial=not described["complete"], check=True) as reader:
        content = ReportContent(reader, described, dataset, layer, seed, say)
        content.fill(maps, probe_results, images)
        content.list_rows()
        say("making thumbnails")
        room = PAGE_BYTES - len(assembled(_KIND, content.data, scripts)) - 200_000  # for the list of the thumbnails
        content.add_thumbnails(dataset.images["root"], images, thumbnails, room)
    with atomic_write(written_to) as file:
        file.write(assembled(_KIND, content.data, scripts))
    return output
