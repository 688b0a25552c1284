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

# By the names of the methods: the numbers of their slots (Include/typeslots.h), and their places in PyNumberMethods.
_CONVERSIONS = {"__int__": (26, 16), "__float__": (11, 18)}
# In PyTypeObject, the fields between the head of an object with a size and tp_as_number.
_FIELDS_BEFORE_NUMBERS = 9


def restore_names(numpy: ModuleType) -> None:
    """Give back the aliases of Python's types; NumPy 2 has a ``bool`` of its own, which stays."""
    for name in _NAMES:
        # Asking with hasattr makes NumPy 1 warn.
        if name not in vars(numpy):
            setattr(numpy, name, getattr(builtins, name))


def restore_stacking(numpy: ModuleType) -> None:
    """Let functions that stack arrays take any iterable of them."""
    for name in _STACKING:
        setattr(numpy, name, _of_iterable(getattr(numpy, name)))


def _of_iterable(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **options: Any) -> Any:
        if args and not hasattr(args[0], "__getitem__"):  # what NumPy asks for
            args = (list(args[0]), *args[1:])
        return function(*args, **options)

    return wrapper


def restore_scalars(numpy: ModuleType) -> None:
    """Let ``int()`` and ``float()`` take arrays of one element, whatever their number of dimensions.

    Python sees the two methods of ``numpy.ndarray``, which is written in C, in two places: in its table of numeric
    functions and in its namespace. The former gets Python's own function for classes that are written in Python, which
    calls what is in the latter. Subclasses that exist already keep what they have.

    Raises:
        RuntimeError: This interpreter keeps the table elsewhere.
    """
    table = _numeric_functions(numpy.ndarray)
    (namespace,) = gc.get_referents(numpy.ndarray.__dict__)
    for name, (slot, index) in _CONVERSIONS.items():
        table[index] = _slot(_Python, slot)
        namespace[name] = _of_one_element(namespace[name], numpy.asarray)
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(numpy.ndarray))


class _Python:
    """A class whose numeric functions are those that look for a method."""

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
    """Return the table of numeric functions of a type, as an array of addresses that can be written to."""
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
    # Without the interpreter lock an object's head is different, and a type may not be changed while it is used.
    return sys.implementation.name == "cpython" and getattr(sys, "_is_gil_enabled", lambda: True)()


def _slot(cls: type, number: int) -> int | None:
    get = ctypes.pythonapi.PyType_GetSlot
    get.restype, get.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_int)
    address: int | None = get(cls, number)
    return address
