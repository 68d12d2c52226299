"""The errors that layertap raises on purpose. The same classes as in `layertap`."""

from extract.errors import DisagreementError, InputError, LayertapError, LockedError, UnknownNameError

__all__ = ["DisagreementError", "InputError", "LayertapError", "LockedError", "UnknownNameError"]
