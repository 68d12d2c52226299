"""Print the libraries that build the site, without the project: `python .ci/docs_requirements.py`."""

import tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
print("\n".join(project["optional-dependencies"]["docs"]))
