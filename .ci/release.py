"""Checks that a tag may be released, and prints what CHANGELOG.md says of the version:
`python .ci/release.py v0.1.0`. The version is the one of pyproject.toml."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path


def section_of(changelog: str, version: str) -> tuple[str, str]:
    """Returns (what stands in parentheses behind the version's heading, the text below it);
    ("", "") if there is no such heading."""
    heading = rf"^## {re.escape(version)}(?: \(([^)\n]*)\))?$"
    found = re.search(heading + r"\n(.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL)
    return (found[1] or "", found[2].strip()) if found else ("", "")


def faults_of(root: Path, tag: str) -> list[str]:
    """Returns what has to be done before the tag may be released, a sentence each; [] if there is
    nothing."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    version = project["version"]
    date, text = section_of((root / "CHANGELOG.md").read_text(encoding="utf-8"), version)
    faults = []
    if tag != f"v{version}":
        faults.append(f"the tag {tag} is not v{version}, the version in pyproject.toml")
    if not text:
        faults.append(f"CHANGELOG.md has no section '## {version} (DATE)', or an empty one")
    elif not re.fullmatch(r"\d{4}-\d\d-\d\d", date):
        faults.append(
            f"CHANGELOG.md has '## {version} ({date})': write the day of the release, "
            f"'## {version} (2027-01-31)'"
        )
    cited = re.search(
        r"^version: (.+)$", (root / "CITATION.cff").read_text(encoding="utf-8"), re.MULTILINE
    )
    if cited is None or cited[1] != version:
        faults.append(f"CITATION.cff is of another version than {version}")
    if not project.get("urls", {}).get("Repository"):
        faults.append(
            "pyproject.toml has no urls.Repository, so the links of the package's page would lead "
            "nowhere: python docs/address.py https://github.com/OWNER/NAME"
        )
    return faults


def main(words: list[str], root: Path = Path(__file__).parent.parent) -> int:
    """Prints the section of CHANGELOG.md, or the faults on stderr. Returns the exit status."""
    if len(words) != 1:
        print("one argument: the tag, as v0.1.0", file=sys.stderr)
        return 2
    faults = faults_of(root, words[0])
    for fault in faults:
        print(f"error: {fault}", file=sys.stderr)
    if not faults:
        print(
            section_of(
                (root / "CHANGELOG.md").read_text(encoding="utf-8"), words[0].removeprefix("v")
            )[1]
        )
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
