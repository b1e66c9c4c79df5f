"""What MkDocs shows besides docs/: the README, CONTRIBUTING, the results of benchmarks/, and the API reference, a page a room."""

import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "tba_jax"
# Files outside of docs/, as pages of docs/ link to them -> their pages.
OUTSIDE = {
    "../README.md": "readme.md",
    "../benchmarks/RESULTS.md": "results.md",
    "../.github/CONTRIBUTING.md": "contributing.md",
}
# How these files link to pages -> how their own pages do.
LINKS = {
    "](docs/": "](",
    "](../docs/": "](",
    "](benchmarks/RESULTS.md": "](results.md",
    "](.github/CONTRIBUTING.md": "](contributing.md",
}


def rooms() -> list[str]:
    return sorted(folder.name for folder in PACKAGE.iterdir() if (folder / "__init__.py").is_file())


def on_config(config: Any) -> None:
    """Adds the API reference to the navigation."""
    config.nav.append({"API": [{"tba_jax": "api/tba_jax.md"}, *({room: f"api/{room}.md"} for room in rooms())]})


def on_files(files: Files, config: Any) -> None:
    """Adds the pages that are no files of docs/."""
    for link, page in OUTSIDE.items():
        text = (ROOT / link.removeprefix("../")).read_text()
        for there, here in LINKS.items():
            text = text.replace(there, here)
        files.append(File.generated(config, page, content=text))
    for room in rooms():
        files.append(File.generated(config, f"api/{room}.md", content=f"# {room}\n\n::: tba_jax.{room}\n"))
    beside = sorted(path.stem for path in PACKAGE.glob("[!_]*.py"))
    blocks = "".join(f"::: tba_jax.{module}\n\n" for module in beside)
    files.append(File.generated(config, "api/tba_jax.md", content=f"# tba_jax\n\n{blocks}"))


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Points links to files outside of docs/ at their pages."""
    for link, page in OUTSIDE.items():
        markdown = markdown.replace(f"]({link}", f"]({page}")
    return markdown


class OptionalArguments(griffe.Extension):
    """Keeps `[--step=N] [--output=FILE]` of a docstring from being read as a link in Markdown."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"\](\s*)\[", r"]\1\\[", obj.docstring.value)
