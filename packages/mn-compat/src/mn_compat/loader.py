"""Loads an installed module with its text substituted; the file itself is only read."""

from __future__ import annotations

from importlib.machinery import SourceFileLoader
from importlib.util import decode_source
from types import CodeType

from mn_compat.substitution import Substitution, apply


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
        """Compile the patched text, without using the bytecode cache, which belongs to the unpatched file."""
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)
