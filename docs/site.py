"""Takes the folder `examples/` into the site as it is, the notebook also as a page; read by MkDocs
(`hooks`)."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parent.parent / "examples"
_EXAMPLE = re.compile(r"\]\(\.\./examples/([\w.]+)\)")


def notebook_page(text: str, name: str) -> str:
    """A notebook's cells as Markdown, code in blocks."""
    cells = [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads(text)["cells"]]
    body = [source if kind == "markdown" else f"```python\n{source}\n```" for kind, source in cells]
    return "\n\n".join([*body, f"The notebook itself: [{name}]({name})."]) + "\n"


def on_files(files: Any, config: Any) -> Any:
    """Every example as a file to fetch, every notebook as a page beside it."""
    from mkdocs.structure.files import File

    for path in sorted(EXAMPLES.glob("*.*")):
        files.append(File.generated(config, f"examples/{path.name}", abs_src_path=str(path)))
        if path.suffix == ".ipynb":
            page = notebook_page(path.read_text(encoding="utf-8"), path.name)
            files.append(File.generated(config, f"examples/{path.stem}.md", content=page))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Links to examples lead to their copies in the site, those to notebooks to their pages."""
    return _EXAMPLE.sub(lambda found: f"](examples/{found[1].replace('.ipynb', '.md')})", markdown)
