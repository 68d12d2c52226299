r"""Make text safe in CSV files, which people open in spreadsheets and print on terminals.

Paths, ids, classes and layer names may come from strangers. A spreadsheet runs a cell that begins with `= + - @` as a
formula, also a quoted one; a terminal obeys escape sequences. Therefore:

- A cell that a spreadsheet could run gets an apostrophe in front, as OWASP recommends (CSV injection): `=a.jpg` becomes
  `'=a.jpg`. Text after apostrophes gets one too, so that the original follows from the cell.
- Control characters except tab and newline become `\xNN`: ESC becomes `\x1b`. A backslash that already stands before
  such an `xNN` becomes `\x5c`.
- Numbers are unchanged, also as text: `-1.5`, `+1`, `1e-3`, `-inf`. All other text is unchanged, too, also what `csv`
  quotes (commas, quotes, newlines). So nearly every path joins as it is; `exact_text` gives the original of the others.

JSON, Parquet, HDF5 and MATLAB files hold the exact text.
"""

from __future__ import annotations

import re
from typing import Any

__all__ = ["exact_text", "safe_cell"]

# Tab and newlines: spreadsheets skip them before a formula. The last four are full-width signs, which some convert.
_FORMULA = "=+\\-@\t\r\n\uff1d\uff0b\uff0d\uff20"
_NEEDS_APOSTROPHE = re.compile(f"'*[{_FORMULA}]")
_NUMBER = re.compile(r"[+-]?((\d+\.?\d*|\.\d+)([eE][+-]?\d+)?|inf|infinity|nan)", re.ASCII | re.IGNORECASE)
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]|\\(?=x[0-9a-f]{2})")


def safe_cell(value: Any) -> Any:
    """Return a value for a CSV cell: text as described above, anything else unchanged."""
    if not isinstance(value, str) or _NUMBER.fullmatch(value):
        return value
    text = f"'{value}" if _NEEDS_APOSTROPHE.match(value) else value
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def exact_text(cell: str) -> str:
    """Return the text that `safe_cell` made into a cell."""
    text = re.sub(r"\\x([0-9a-f]{2})", lambda found: chr(int(found[1], 16)), cell)
    return text[1:] if text.startswith("'") and _NEEDS_APOSTROPHE.match(text) else text
