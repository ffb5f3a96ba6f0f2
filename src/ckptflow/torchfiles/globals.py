"""Which globals a pickle may name. Nothing is ever imported; this says what becomes a stub and what is refused."""

from __future__ import annotations

import sys
from _compat_pickle import IMPORT_MAPPING
from typing import Final

# Modules of Python itself, under their names in Python 2 too: code that a payload would call lives here.
_PYTHON_MODULES: Final = frozenset(sys.stdlib_module_names) | {name.partition(".")[0] for name in IMPORT_MAPPING}

# Of these, plain values are saved often enough, and all of their names may stand in a checkpoint as stubs.
_HARMLESS_MODULES: Final = frozenset(
    {
        "_decimal",
        "_pydatetime",
        "array",
        "collections",
        "collections.abc",
        "datetime",
        "decimal",
        "enum",
        "fractions",
        "ipaddress",
        "itertools",
        "numbers",
        "pathlib",
        "pathlib._local",
        "typing",
        "uuid",
        "zoneinfo",
    }
)
_HARMLESS_NAMES: Final = frozenset(
    {
        ("argparse", "Namespace"),
        ("types", "SimpleNamespace"),
        ("functools", "partial"),
        ("logging", "Logger"),
        ("logging", "getLogger"),
        ("operator", "attrgetter"),
        ("operator", "itemgetter"),
        ("random", "Random"),
        ("re", "Pattern"),
        ("re", "_compile"),
        ("time", "struct_time"),
        ("dataclasses", "_MISSING_TYPE"),
        ("io", "BytesIO"),
        ("io", "StringIO"),
        ("_io", "BytesIO"),
        ("_io", "StringIO"),
    }
)
_BUILTINS: Final = frozenset({"builtins", "__builtin__"})
_HARMLESS_BUILTINS: Final = frozenset(
    {
        *("Ellipsis", "NotImplemented", "NoneType", "basestring", "bool", "complex", "dict", "float", "int", "list"),
        *("long", "object", "range", "slice", "str", "tuple", "type", "unicode", "xrange"),
    }
)


def is_foreign(module: str) -> bool:
    """Whether the module is neither Python's nor torch's nor NumPy's."""
    top = module.partition(".")[0]
    return top not in _PYTHON_MODULES and top not in ("torch", "numpy")


def may_be_stub(module: str, name: str) -> bool:
    """Whether a global may become an inert stub: all of other packages, little of Python's own."""
    if module.partition(".")[0] not in _PYTHON_MODULES:
        return True
    if module in _BUILTINS:
        return name in _HARMLESS_BUILTINS or name.endswith(("Error", "Exception", "Warning"))
    return module in _HARMLESS_MODULES or (module, name) in _HARMLESS_NAMES
