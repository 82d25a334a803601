"""The site: ``sphinx-build -W --keep-going docs OUT``. Every code cell is executed at every build."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from docutils import nodes

import krylov_descent

HERE = Path(__file__).parent

project = "krylov-descent"
author = "The krylov-descent authors"
copyright = author
version = release = krylov_descent.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
exclude_patterns = ["_static"]

# Fences without a language hold commands, formulas and transcripts.
highlight_language = "text"

# Not nitpicky: signatures name types of torch, whose inventory would have to come from the network, and protocols of
# this package that are not public. Links between pages are checked all the same.
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4

# Pages with {code-cell} run in a directory of their own, one thread, and fail the build by an error or a warning: what
# is written to standard error would show paths of the machine that built the site.
nb_execution_mode = "force"
nb_execution_in_temp = True
nb_execution_raise_on_error = True
nb_execution_show_tb = True
nb_execution_timeout = 240
nb_output_stderr = "warn"
nb_merge_streams = True
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["MATPLOTLIBRC"] = str(HERE / "_static" / "matplotlibrc")

# The frameworks of integrations are not needed to build the site.
autodoc_mock_imports = ["accelerate", "deepxde", "lightning", "pina", "skorch", "transformers"]
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True

copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
copybutton_exclude = ".linenos, .gp, .go"

html_theme = "furo"
html_title = "krylov-descent"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#0b5c8a", "color-brand-content": "#0b5c8a"},
    "dark_css_variables": {"color-brand-primary": "#6cb8e0", "color-brand-content": "#6cb8e0"},
}


def escape_bars(app: Any, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """|f| in a docstring is an absolute value, not a substitution of reStructuredText."""
    for i, line in enumerate(lines):
        if not line.lstrip().startswith((">>>", "...")):
            parts = line.split("``")
            parts[::2] = [part.replace("|", "\\|") for part in parts[::2]]
            lines[i] = "``".join(parts)


def strip_blocks(app: Any, doctree: nodes.document) -> None:
    """What is included up to a line ends with the blank ones before it."""
    for block in doctree.findall(nodes.literal_block):
        if len(block) == 1 and block.rawsource == block.astext():
            block.rawsource = block.rawsource.rstrip()
            block[0] = nodes.Text(block.rawsource)


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", escape_bars)
    app.connect("doctree-read", strip_blocks)
