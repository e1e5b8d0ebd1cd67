"""Sphinx's settings for `make docs-site`: the Markdown of the repository as it lies, read by MyST, shown by Furo.

The pages are those that people read in the repository; links between them stay as they are written. What stands in the
navigation, and in which order, is NAVIGATION, below, and nowhere else. Nothing is loaded from another host.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
NAVIGATION = {
    "Start": [
        "docs/start/install",
        "docs/guide/core",
        "docs/guide/serving",
        "docs/guide/launch",
        "docs/guide/cluster",
        "docs/guide/dashboard",
        "docs/guide/observe",
    ],
    "Systems": ["docs/guide/kv", "docs/guide/rollouts", "docs/guide/moe"],
    "Engines": ["docs/guide/vllm", "docs/guide/nixl", "docs/guide/ray"],
    "Schedulers": ["docs/guide/launch_ray", "docs/guide/launch_kubernetes"],
    "Machines": ["docs/guide/rails", "docs/guide/machine", "docs/guide/real_nics"],
    "Programs": ["docs/guide/blocking", "docs/guide/channels", "docs/guide/errors", "docs/guide/testing"],
    "Explain": ["docs/explain/architecture", "docs/explain/measurements", "docs/explain/*"],
    "Reference": ["docs/reference/index", "docs/reference/*", "docs/glossary"],
    "Project": ["CONTRIBUTING", "CHANGELOG", "docs/index", "native/*", "services/**", "tests/**"],
}
"""Heading -> pages; a star takes what is left of a folder. A page of docs/ that stands in none is an error."""

project = "asyncfabric"
author = "The asyncfabric authors"
release = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
extensions = ["myst_parser"]
root_doc = "README"
include_patterns = ["*.md", "docs/**.md", "native/*.md", "services/**.md", "tests/**.md"]
exclude_patterns = ["build", ".venv"]

myst_enable_extensions = ["tasklist"]
myst_heading_anchors = 4
myst_links_external_new_tab = False
suppress_warnings = ["myst.header"]  # the reference nests by what belongs together

html_theme = "furo"
html_title = f"asyncfabric {release}"
html_extra_path = ["index.html"]  # the way in
html_copy_source = False
html_show_sphinx = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#2c5f9e", "color-brand-content": "#2c5f9e"},
    "dark_css_variables": {"color-brand-primary": "#8ab6ea", "color-brand-content": "#8ab6ea"},
}
html_static_path = ["site.css"]
html_css_files = ["site.css"]
pygments_style = "default"
pygments_dark_style = "github-dark"


def navigation() -> str:
    """Return the trees of the home page's end, which the side bar shows."""
    return "".join(
        f"\n\n```{{toctree}}\n:hidden:\n:glob:\n:caption: {heading}\n\n"
        + "\n".join(f"/{page}" for page in pages)
        + "\n```\n"
        for heading, pages in NAVIGATION.items()
    )


def read_source(_: Any, page: str, source: list[str]) -> None:
    """Add the navigation to the home page, where the repository's own readers do not see it."""
    if page == root_doc:
        source[0] += navigation()


def setup(app: Any) -> None:
    """Register with Sphinx."""
    app.connect("source-read", read_source)
