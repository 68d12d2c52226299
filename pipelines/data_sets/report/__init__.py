"""One HTML page that describes a data set: `layertap report OUT`."""

from pipelines.data_sets.report.page import run_report

__all__ = ["run_report"]
