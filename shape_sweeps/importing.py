"""Finds ``module:attribute``, whatever a user's module does while it is imported.

>>> import_attribute("math:pi", "--epilogues")
3.141592653589793
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback

import epilogues as ep

from .errors import InputError, one_line


def import_attribute(name: str, where: str) -> object:
    """The attribute of a module; the current folder is searched first.

    Raises:
        InputError: if there is no such module or attribute, or if importing it raises anything at all but an
            interrupt by the user.
    """
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise InputError(f"{where}: {name!r} is not of the form module:attribute")
    if not all(part.isidentifier() for part in module_name.split(".")):
        raise InputError(f"{where}: {module_name!r} of {name} is not the name of a module{_proposal(name)}")
    _search_current_folder()
    try:
        found: object = importlib.import_module(module_name)
        for part in attribute.split("."):
            found = getattr(found, part)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # whatever the module raises, SystemExit included
        raise InputError(f"{where}: {_explain(error, module_name, name)}") from error
    return found


def _search_current_folder() -> None:
    """`python -m shape_sweeps` searches the current folder, the installed `shape-sweeps` does not."""
    try:
        folder = os.getcwd()
    except OSError:  # it has been removed
        return
    if folder not in sys.path and "" not in sys.path:
        sys.path.insert(0, folder)


def _explain(error: BaseException, module_name: str, name: str) -> str:
    place = _place(error)
    if place is None and isinstance(error, AttributeError):
        return f"module {module_name!r} has no attribute {name.partition(':')[2]!r}"
    start = f"cannot import {module_name!r} of {name}: "
    if place is None and isinstance(error, ModuleNotFoundError):
        return f"{start}there is no module {error.name!r}, in the current folder or elsewhere{_proposal(name)}"
    if isinstance(error, SystemExit):
        return f"{start}it ends the program with exit code {error.code}{place or ''}"
    located = isinstance(error, (ep.EpilogueError, SyntaxError))  # their messages say where
    return f"{start}{one_line(error)}{'' if located else place or ''}"


def _place(error: BaseException) -> str | None:
    """The last line of the user's own that an exception came through; None if there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename != __file__ and not frame.filename.startswith("<frozen ")]
    own = [frame for frame in own if frame.filename != importlib.__file__]
    return f" (at {own[-1].filename}:{own[-1].lineno})" if own else None


def _proposal(name: str) -> str:
    """Names of files are not names of modules; what was meant is often plain."""
    module_name, _, attribute = name.partition(":")
    path = os.path.normpath(module_name.removesuffix(".py").replace("\\", "/"))
    parts = path.split("/")
    if path == module_name or not all(part.isidentifier() for part in parts):
        return ""
    return f": for a file of that name, write {'.'.join(parts)}:{attribute}"
