"""NumPy."""

from __future__ import annotations

import builtins
import ctypes
import functools
import gc
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

_NAMES = ("float", "int", "bool", "object", "complex", "str")
_STACKING = ("vstack", "hstack", "dstack", "column_stack", "stack")

# By method name: the numbers of the slots (Include/typeslots.h), and their positions in PyNumberMethods.
_CONVERSIONS = {"__int__": (26, 16), "__float__": (11, 18)}
# In PyTypeObject, the fields between the header of a variable-size object and tp_as_number.
_FIELDS_BEFORE_NUMBERS = 9


def restore_names(numpy: ModuleType) -> None:
    """Restore the aliases of Python's types; NumPy 2 has its own ``bool``, which stays."""
    for name in _NAMES:
        # hasattr would make NumPy 1 warn.
        if name not in vars(numpy):
            setattr(numpy, name, getattr(builtins, name))


def restore_stacking(numpy: ModuleType) -> None:
    """Let functions that stack arrays accept any iterable of arrays."""
    for name in _STACKING:
        setattr(numpy, name, _of_iterable(getattr(numpy, name)))


def _of_iterable(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **options: Any) -> Any:
        if args and not hasattr(args[0], "__getitem__"):  # the type that NumPy requires
            args = (list(args[0]), *args[1:])
        return function(*args, **options)

    return wrapper


def restore_scalars(numpy: ModuleType) -> None:
    """Let ``int()`` and ``float()`` accept arrays with one element, whatever their number of dimensions.

    ``numpy.ndarray`` is written in C, and Python finds the two methods in two places: in its table of numeric functions
    and in its namespace. Python's own function for classes that are written in Python is put into the table; it calls
    the method in the namespace. Existing subclasses do not change.

    Raises:
        RuntimeError: This interpreter has the table in a different place.
    """
    table = _numeric_functions(numpy.ndarray)
    (namespace,) = gc.get_referents(numpy.ndarray.__dict__)
    for name, (slot, index) in _CONVERSIONS.items():
        table[index] = _slot(_Python, slot)
        namespace[name] = _of_one_element(namespace[name], numpy.asarray)
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(numpy.ndarray))


class _Python:
    """A class with the numeric functions that look up a method."""

    def __int__(self) -> int:
        return 0

    def __float__(self) -> float:
        return 0.0


def _of_one_element(convert: Callable[[Any], Any], asarray: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(convert)
    def method(self: Any) -> Any:
        return convert(asarray(self).reshape(()) if self.ndim and self.size == 1 else self)

    return method


def _numeric_functions(cls: type) -> Any:
    """Return a type's table of numeric functions, as a writable array of addresses."""
    word = ctypes.sizeof(ctypes.c_void_p)
    head = object.__basicsize__ + word
    try:
        address = ctypes.c_void_p.from_address(id(cls) + head + _FIELDS_BEFORE_NUMBERS * word).value
        table = (ctypes.c_void_p * 19).from_address(address or 0) if _is_known() and address else None
        found = table and all(table[index] == _slot(cls, slot) for slot, index in _CONVERSIONS.values())
    except (AttributeError, ValueError):
        found = False
    if not found:
        raise RuntimeError(f"numpy_scalars cannot be restored on {sys.implementation.name} {sys.version.split()[0]}")
    return table


def _is_known() -> bool:
    # Without the interpreter lock, an object's header is different, and a type must not be changed while it is used.
    return sys.implementation.name == "cpython" and getattr(sys, "_is_gil_enabled", lambda: True)()


def _slot(cls: type, number: int) -> int | None:
    get = ctypes.pythonapi.PyType_GetSlot
    get.restype, get.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_int)
    address: int | None = get(cls, number)
    return address
