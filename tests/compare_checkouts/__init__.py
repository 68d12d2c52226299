"""Two checkouts, the same commands, everything compared: see `__main__.py`.

Imports inside are relative. A recording runs this package as `compare_checkouts` with the recorded checkout first on
the path, and the folder `tests` of that checkout must not be found instead of this one.
"""
