"""Writes the address of the project's repository where it has to stand:
`python docs/address.py https://github.com/OWNER/NAME`.

The setting is `urls.Repository` in pyproject.toml. From there the package's metadata and page, and
the cards of exported models, have it by themselves. README, CITATION.cff, mkdocs.yml and the
notebook are files that others read as they are, so this script writes it into them; a test holds
them equal."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent


def address_of(root: Path) -> str:
    """Returns the address that pyproject.toml has, "" if it has none."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return project.get("urls", {}).get("Repository", "")


def with_address(texts: dict[str, str], address: str) -> dict[str, str]:
    """Returns the texts (file -> text) with this address in place of the one that they have, if
    any; "" removes it. ValueError if it is no address of a repository."""
    if address and not re.fullmatch(r"https://[\w.-]+/[\w.-]+/[\w.-]*[\w-]", address):
        raise ValueError(f"{address!r} is not of the form https://github.com/OWNER/NAME")
    # file -> (what is there now, what stands there with an address, what without)
    places = {
        "pyproject.toml": (
            r"(?:\[project\.urls\]\n(?:.+\n)*\n)?\[project\.scripts\]",
            f'[project.urls]\nRepository = "{address}"\nIssues = "{address}/issues"\n'
            f'Changelog = "{address}/blob/main/CHANGELOG.md"\n\n'
            "[project.scripts]",
            "[project.scripts]",
        ),
        "CITATION.cff": (
            r"(?<=title: Shoal\n)(?:repository-code: .+\n)?",
            f'repository-code: "{address}"\n',
            "",
        ),
        "mkdocs.yml": (
            r"(?<=site_name: Shoal\n)(?:repo_url: .+\n)?",
            f"repo_url: {address}\n",
            "",
        ),
        "README.md": (
            r"(?<=^Clone this repository)(?: \(`git clone .+?`\))?(?=\.)",
            f" (`git clone {address}`)",
            "",
        ),
        "examples/gsm8k_one_gpu.ipynb": (
            r'(?<="ADDRESS = \\")[^"\\]*(?=\\")',
            address,
            "",
        ),
    }
    changed = {}
    for name, (pattern, present, absent) in places.items():
        replacement = present if address else absent
        text, number = re.subn(
            pattern, replacement.replace("\\", r"\\"), texts[name], flags=re.MULTILINE
        )
        if number != 1:
            raise ValueError(f"{name} has {number} places for the address, not one")
        changed[name] = text
    return changed


def read(root: Path) -> dict[str, str]:
    """Returns the texts of the files that have the address: file -> text."""
    names = (
        "pyproject.toml",
        "CITATION.cff",
        "mkdocs.yml",
        "README.md",
        "examples/gsm8k_one_gpu.ipynb",
    )
    return {name: (root / name).read_text(encoding="utf-8") for name in names}


def main(words: list[str], root: Path = ROOT) -> str:
    """Writes the address that `words` has; without one returns the present one, as text."""
    if not words:
        return address_of(root) or "no address yet"
    try:
        changed = with_address(read(root), words[0])
    except ValueError as error:
        return f"error: {error}"
    for name, text in changed.items():
        (root / name).write_text(text, encoding="utf-8")
    return f"{', '.join(changed)}: {words[0] or 'no address'}"


if __name__ == "__main__":
    said = main(sys.argv[1:])
    print(said)
    sys.exit(said.startswith("error: "))
