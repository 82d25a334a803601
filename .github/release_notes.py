"""Print the changelog section of a release, after checking that its tag, versions and dates agree.

Usage: python .github/release_notes.py v0.2.0
"""

from __future__ import annotations

import re
import sys
from pathlib import Path


def notes(root: Path, tag: str) -> str:
    """Return the section of CHANGELOG.md for a tag such as v0.2.0.

    Raises:
        ValueError: the tag, the package, the citation and the changelog disagree.
    """
    source = (root / "src/krylov_descent/__init__.py").read_text(encoding="utf-8")
    version = "".join(re.findall(r'^__version__ = "(.*)"$', source, re.MULTILINE))
    if tag != f"v{version}":
        raise ValueError(f"The tag is {tag}, and the version is {version}. Tag v{version}, or set __version__.")
    changelog = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    title = rf"^## \[{re.escape(version)}\] - (\d{{4}}-\d\d-\d\d)$"
    found = re.search(rf"{title}\n(.*?)(?=^## |^\[|\Z)", changelog, re.MULTILINE | re.DOTALL)
    if not found or not found[2].strip():
        raise ValueError(f"CHANGELOG.md has no section '## [{version}] - YYYY-MM-DD' with changes. Write it.")
    citation = (root / "CITATION.cff").read_text(encoding="utf-8")
    for line in (f"version: {version}", f"date-released: {found[1]}"):
        if line not in citation.splitlines():
            raise ValueError(f"CITATION.cff has no line '{line}', as CHANGELOG.md has it. Add it.")
    return found[2].strip() + "\n"


if __name__ == "__main__":
    try:
        sys.stdout.write(notes(Path(__file__).parent.parent, sys.argv[1]))
    except ValueError as error:
        sys.exit(str(error))
