"""Sphinx settings; `make docs` builds with warnings as errors."""

from importlib.metadata import version as installed_version

project = "lightning_hybrid"
version = release = installed_version("lightning-hybrid")
author = "the lightning_hybrid authors"
copyright = author

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = project

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3  # so that pages can link to each other's headings

autodoc_default_options = {"members": True, "member-order": "bysource", "show-inheritance": True}
autodoc_inherit_docstrings = False  # Lightning's own docstrings are documented there
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_custom_sections = ["Source"]
