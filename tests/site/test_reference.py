"""The reference on the site: every public name once, a summary first, and no internals."""

import os
import re
from importlib import import_module
from pathlib import Path
from types import ModuleType

import chainermn
import pytest
from sphinx.util.inventory import InventoryFile

from mn_comm.building_blocks import STRATEGIES
from mn_comm.communicators import class_of

SITE = Path(os.environ["SITE"])
API = Path(__file__).resolve().parents[2] / "docs" / "api"
PACKAGES = [
    "mn_comm",
    "mn_compat",
    "mn_compress",
    "mn_elastic",
    "mn_data",
    "mn_extensions",
    "mn_modelpar",
    "mn_optim",
]
MODULES = [
    *PACKAGES,
    "mn_comm.building_blocks",
    "mn_comm.device.nccl",
    "mn_modelpar.functions",
    "mn_modelpar.links",
    "chainermn",
    *(f"chainermn.{name}" for name in chainermn.__all__ if isinstance(getattr(chainermn, name), ModuleType)),
]


def documented():
    """Return the names that the reference describes, with the page of each."""
    with (SITE / "objects.inv").open("rb") as file:
        inventory = InventoryFile.load(file, "", os.path.join)
    kinds = [kind for kind in inventory if kind.startswith("py:") and kind != "py:module"]
    return {name: entry[2] for kind in kinds for name, entry in inventory[kind].items()}


def find(name):
    """Return the object with a name; a function rather than a module with the same name, which it hides."""
    first, *rest = name.split(".")
    found, path = import_module(first), first
    for part in rest:
        path = f"{path}.{part}"
        if not hasattr(found, part):
            if not isinstance(found, ModuleType):
                return None
            import_module(path)
        found = getattr(found, part)
    return found


DOCUMENTED = documented()


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_is_described(module):
    described = [find(name) for name in DOCUMENTED]
    for name in import_module(module).__all__:
        each = getattr(import_module(module), name)
        if callable(each) and not name.startswith("_"):
            assert any(each is one for one in described), name


def test_nothing_is_described_twice():
    pages = {}
    for name, link in DOCUMENTED.items():
        each = find(name)
        key = (getattr(each, "__module__", None), getattr(each, "__qualname__", None))
        if callable(each) and all(key):
            pages.setdefault(key, set()).add(link)
    assert len(pages) > 150
    assert {key: links for key, links in pages.items() if len(links) > 1} == {}


def test_nothing_of_the_inside_is_described():
    public = {id(getattr(import_module(module), name)) for module in MODULES for name in import_module(module).__all__}
    public |= {id(class_of(each)) for each in STRATEGIES.values()}  # made when they are first used
    # Objects that public functions return, and that users therefore have.
    returned = {"MemoryKeeper", "MultiNodeCheckpointer", "MultiNodeSnapshot"}
    for name in DOCUMENTED:
        each = find(name)
        if isinstance(each, type) and each.__name__ not in returned:
            assert id(each) in public, name


@pytest.mark.parametrize("page", sorted(API.glob("*.md")), ids=lambda page: page.stem)
def test_each_page_begins_with_a_summary(page):
    if page.stem in ("index", "commands", "mn_guard"):  # they describe other things than names of Python
        assert re.match(r"# .+\n\n(?:[^#|].*\n+)*?\| ", page.read_text())
        return
    directives = re.findall(r"^\.\. (auto\w+)::", page.read_text(), re.M)
    assert directives[0] == "autosummary"


def test_functions_come_before_the_abstract_class():
    page = (SITE / "api" / "chainermn.html").read_text()
    order = ["create_communicator", "create_multi_node_optimizer", "scatter_dataset", "CommunicatorBase"]
    places = [page.index(f'id="chainermn.{name}"') for name in order]
    assert places == sorted(places)
