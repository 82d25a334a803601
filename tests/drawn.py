"""The words of figures, which a PNG does not have as text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def words(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[str]]:
    """The lines of text of every figure that a study saves from now on, by the name of its file."""
    from experiments.common import figures
    from matplotlib.text import Text

    found: dict[str, set[str]] = {}
    save = figures.save

    def recording(drawn: Figure | None, stem: Path) -> list[Path]:
        paths: list[Path] = save(drawn, stem)
        if drawn is not None:
            texts = [text.get_text() for text in drawn.findobj(Text) if isinstance(text, Text)]
            found[paths[0].name] = {line for text in texts for line in text.splitlines()}
        return paths

    monkeypatch.setattr(figures, "save", recording)
    return found
