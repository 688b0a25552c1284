"""Loads an installed module with its text substituted; the file itself is only read."""

from __future__ import annotations

import contextlib
import functools
import marshal
import os
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import MAGIC_NUMBER, cache_from_source, decode_source, source_hash
from types import CodeType

from mn_compat.substitution import Substitution, apply

# Python itself must not take the file for bytecode of its own.
_HEAD = b"mn_compat" + MAGIC_NUMBER


class SubstitutingLoader(SourceFileLoader):
    """A source loader whose source is the file's text after the substitutions."""

    def __init__(self, fullname: str, path: str, substitutions: tuple[Substitution, ...]) -> None:
        super().__init__(fullname, path)
        self.substitutions = substitutions

    def get_data(self, path: str) -> bytes:
        """Return the bytes of `path`, patched if it is the module's own file."""
        data = super().get_data(path)
        if path != self.path:
            return data
        text = apply(self.substitutions, decode_source(data), name=self.name, path=path)
        return text.encode()

    def get_code(self, fullname: str) -> CodeType:
        """Return the code of the patched text, without the bytecode cache, which belongs to the unpatched file."""
        path = self.get_filename(fullname)
        source = self.get_data(path)
        found = source_hash(os.fsencode(path) + b"\0" + source)
        compiled = _compiled()
        key, kept = compiled.get(fullname, (b"", b""))
        if key == found:
            code: CodeType = marshal.loads(kept)
            return code
        code = self.source_to_code(source, path)
        compiled[fullname] = found, marshal.dumps(code)
        if not sys.dont_write_bytecode:
            self.set_data(_file(), _HEAD + marshal.dumps(compiled))
        return code


@functools.cache
def _compiled() -> dict[str, tuple[bytes, bytes]]:
    """Return, for each module, a hash of what was compiled, and the code, as they were in the file at first use."""
    # It may be missing, damaged, or the bytecode of bytecode.py, which pip compiles.
    with contextlib.suppress(OSError, EOFError, ValueError, TypeError), open(_file(), "rb") as file:
        if file.read(len(_HEAD)) == _HEAD:
            compiled: dict[str, tuple[bytes, bytes]] = marshal.load(file)
            return compiled
    return {}


def _file() -> str:
    return cache_from_source(os.path.join(os.path.dirname(__file__), "bytecode.py"))
