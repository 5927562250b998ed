"""README.md stays short and lists every page; links from page to page lead somewhere."""

import re
from pathlib import Path

from support.each import each
from support.source_tree import ROOT

PAGES = sorted((ROOT / "docs").glob("*.md"))
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]*))?\)")


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as they are made of their words."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_readme_is_short_and_lists_every_page() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(readme.splitlines()) <= 250
    assert [page.name for page in PAGES if f"](docs/{page.name})" not in readme] == []


@each("page", [*PAGES, *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "benchmarks/README.md"))], ids=str)
def test_links_lead_somewhere(page: Path) -> None:
    lost = []
    for target, anchor in LINK.findall(page.read_text(encoding="utf-8")):
        found = page.parent / target if target else page
        if not found.exists() or (anchor and found.suffix == ".md" and anchor not in anchors(found)):
            lost.append(f"{target}#{anchor}")
    assert lost == []
