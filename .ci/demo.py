"""Whether the demo has done what it says: `python .ci/demo.py TEXT`, run where the demo was, with what it printed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

text = Path(sys.argv[1]).read_text()
assert "(1797, 1280) float32" in text
assert "confusion.png" in text
assert "report, to be opened in a browser: outputs/demo/features/report.html" in text
assert Path("outputs/demo/features/report.html").stat().st_size < 10_000_000
accuracy = json.loads(Path("outputs/demo/probe/results.json").read_text())["probes"][0]["metrics"]["top1"]
assert accuracy["value"] > 0.9, accuracy
names: dict[str, Any] = {}
exec(text.split("To read the features:")[1], names)  # the lines that it shows
assert names["x"].shape == (1797, 1280)
assert np.bincount(names["y"]).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
print(f"the demo is whole: top1 {accuracy['value']:.3f}")
