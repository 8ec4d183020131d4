"""The package as others get it: its metadata, its page on an index, and the project's address,
which is one setting."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import yaml
from hatchling.metadata.core import ProjectMetadata
from hatchling.plugin.manager import PluginManager
from scripts import load

from shoal.runs import card

ROOT = Path(__file__).parent.parent
ADDRESS = "https://github.com/somebody/shoal"
address = load("docs/address.py")


def copy_of_the_repository(folder: Path) -> Path:
    (folder / "examples").mkdir()
    for name in (*address.read(ROOT), "hatch_build.py", "LICENSE"):
        shutil.copy(ROOT / name, folder / name)
    return folder


def metadata_of(root: Path) -> ProjectMetadata:
    return ProjectMetadata(str(root), PluginManager())


def test_each_extra_is_on_the_page_that_tells_how_to_install():
    page = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    (rows,) = re.findall(r"^\| extra \|.*\n\| --- .*\n((?:\|.*\n)+)", page, re.MULTILINE)
    told = set()
    for row in rows.splitlines():
        told |= set(re.findall(r"`([\w]+)`", row.split("|")[1]))
    assert told == set(metadata_of(ROOT).core.optional_dependencies)


def test_files_that_have_the_address_have_the_one_of_the_setting():
    texts = address.read(ROOT)
    assert address.with_address(texts, address.address_of(ROOT)) == texts


def test_the_address_is_one_setting(tmp_path):
    root = copy_of_the_repository(tmp_path)
    before = address.read(root)
    assert address.address_of(root) == "" and metadata_of(root).core.urls == {}
    for url in ("https://codeberg.org/first/name", ADDRESS):  # another one replaces it
        assert address.main([url], root).endswith(f": {url}")
        assert address.main([], root) == url
        texts = address.read(root)
        assert f"Clone this repository (`git clone {url}`). In it" in texts["README.md"]
        assert len(texts["README.md"].splitlines()) <= 140
        assert yaml.safe_load(texts["CITATION.cff"])["repository-code"] == url
        assert f"\nrepo_url: {url}\n" in texts["mkdocs.yml"]
        notebook = json.loads(texts["examples/gsm8k_one_gpu.ipynb"])
        assert f'\nADDRESS = "{url}"  # of' in "".join(notebook["cells"][1]["source"])
        assert metadata_of(root).core.urls == {
            "Repository": url,
            "Issues": f"{url}/issues",
            "Changelog": f"{url}/blob/main/CHANGELOG.md",
        }
    assert address.main([""], root).endswith("no address") and address.read(root) == before


@pytest.mark.parametrize("url", ["github.com/a/b", "https://github.com/a", f"{ADDRESS}/", "a b"])
def test_what_is_no_address_is_refused(tmp_path, url):
    root = copy_of_the_repository(tmp_path)
    said = address.main([url], root)
    assert said == f"error: {url!r} is not of the form https://github.com/OWNER/NAME"
    assert address.read(root) == address.read(ROOT)


def test_links_and_pictures_lead_somewhere_on_a_package_page(tmp_path):
    """An index shows the README alone: a path would lead to a page of the index."""
    root = copy_of_the_repository(tmp_path)
    address.main([ADDRESS], root)
    core = metadata_of(root).core
    page, tag = core.readme, f"v{core.version}"
    assert core.readme_content_type == "text/markdown"
    pictures = re.findall(r'(?:src|srcset)="([^"]+)"', page)
    links = re.findall(r"\]\(([^)\s]+)\)", page)
    assert len(pictures) >= 5 and len(links) >= 30
    for target in (*pictures, *links):
        is_picture = target.endswith((".svg", ".png"))
        kind = "raw" if is_picture else "blob"
        found = re.fullmatch(f"{ADDRESS}/(?:actions/.+|{kind}/{tag}/([^#]+)(?:#.+)?)", target)
        assert found, target
        assert found[1] is None or (ROOT / found[1]).exists(), target
    # what is no link stays
    code = r"^```.*?^```$"
    readme = (root / "README.md").read_text(encoding="utf-8")
    flags = re.MULTILINE | re.DOTALL
    assert re.findall(code, page, flags) == re.findall(code, readme, flags)


def test_the_card_of_a_model_links_to_the_address_that_the_package_knows(monkeypatch):
    class Metadata:
        def __init__(self, urls: list[str] | None) -> None:
            self.urls = urls

        def get_all(self, name: str) -> list[str] | None:
            assert name == "Project-URL"
            return self.urls

    for urls, text in (
        (None, "Shoal"),
        ([f"Issues, {ADDRESS}/issues", f"Repository, {ADDRESS}"], f"[Shoal]({ADDRESS})"),
    ):
        monkeypatch.setattr(card, "metadata", lambda name, urls=urls: Metadata(urls))
        assert card._shoal() == text


# ---- a release

release = load(".ci/release.py")


def test_a_release_says_what_is_left_to_do_and_then_what_is_new(tmp_path, capsys):
    root = copy_of_the_repository(tmp_path)
    changelog = root / "CHANGELOG.md"
    version = metadata_of(ROOT).core.version
    changelog.write_text(f"# Changelog\n\n## {version} (not released yet)\n\nNew.\n\n## Old\n")
    faults = release.faults_of(root, "v9.9.9")
    assert faults[0] == f"the tag v9.9.9 is not v{version}, the version in pyproject.toml"
    assert faults[1].startswith(
        f"CHANGELOG.md has '## {version} (not released yet)': write the day"
    )
    assert faults[2].startswith("pyproject.toml has no urls.Repository") and len(faults) == 3
    address.main([ADDRESS], root)
    (root / "CITATION.cff").write_text("version: 0.0.1\n")
    changelog.write_text("# Changelog\n")
    assert release.main([f"v{version}"], root) == 1
    assert capsys.readouterr().err.splitlines() == [
        f"error: CHANGELOG.md has no section '## {version} (DATE)', or an empty one",
        f"error: CITATION.cff is of another version than {version}",
    ]
    shutil.copy(ROOT / "CITATION.cff", root)
    changelog.write_text(f"## {version} (2027-01-31)\n\nNew\n### more\n\n## 0.0.1\n\nOld\n")
    assert release.main([f"v{version}"], root) == 0
    assert capsys.readouterr().out == "New\n### more\n"
    assert release.main([], root) == 2


def test_the_first_release_has_a_section_that_people_can_read():
    version = metadata_of(ROOT).core.version
    state, text = release.section_of((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), version)
    assert state and 10 <= len(text.splitlines()) <= 60
