"""Set up nox and uv for this clone, then run nox: ``python3 tools/bootstrap.py -s SESSION``.

Needs Python 3.10 or newer and a package index, but neither pip, ensurepip, git nor root. The tools are installed to
``.tools/`` in the clone, in the versions and with the hashes of ``tools/requirements.txt``; a second run finds them
there. All arguments are passed to nox, which runs in the root of the clone.

``PIP_INDEX_URL`` names an index other than PyPI, ``PIP_CERT`` or ``SSL_CERT_FILE`` a file of certificates, and
``HTTPS_PROXY`` a proxy; uv gets the same settings.
"""

import sys

# Python 3.6 has to be able to parse this file, so that it can print that it is too old.
if sys.version_info < (3, 10):  # noqa: UP036
    sys.exit(f"bootstrap: this needs Python 3.10 or newer, and this is {sys.version.split()[0]}")

import hashlib
import html
import os
import re
import shutil
import ssl
import subprocess
import tempfile
import urllib.error
import urllib.parse
import urllib.request
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ROOT / ".tools"
PYTHON = TOOLS / "bin" / "python"
REQUIREMENTS = ROOT / "tools" / "requirements.txt"
STAMP = TOOLS / "complete"
TIMEOUT = 60  # seconds, for each answer of the index


def main() -> None:
    """Set up the tools if they are missing or old, and run nox in place of this process."""
    wanted = _fingerprint()
    if not STAMP.is_file() or STAMP.read_text() != wanted or not PYTHON.exists():
        _set_up()
        STAMP.write_text(wanted)
    _tell_uv()
    os.chdir(ROOT)
    os.environ["PATH"] = os.pathsep.join([str(PYTHON.parent), os.environ.get("PATH", os.defpath)])
    os.execv(PYTHON, [str(PYTHON), "-m", "nox", *sys.argv[1:]])


def _fingerprint() -> str:
    """Return the data that the tools depend on: this Python, this folder, and the required versions."""
    parts = [sys.version, os.path.realpath(sys.executable), str(ROOT), REQUIREMENTS.read_text()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _set_up() -> None:
    print(f"bootstrap: setting up {TOOLS}", file=sys.stderr, flush=True)
    shutil.rmtree(TOOLS, ignore_errors=True)
    try:
        # Debian has ensurepip in a separate package, so the environment is created without pip.
        venv.create(TOOLS, symlinks=True, with_pip=False)
    except OSError as error:
        sys.exit(f"bootstrap: cannot make {TOOLS}: {error}")
    with tempfile.TemporaryDirectory() as scratch:
        # Python can run a wheel of pip, which is a zip file.
        pip = _fetch_pip(Path(scratch))
        command = [sys.executable, f"{pip}/pip", "--python", str(PYTHON), "install", "--quiet"]
        options = ["--disable-pip-version-check", "--require-hashes", "--only-binary", ":all:"]
        done = subprocess.run([*command, *options, "-r", str(REQUIREMENTS)])
    if done.returncode:
        sys.exit(f"bootstrap: pip could not install {REQUIREMENTS.relative_to(ROOT)}; its message is above")


def _fetch_pip(folder: Path) -> Path:
    """Fetch the wheel of pip that the requirements name, and check its hash."""
    version, hashes = _pinned_pip(REQUIREMENTS.read_text())
    name = f"pip-{version}-py3-none-any.whl"
    page = (_index() or "https://pypi.org/simple").rstrip("/") + "/pip/"
    link = _find_link(_get(page).decode(), name)
    if link is None:
        sys.exit(f"bootstrap: {page} does not list {name}")
    content = _get(urllib.parse.urljoin(page, link))
    if hashlib.sha256(content).hexdigest() not in hashes:
        sys.exit(f"bootstrap: {name} from {page} has none of the hashes in {REQUIREMENTS.relative_to(ROOT)}")
    wheel = folder / name
    wheel.write_bytes(content)
    return wheel


def _pinned_pip(requirements: str) -> tuple[str, list[str]]:
    found = re.search(r"^pip==(\S+)((?:\s*\\\n\s*--hash=sha256:\w+)+)", requirements, re.MULTILINE)
    if found is None:
        sys.exit(f"bootstrap: {REQUIREMENTS.relative_to(ROOT)} names no pip with its hashes")
    return found[1], re.findall(r"sha256:(\w+)", found[2])


def _find_link(page: str, name: str) -> str | None:
    links = re.findall(r"""<a\s[^>]*?href=["']([^"']+)""", page)
    return next((html.unescape(link) for link in links if name in link), None)


def _get(url: str) -> bytes:
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT, context=_context()) as answer:
            return bytes(answer.read())
    except urllib.error.HTTPError as error:
        sys.exit(f"bootstrap: {url} answered {error.code} {error.reason}")
    except OSError as error:
        reason = getattr(error, "reason", error)
        sys.exit(f"bootstrap: cannot reach {url}: {reason}; is there a network, or a proxy to be named?")


def _context() -> ssl.SSLContext:
    if _has_certificates():
        return ssl.create_default_context(cafile=os.environ.get("PIP_CERT"))
    # A system without ca-certificates cannot verify servers. Downloads are verified here by their hashes, which are in
    # the clone; pip and uv contain certificates of their own.
    return ssl._create_unverified_context()  # noqa: SLF001


def _has_certificates() -> bool:
    paths = ssl.get_default_verify_paths()
    return bool(os.environ.get("PIP_CERT") or paths.cafile or (paths.capath and os.listdir(paths.capath)))


def _index() -> str | None:
    names = ("PIP_INDEX_URL", "UV_DEFAULT_INDEX", "UV_INDEX_URL")
    return next((os.environ[name] for name in names if os.environ.get(name)), None)


def _tell_uv() -> None:
    """Pass the settings of pip and Python to uv: the index, the certificates; and a cache if there is no home."""
    index, certificates = _index(), os.environ.get("PIP_CERT")
    if index:
        os.environ.setdefault("UV_DEFAULT_INDEX", index)
    if certificates:
        os.environ.setdefault("SSL_CERT_FILE", certificates)
    elif _has_certificates():
        os.environ.setdefault("UV_SYSTEM_CERTS", "1")
    if not os.access(Path.home(), os.W_OK):
        os.environ.setdefault("UV_CACHE_DIR", str(TOOLS / "cache"))


if __name__ == "__main__":
    main()
