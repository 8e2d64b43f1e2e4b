"""How the documentation is built: ``make docs``, with every warning and every dead reference an error."""

import sys
from importlib.metadata import version as installed_version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import generate

project = "gradbatch"
author = "the gradbatch developers"
copyright = f"2026, {author}"
release = version = installed_version("gradbatch")

extensions = [
    "sphinx.ext.autodoc",  # the reference is written in the code
    "sphinx.ext.napoleon",  # Args:, Returns:, Raises: read as prose in the code and as tables here
    "sphinx.ext.mathjax",  # formulas
    "sphinx.ext.viewcode",  # from a name to its source
    "myst_parser",  # pages in Markdown
]
exclude_patterns = ["_build"]
myst_enable_extensions = ["deflist", "dollarmath"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
napoleon_google_docstring, napoleon_numpy_docstring = True, False
napoleon_custom_sections = ["Edge cases"]

# The build needs no network and so reads no inventory of torch or Python: only our own names are checked.
# Type variables are names of the module they stand in, but nothing that a reader could look up.
nitpick_ignore_regex = [(r"py:.*", r"(?!gradbatch\b).*"), (r"py:.*", r"gradbatch\..*\.(_\w+|Self|Model)")]

html_theme = "furo"
html_title = "gradbatch"

generate.write(Path(__file__).parent)  # before Sphinx looks for pages
