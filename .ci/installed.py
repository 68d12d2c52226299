"""Whether the installed package is whole: `python .ci/installed.py CHECKOUT`, run outside the checkout.

Every module of the checkout is there and can be imported, every file beside the modules is there, the script runs, and
every command answers to --help.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

from click.testing import CliRunner

TOPS = ("extract", "layertap", "pipelines")
checkout = Path(sys.argv[1]).resolve()
here = Path(importlib.import_module("extract").__file__ or "").parents[1]
assert not here.is_relative_to(checkout), f"extract was imported from the checkout, {here}"
files = [path.relative_to(checkout) for top in TOPS for path in (checkout / top).rglob("*")]
files = [path for path in files if (checkout / path).is_file() and "__pycache__" not in path.parts]
missing = [str(path) for path in files if not (here / path).is_file()]
assert not missing, f"not in the installed package: {', '.join(missing)}"
modules = [path.with_suffix("") for path in files if path.suffix == ".py"]
names = [".".join(path.parts).removesuffix(".__init__") for path in modules]
for name in names:
    importlib.import_module(name)
main = importlib.import_module("pipelines.cli").main
assert "Usage: layertap" in subprocess.run(["layertap", "--help"], check=True, capture_output=True, text=True).stdout
for command in sorted(main.commands):
    text = CliRunner().invoke(main, [command, "--help"], prog_name="layertap", catch_exceptions=False).stdout
    assert f"Usage: layertap {command}" in text, command
print(f"{len(names)} modules and {len(main.commands)} commands of {here}")
