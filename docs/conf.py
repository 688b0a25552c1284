"""How Sphinx makes the site; `nox -s docs` runs it on the installed wheels, with warnings as errors."""

import mn_compat  # noqa: F401 - first: it makes Chainer importable

import chainermn  # isort: skip
import sys
from importlib import import_module
from types import ModuleType
from typing import Any

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.ext.autodoc import ClassDocumenter
from sphinx.util import logging
from sphinx.util.nodes import make_refnode

project = "ChainerMN"
author = "the ChainerMN authors"
version = release = chainermn.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]

html_theme = "furo"
pygments_style = "default"
pygments_dark_style = "github-dark"
html_title = f"ChainerMN {release}"
html_show_copyright = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False

myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence", "deflist"]

autodoc_default_options = {"members": True, "special-members": "__call__"}
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 130
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True
# Sphinx would list each class by the name of the file it is written in as well, and complain that it is there twice:
# once in chainermn, once in the package it comes from.
ClassDocumenter.get_canonical_fullname = lambda self: None  # type: ignore[method-assign]

nitpicky = True
# Whose documentation is elsewhere: Sphinx would have to ask the network where.
nitpick_ignore_regex = [("py:.*", rf"({name})(\..*)?") for name in ("chainer", "cupy", "numpy", "np", "mpi4py", "MPI")]
nitpick_ignore_regex += [("py:.*", r"(collections\.abc|typing|types|os|pathlib|contextlib)\..*")]

# What is documented; `chainermn` stands for its modules, too, whose names it offers itself.
PUBLIC = [
    "chainermn",
    *(f"chainermn.{name}" for name in chainermn.__all__ if isinstance(getattr(chainermn, name), ModuleType)),
]
OURS = ("mn_comm", "mn_compat", "mn_data", "mn_extensions", "mn_modelpar", "mn_optim", "mn_tools")


def resolve_where_public(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, content: nodes.TextElement
) -> nodes.Element | None:
    """Link a class by its public name: `mn_comm.base.CommunicatorBase` is documented as `mn_comm.CommunicatorBase`.

    What is not documented, as a class that only appears as a type, becomes plain text, if it exists.

    Args:
        app: The build.
        env: Where the documented names are.
        node: The reference that was not found.
        content: What is shown of it.

    Returns:
        The link or the text, or `None` if there is no such name.
    """
    target = node.get("reftarget", "")
    if node.get("refdomain") == "py" and "." not in target:
        # Imported for type checkers only, so that Sphinx does not know from where.
        having = [module for module in sorted(sys.modules) if module.partition(".")[0] in OURS]
        having = [module for module in having if hasattr(sys.modules[module], target)]
        target = f"{having[0]}.{target}" if having else target
    if node.get("refdomain") != "py" or target.partition(".")[0] not in OURS or "." not in target:
        return None
    package, *modules, name = target.split(".")
    documented = env.get_domain("py").objects  # type: ignore[attr-defined]
    for depth in range(len(modules), -1, -1):
        found = documented.get(".".join([package, *modules[:depth], name]))
        if found is not None:
            return make_refnode(app.builder, node["refdoc"], found.docname, found.node_id, content)
    try:
        return content if hasattr(import_module(".".join([package, *modules])), name) else None
    except ImportError:
        return None


def check_complete(app: Sphinx, env: BuildEnvironment) -> None:
    """Warn of public functions and classes that no page describes."""
    documented = env.get_domain("py").objects  # type: ignore[attr-defined]
    for module in [*PUBLIC, *OURS, "mn_modelpar.functions", "mn_modelpar.links"]:
        for name in getattr(import_module(module), "__all__", ()):  # mn_tools has commands only
            places = {f"{module}.{name}", f"{module.partition('.')[0]}.{name}"}
            is_described = callable(getattr(import_module(module), name)) and not name.startswith("_")
            if is_described and places.isdisjoint(documented):
                logging.getLogger(__name__).warning("%s.%s is described nowhere", module, name)


def setup(app: Sphinx) -> dict[str, Any]:
    """Called by Sphinx."""
    app.connect("missing-reference", resolve_where_public)
    app.connect("env-check-consistency", check_complete)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
