"""Every link of the built site leads somewhere, down to the anchor: `python tools/check_site.py build/site`.

Only links within the site; what lies elsewhere is not asked for.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

NOT_PAGES = {"genindex.html", "search.html", "py-modindex.html"}


class Page(HTMLParser):
    """What a page points at, and what in it can be pointed at."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.ids.update(value for name in ("id", "name") if (value := given.get(name)))
        target = given.get("href") if tag == "a" else given.get("src") if tag in ("img", "script") else None
        if target:
            self.links.append(target)


def broken(site: Path) -> list[str]:
    """Links that lead nowhere, as "page: link"."""
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    found = []
    for path, page in pages.items():
        if path.name in NOT_PAGES:
            continue
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            at = f"{path.relative_to(site)}: {link}"
            if not target.exists():
                found.append(at)
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].ids:
                found.append(at)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("site", type=Path, help="the folder that the site was built into")
    site = parser.parse_args(arguments).site.resolve()
    if not site.is_dir():
        parser.error(f"site: got {site}, want a folder that is there")
    found = broken(site)
    print("\n".join(found) or f"every link of {len(list(site.rglob('*.html')))} pages leads somewhere")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
