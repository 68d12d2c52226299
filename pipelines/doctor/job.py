"""Run all checks of `layertap doctor` and print the report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from extract import defaults
from extract.errors import LayertapError, first_line
from extract.system.optional_libraries import pip_install
from pipelines.doctor.check import Line, Section
from pipelines.doctor.inputs import check_backbone, check_images
from pipelines.doctor.machine import check_devices, check_libraries, check_memory, check_versions
from pipelines.doctor.output import check_output
from pipelines.terminal.text_output import counted

__all__ = ["Report", "as_json", "examine", "print_report"]

_MARKS = {"ok": "  ", "note": "--", "wrong": "!!"}
_COLOURS = {"ok": None, "note": "yellow", "wrong": "red"}


@dataclass(frozen=True)
class Report:
    """The results of all checks.

    Attributes:
        sections: results by subject.
    """

    sections: list[Section]

    @property
    def problems(self) -> list[Line]:
        """The lines about something needed that is missing or broken."""
        return [line for section in self.sections for line in section.lines if line.state == "wrong"]


def examine(images: str | None, backbone: str | None, out: str | None) -> Report:
    """Run all checks; a check that fails is a line of the report.

    Args:
        images: folder, list, archive, array or URL of images; None: they are not checked.
        backbone: SOURCE/NAME; None: the default backbone.
        out: output folder; None: that of `layertap embed`.
    """
    sections = [
        _run("versions", check_versions),
        _run("devices", check_devices),
        _run("memory", check_memory),
        _run("optional libraries", check_libraries),
    ]
    n_images = 0
    if images is not None:
        sections.append(_run("images", lambda section: check_images(section, images)))
        n_images = sections[-1].facts.get("count", 0)
    sections.append(_run("backbone", lambda section: check_backbone(section, backbone or defaults.BACKBONE)))
    sections.append(_run("output", lambda section: check_output(section, out or _default_out(images), n_images)))
    return Report(sections)


def _default_out(images: str | None) -> str:
    from pipelines.terminal.config import name_of

    return str(Path("outputs") / (name_of(images) if images is not None else "NAME"))


def _run(title: str, check: Callable[[Section], None]) -> Section:
    section = Section(title)
    try:
        check(section)
    except LayertapError as error:
        section.wrong(error.message, error.hint)
    except OSError as error:
        section.wrong(f"{error.filename or title}: {error.strerror or first_line(error)}")
    except ImportError as error:  # a library that layertap needs
        section.wrong(first_line(error), f"to install it: {pip_install('')}")
    return section


def as_json(report: Report) -> dict[str, Any]:
    """Return the report as JSON-compatible data."""
    sections = {
        section.title.replace(" ", "_"): {**section.facts, "lines": [asdict(line) for line in section.lines]}
        for section in report.sections
    }
    return {"ok": not report.problems, "problems": [asdict(line) for line in report.problems], **sections}


def print_report(report: Report, echo: Callable[..., None]) -> None:
    """Print the report, section by section."""
    for section in report.sections:
        echo(section.title)
        for line in section.lines:
            echo(f"{_MARKS[line.state]} {line.text}", fg=_COLOURS[line.state])
            if line.hint:
                echo(f"   hint: {line.hint}")
    count = len(report.problems)
    echo(f"{counted(count, 'problem')}, marked with !!" if count else "no problems")
