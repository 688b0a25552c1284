"""Never imported: installers remove its bytecode file with it, and the loader keeps the patched modules in that file.

Python may keep what it compiles in ``__pycache__``, but the files there belong to the unpatched modules. pip removes
only those that belong to an installed file.
"""
