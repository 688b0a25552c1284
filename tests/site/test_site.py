"""The site that `nox -s docs` has built: its search, the distances between pages, and its reference.

`SITE` in the environment is its folder.
"""

import json
import os
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from sphinx.search.en import SearchEnglish

SITE = Path(os.environ["SITE"])
DOCS = Path(__file__).resolve().parents[2] / "docs"


class Links(HTMLParser):
    """Collects the links and anchors of a page."""

    def __init__(self, page):
        super().__init__()
        self.hrefs, self.ids = [], []
        self.feed(page.read_text())

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        if tag == "a" and attributes.get("href"):
            self.hrefs.append(attributes["href"])
        if attributes.get("id"):
            self.ids.append(attributes["id"])


PAGES = {page.relative_to(SITE).as_posix(): Links(page) for page in SITE.rglob("*.html") if "_static" not in page.parts}
GENERATED = {"genindex.html", "py-modindex.html", "search.html"}


def targets(name):
    """Return the pages of the site to which a page links."""
    hrefs = [href.partition("#")[0] for href in PAGES[name].hrefs if not re.match(r"[a-z]+:", href)]
    return {os.path.normpath(os.path.join(os.path.dirname(name), href)) for href in hrefs if href}


def test_every_page_is_at_most_two_clicks_away():
    near = targets("index.html")
    reached = {"index.html"} | near | {page for name in near & set(PAGES) for page in targets(name)}
    assert set(PAGES) - GENERATED <= reached


def test_every_link_within_the_site_leads_somewhere():
    for name, page in PAGES.items():
        for href in page.hrefs:
            if re.match(r"[a-z]+:", href):
                continue
            file, _, anchor = href.partition("#")
            path = os.path.normpath(os.path.join(os.path.dirname(name), file)) if file else name
            assert path in PAGES or (SITE / path).is_file(), f"{name}: {href}"
            assert not anchor or path not in PAGES or anchor in PAGES[path].ids, f"{name}: {href}"


class Index:
    """The results of the site's search page, computed from the table that it loads."""

    def __init__(self):
        text = (SITE / "searchindex.js").read_text()
        self._table = json.loads(text.removeprefix("Search.setIndex(").rstrip().removesuffix(")"))
        self._language = SearchEnglish({})

    def find(self, query):
        """Return the pages that have every word of the query."""
        words = [word for word in re.findall(r"\w+", query.lower()) if self._language.word_filter(word)]
        found = [self._having(word) for word in words]
        return set.intersection(*found) if found else set()

    def _having(self, word):
        stem = self._language.stem(word)
        numbers = set()
        for table in (self._table["terms"], self._table["titleterms"]):
            pages = table.get(stem, table.get(word, []))
            numbers |= set(pages) if isinstance(pages, list) else {pages}
        return {self._table["docnames"][number] for number in numbers}


@pytest.fixture(scope="module")
def index():
    return Index()


@pytest.mark.parametrize(
    ("query", "page"),
    [
        ("hostfile", "several-machines"),
        ("ssh", "several-machines"),
        ("docker", "docker"),
        ("jupyter", "jupyter"),
        ("notebook", "jupyter"),
        ("ipyparallel", "jupyter"),
        ("ctrl-c", "errors"),
        ("resume", "checkpoints"),
        ("tensorboard", "logging"),
        ("mlflow", "logging"),
        ("prepend-rank", "logging"),
        ("pdb", "debugging"),
        ("seed", "reproducibility"),
        ("mixed16", "mixed-precision"),
        ("split groups", "process-groups"),
        ("OMP_NUM_THREADS", "performance"),
        ("Windows", "faq"),
        ("deprecation", "stability"),
    ],
)
def test_search_finds_the_page(index, query, page):
    assert page in index.find(query)


def test_search_finds_each_entry_of_troubleshooting_by_the_words_of_its_message(index):
    entries = [
        (f"troubleshooting/{page.stem}", heading)
        for page in (DOCS / "troubleshooting").glob("*.md")
        for heading in re.findall(r"^##+ `(.+)`$", page.read_text(), re.M)
    ]
    assert len(entries) > 50
    for page, message in entries:
        assert page in index.find(message.replace("…", " ")), message
