"""What Chromium shows of the site: on wide and narrow screens, light and dark, and what its search finds first.

One browser loads all pages, one after the other; `browser.js` looks at them.
"""

import json
import os
import queue
import shutil
import subprocess
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

# One browser looks at everything, in a few minutes on a busy machine.
pytestmark = pytest.mark.timeout(700)

SITE = Path(os.environ["SITE"])
PAGES = sorted(page.relative_to(SITE).as_posix() for page in SITE.rglob("*.html") if "_static" not in page.parts)
WIDTHS = [390, 800, 1400]
THEMES = ["light", "dark"]
# What users in need type, and the pages of which one should be among the first three results.
SEARCHES = {
    "hang": ["troubleshooting/hangs"],
    "job hangs": ["troubleshooting/hangs"],
    "stuck": ["troubleshooting/hangs"],
    "deadlock": ["troubleshooting/hangs"],
    "timeout": ["troubleshooting/hangs"],
    "NaN": ["debugging", "troubleshooting/averaging"],
    "out of memory": ["troubleshooting/system"],
    "killed": ["errors", "troubleshooting/hangs", "troubleshooting/system"],
    "segmentation fault": ["debugging"],
    "process_vm_readv": ["troubleshooting/system"],
    "Bus error": ["troubleshooting/system"],
    "cannot load MPI library": ["troubleshooting/system"],
    "There are not enough slots available": ["troubleshooting/system"],
    "BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES": ["troubleshooting/system"],
    "every process is rank 0": ["troubleshooting/starting"],
    "expected finite gradients": ["troubleshooting/averaging"],
    "slow": ["performance", "troubleshooting/system"],
    "profiling": ["timeline"],
    "overlap": ["examples", "performance"],
    "double buffering": ["performance"],
    "gradient accumulation": ["performance", "large-batches"],
    "mixed precision": ["mixed-precision"],
    "bfloat16": ["mixed-precision"],
    "learning rate": ["large-batches", "tutorial/step1"],
    "ZeRO": ["sharding"],
    "compression": ["compression"],
    "resume": ["checkpoints"],
    "checkpoint": ["checkpoints"],
    "spot instance": ["surviving-failures"],
    "elastic": ["restarting", "surviving-in-place"],
    "fault tolerance": ["surviving-failures", "surviving-in-place"],
    "evaluator": ["tutorial/step2", "tips"],
    "MultiprocessIterator": ["tips"],
    "tensorboard": ["logging"],
    "batch normalization": ["tips"],
    "GPU": ["gpus"],
    "NCCL": ["choosing", "gpus", "troubleshooting/system"],
    "Slurm": ["slurm"],
    "hostfile": ["several-machines"],
    "pip install": ["installation"],
    "horovod": ["compared"],
}

# A page on which each check must find something.
MISTAKES = """<!doctype html><body style="background: white"><article>
<p style="width: 900px">too wide for a phone</p>
<p style="color: #ccc">too faint</p>
<img src="data:image/svg+xml,<svg xmlns='http://www.w3.org/2000/svg' width='9' height='9'/>">
</article>"""


class Handler(SimpleHTTPRequestHandler):
    """Serves the site and, beside it, the page that looks at it; receives what it has seen."""

    def __init__(self, results, *arguments, **keywords):
        self._results = results
        super().__init__(*arguments, **keywords)

    def do_GET(self):
        page = {"/look": looking, "/mistakes": lambda: MISTAKES}.get(self.path)
        if page is None:
            super().do_GET()
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.end_headers()
        self.wfile.write(page().encode())

    def do_POST(self):
        self._results.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_):
        pass


def looking():
    """Return the page that looks at the others."""
    pages = [*PAGES, "mistakes"]
    values = {"PAGES": pages, "WIDTHS": WIDTHS, "THEMES": THEMES, "QUERIES": list(SEARCHES)}
    constants = "".join(f"const {name} = {json.dumps(value)};\n" for name, value in values.items())
    script = constants + Path(__file__).with_name("browser.js").read_text()
    return f'<!doctype html><meta charset="utf-8"><body><script>{script}</script>'


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """Return what Chromium has seen of all pages."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        pytest.skip("needs Chromium on PATH: apt-get install chromium")
    results = queue.Queue()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, results, directory=SITE))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    options = ["--headless=new", "--disable-gpu", f"--user-data-dir={tmp_path_factory.mktemp('profile')}"]
    options += ["--no-sandbox"] * (os.geteuid() == 0)
    page = f"http://127.0.0.1:{server.server_port}/look"
    process = subprocess.Popen([browser, *options, page], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        found = results.get(timeout=600)
    finally:
        process.kill()
        process.wait()
        server.shutdown()
        server.server_close()
    assert "error" not in found, found["error"]
    return found


@pytest.mark.parametrize("page", PAGES)
def test_a_page_fits_every_screen(seen, page):
    found = seen["pages"][page]
    assert {width: extra for width, extra in found["wide"].items() if extra > 1} == {}
    assert {width: elements for width, elements in found["clipped"].items() if elements} == {}


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_readable_in_light_and_dark(seen, page):
    found = seen["pages"][page]
    assert {theme: texts for theme, texts in found["faint"].items() if texts} == {}
    assert found["pictures"] == []


def test_mistakes_are_found(seen):
    found = seen["pages"]["mistakes"]
    assert [width for width, extra in found["wide"].items() if extra > 1] == ["390", "800"]
    assert found["clipped"]["390"] == ["<p> too wide for a phone"]
    assert found["faint"]["light"] == ["1.6 <p> too faint"]
    assert [picture.partition(":")[0] for picture in found["pictures"]] == ["transparent"]


@pytest.mark.parametrize("query", SEARCHES)
def test_a_search_has_the_right_page_among_the_first_three(seen, query):
    first = list(dict.fromkeys(page.removesuffix(".html") for page in seen["searches"][query]))[:3]
    assert set(first) & set(SEARCHES[query]), first
