"""Settings of the documentation, built by `sphinx-build -W -n -b html docs build/docs`."""

import pathlib
import sys

HERE = pathlib.Path(__file__).parent
for folder in (HERE / "_ext", HERE.parent / "launch", HERE.parent):
    sys.path.insert(0, str(folder))

project = "Libra-JAX"
author = "The Libra-JAX authors"
copyright = author
release = "0.1.0"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "generated"]
exclude_patterns = ["_ext", "_static"]

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3

# The warnings of -n are for our own pages, config fields and metrics. Python types of signatures have no page here.
nitpicky = True
nitpick_ignore_regex = [("py:.*", ".*")]
default_role = "code"
smartquotes = False  # would turn the two dashes of a flag into one
autodoc_default_options = {"members": True, "undoc-members": True, "member-order": "bysource"}
autodoc_typehints = "signature"
napoleon_use_ivar = True

html_theme = "furo"
html_title = "Libra-JAX"
html_static_path = ["_static"]
html_copy_source = False
html_show_sourcelink = False
