"""The hook core: `Taps`, `Record`, `Site` and edits. Imports nothing but torch and `extract.errors`."""

from extract.taps.record import Record, Site
from extract.taps.taps import Taps

__all__ = ["Record", "Site", "Taps"]
