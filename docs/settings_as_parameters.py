"""Extension of griffe: functions that take settings are shown with the parameters that they have when they run.

Griffe reads source files, where such a function has one parameter; see `taking` in `extract/extraction/settings.py`.
"""

from __future__ import annotations

import importlib
import inspect
import re
from typing import Any

import griffe


class SettingsAsParameters(griffe.Extension):
    """Replace parameters and docstring of functions that `taking` decorates."""

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        """See `griffe.Extension`."""
        if not any(decorator.callable_path.endswith(".taking") for decorator in func.decorators):
            return
        module, _, name = func.path.rpartition(".")
        function = getattr(importlib.import_module(module), name)
        if func.docstring is not None:
            # Brackets in names of poolings are no links.
            func.docstring.value = (inspect.getdoc(function) or "").replace("[", "\\[")
        func.parameters = griffe.Parameters(*map(_parameter, inspect.signature(function).parameters.values()))


def _parameter(parameter: inspect.Parameter) -> griffe.Parameter:
    return griffe.Parameter(
        parameter.name,
        annotation=re.sub(r"(?:\w+\.)+(?=[A-Z])", "", inspect.formatannotation(parameter.annotation)),
        kind=griffe.ParameterKind[parameter.kind.name.lower()],
        default=None if parameter.default is parameter.empty else repr(parameter.default),
    )
