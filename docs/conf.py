"""The configuration of Sphinx; `nox -s docs` runs it on the installed wheels, with warnings as errors."""

import mn_compat  # noqa: F401 - first: it makes Chainer importable

import chainermn  # isort: skip
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util.nodes import make_refnode

project = "ChainerMN"
author = "the ChainerMN authors"
version = release = chainermn.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
exclude_patterns = ["_build"]

html_theme = "furo"
pygments_style = "default"
pygments_dark_style = "github-dark"
html_title = f"ChainerMN {release}"
html_show_copyright = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_search_scorer = str(Path(__file__).with_name("scorer.js"))

myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence", "deflist"]

# Copied text contains only what a reader types: no prompts, and no output.
copybutton_prompt_text = r"\$ |>>> |\.\.\. "
copybutton_prompt_is_regexp = True

autosummary_generate = False
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 130
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True

# The inventories contain only names that this site mentions, so that it can be built without a network, with the same
# result everywhere. A missing name causes a warning; then add it.
INVENTORIES = Path(__file__).parent / "inventories"
intersphinx_mapping = {
    "python": ("https://docs.python.org/3/", str(INVENTORIES / "python.inv")),
    "numpy": ("https://numpy.org/doc/stable/", str(INVENTORIES / "numpy.inv")),
    "mpi4py": ("https://mpi4py.readthedocs.io/en/stable/", str(INVENTORIES / "mpi4py.inv")),
    "chainer": ("https://docs.chainer.org/en/v7.8.1/", str(INVENTORIES / "chainer.inv")),
    "cupy": ("https://docs.cupy.dev/en/stable/", str(INVENTORIES / "cupy.inv")),
}
nitpicky = True
OURS = (
    "chainermn",
    "mn_comm",
    "mn_compat",
    "mn_compress",
    "mn_elastic",
    "mn_guard",
    "mn_data",
    "mn_extensions",
    "mn_modelpar",
    "mn_optim",
    "mn_tools",
)


def resolve_where_public(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, content: nodes.TextElement
) -> nodes.Element | None:
    """Link a name of ours to the description of its object, under whichever name it is described.

    ``mn_data.scatter_dataset`` is described as ``chainermn.scatter_dataset``. An existing name without a description,
    such as a class that only appears as a type, becomes plain text.

    Args:
        app: The build.
        env: The environment with the documented names.
        node: The reference that was not found.
        content: Its displayed content.

    Returns:
        The link or the text, or `None` if there is no such name.
    """
    found = find(node.get("reftarget", "")) if node.get("refdomain") == "py" else None
    if found is None:
        return None
    for name, entry in env.get_domain("py").objects.items():  # type: ignore[attr-defined]
        if find(name) is found:
            return make_refnode(app.builder, node["refdoc"], entry.docname, entry.node_id, content)
    return content


def find(name: str) -> Any:
    """Return the object of ours that has a name, or `None`; of a name alone, the one that any module of ours has."""
    first, _, rest = name.partition(".")
    if not rest and first not in OURS:
        # These are imported only for type checkers, so Sphinx cannot determine their modules.
        ours = (module for key, module in sorted(sys.modules.items()) if key.partition(".")[0] in OURS)
        return next((vars(module)[name] for module in ours if name in vars(module)), None)
    return walk(name) if first in OURS else None


def walk(name: str) -> Any:
    """Return the object of a dotted name; a function rather than a module of the same name."""
    first, *rest = name.split(".")
    found: Any = import_module(first)
    path = first
    for part in rest:
        path = f"{path}.{part}"
        if not hasattr(found, part):
            try:
                import_module(path)
            except ImportError:
                return None
        found = getattr(found, part)
    return found


def setup(app: Sphinx) -> dict[str, Any]:
    """Called by Sphinx."""
    app.connect("missing-reference", resolve_where_public)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
