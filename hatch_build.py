"""Makes the README a page of a package index when the package is built: its links and pictures are
addresses there, of the files of this version."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_MARKDOWN_TARGET = re.compile(r"(?<=\]\()[^)\s]+(?=\))")
_HTML_TARGET = re.compile(r'(?<=src=")[^"]+(?=")|(?<=srcset=")[^"]+(?=")')
_PICTURES = (".svg", ".png")


class PackagePage(MetadataHookInterface):
    """The hook that pyproject.toml names: sets the field `readme`."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Adds the page to `metadata`, the table `project` of pyproject.toml. While that has no
        `urls.Repository`, links stay as they are in the repository."""
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        address = metadata.get("urls", {}).get("Repository", "")
        if address:
            text = package_page(text, address, f"v{metadata['version']}")
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def package_page(readme: str, address: str, tag: str) -> str:
    """Returns the README with addresses in place of paths. `address`: of the repository, as GitHub
    has it; `tag`: of the version that is built. Code blocks stay as they are."""

    def absolute(found: re.Match[str]) -> str:
        target = found[0]
        if target.startswith(("https://", "http://", "#", "mailto:")):
            return target
        if target.startswith("../../"):  # a page of the repository beside its files
            return f"{address}/{target.removeprefix('../../')}"
        kind = "raw" if target.endswith(_PICTURES) else "blob"
        return f"{address}/{kind}/{tag}/{target}"

    parts = re.split(r"(^```.*?^```$)", readme, flags=re.MULTILINE | re.DOTALL)
    for number in range(0, len(parts), 2):  # the odd ones are code blocks
        text = _MARKDOWN_TARGET.sub(absolute, parts[number])
        parts[number] = _HTML_TARGET.sub(absolute, text)
    return "".join(parts)
