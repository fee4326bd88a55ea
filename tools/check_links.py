"""Checks that the files and headings exist to which our Markdown files link.

Reads every *.md at the top, in docs/ and one folder below the top. Links to other sites are not
followed.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(<?([^)\s>]+)>?(?: \"[^\"]*\")?\)|^\[[^\]]+\]: (\S+)", re.MULTILINE)
HEADING = re.compile(r"^#+ +(.+?) *#*$", re.MULTILINE)


def anchors(text: str) -> set[str]:
    """Returns the anchors that GitHub gives to the headings of a page."""
    seen: dict[str, int] = {}
    result = set()
    for heading in HEADING.findall(FENCE.sub("", text)):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        count = seen.get(slug, 0)
        seen[slug] = count + 1
        result.add(f"{slug}-{count}" if count else slug)
    return result


def broken_links(page: Path, root: Path) -> Iterator[str]:
    text = re.sub(r"`[^`\n]*`", "", FENCE.sub("", page.read_text()))
    for match in LINK.finditer(text):
        link = match[1] or match[2]
        if re.match(r"[a-z][a-z+.-]*:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.is_relative_to(root):
            yield f"{link} leads out of the repository"
        elif not target.exists():
            yield f"{link} does not exist"
        elif anchor and target.suffix == ".md" and anchor not in anchors(target.read_text()):
            yield f"{link}: {target.name} has no such heading"


def main(root: Path = ROOT) -> int:
    pages = sorted({*root.glob("*.md"), *root.glob("[a-z]*/*.md"), *root.glob("docs/**/*.md")})
    problems = [f"{p.relative_to(root)}: {why}" for p in pages for why in broken_links(p, root)]
    print(*problems, f"{len(pages)} pages, {len(problems)} broken links", sep="\n")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
