"""Run the notebook of the documents: `python -m tests.notebook` runs it and stores its output in the file."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

NOTEBOOK = Path(__file__).parents[1] / "docs/guides/notebook.ipynb"


def run_notebook(path: Path, folder: Path) -> Any:
    """Run a notebook in a folder, and return it with its output.

    Raises:
        CellExecutionError: a cell raised an error.
    """
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, resources={"metadata": {"path": str(folder)}}, timeout=300, record_timing=False).execute()
    return notebook


if __name__ == "__main__":
    import nbformat

    with tempfile.TemporaryDirectory() as scratch:
        executed = run_notebook(NOTEBOOK, Path(scratch))
    executed.metadata = {key: executed.metadata[key] for key in ("kernelspec",)} | {"language_info": {"name": "python"}}
    nbformat.write(executed, NOTEBOOK)
