"""A safety net for changes that must not change behaviour: two checkouts, the same commands, everything compared.

    python -m tests.compare_checkouts OLD NEW                  # record both, and compare
    python -m tests.compare_checkouts record CHECKOUT DIR      # keep what a checkout does
    python -m tests.compare_checkouts compare DIR DIR          # compare what was kept

The command line of each checkout runs in a scratch folder of its own, on pictures that are made there; see
`commands.py`. Exit codes, stdout, stderr and every file that a command writes are compared: HDF5, JSON, CSV,
NumPy, Parquet, safetensors and SQLite by value, pictures by pixels. Times, rates, process ids and paths are left out.
It prints a line for each command, "same" or what differs, and exits with 1 if anything differs.

One process for each checkout imports the libraries, and forks for each command.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from .differences import compare
from .recording import drive, record


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="+", metavar="OLD NEW | record CHECKOUT DIR | compare DIR DIR")
    words = parser.parse_args().words
    action, paths = (words[0], words[1:]) if words[0] in {"record", "compare", "drive"} else ("", words)
    if len(paths) != 2:
        parser.error("expected OLD NEW, record CHECKOUT DIR, or compare DIR DIR")
    one, other = (Path(path).resolve() for path in paths)
    if action == "drive":
        drive(one, other)
    elif action == "record":
        print(f"recorded {one} in {record(one, other):.0f} s")
    elif action == "compare":
        return 0 if compare(one, other) else 1
    else:
        with tempfile.TemporaryDirectory() as folder:
            for number, checkout in enumerate((one, other)):
                print(f"recorded {checkout} in {record(checkout, Path(folder) / str(number)):.0f} s", flush=True)
            return 0 if compare(Path(folder) / "0", Path(folder) / "1") else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
