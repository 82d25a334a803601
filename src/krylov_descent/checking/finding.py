"""What a check found, one row of a table each, and all of them together as text or JSON."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Status = Literal["ok", "warn", "fail"]

_NAME = 14  # columns of the text table
_STATUS = 6
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True)
class Finding:
    """One row of a check.

    Attributes:
        name: what was looked at.
        status: "ok"; "warn", which training survives; or "fail", which it does not.
        detail: what was found.
        remedy: what to do about it, if there is something to do.

    Example:
        >>> from krylov_descent import Finding
        >>> Finding("closure", "ok", "runs").status
        'ok'
    """

    name: str
    status: Status
    detail: str
    remedy: str = ""


@dataclass(frozen=True)
class CheckReport:
    """All that a check found; ``str(report)`` is a table.

    Attributes:
        findings: in the order in which they were looked for.
        line: the imports and the ``KSD(...)`` to paste.

    Example:
        >>> from krylov_descent import CheckReport, Finding
        >>> report = CheckReport((Finding("closure", "ok", "runs"),), "optimizer = KSD(model.parameters())")
        >>> report.ok
        True
    """

    findings: tuple[Finding, ...]
    line: str

    @property
    def ok(self) -> bool:
        """Whether nothing failed; warnings may remain."""
        return all(finding.status != "fail" for finding in self.findings)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return {"ok": self.ok, "findings": [asdict(finding) for finding in self.findings], "line": self.line}

    @property
    def verdict(self) -> str:
        """One sentence."""
        failed, warned = (sum(f.status == status for f in self.findings) for status in ("fail", "warn"))
        if failed:
            return f"{counted(failed, 'check')} failed. Remedy what failed, and check again."
        return f"Ready to train, with {counted(warned, 'warning')}." if warned else "Ready to train."

    def __str__(self) -> str:
        width = min(120, max(60, shutil.get_terminal_size((100, 24)).columns))
        return "\n".join([*(_row(finding, width) for finding in self.findings), "", self.verdict, "", self.line])


def _row(finding: Finding, width: int) -> str:
    status = finding.status if finding.status == "ok" else finding.status.upper()
    head = f"{status:<{_STATUS}}{finding.name:<{_NAME}}"
    lines = wrapped(finding.detail, width, head)
    if finding.remedy:
        lines += wrapped(finding.remedy, width, " " * (len(head) - 2) + "→ ")
    return "\n".join(lines)


def wrapped(text: str, width: int, head: str) -> list[str]:
    """Lines of text, the first behind ``head`` and the others below it; code and numbers stay whole."""
    return textwrap.wrap(
        text,
        width,
        initial_indent=head,
        subsequent_indent=" " * len(head),
        break_long_words=False,
        break_on_hyphens=False,
    )


def counted(n: int, noun: str) -> str:
    """So many of something.

    Example:
        >>> counted(1, "check"), counted(2, "check")
        ('1 check', '2 checks')
    """
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def listed(names: Sequence[str], most: int = 8) -> str:
    """Names in a row; of many, the first and their number.

    Example:
        >>> listed(["a", "b", "c"], most=2)
        'a, b, … (3 in all)'
    """
    if len(names) <= most:
        return ", ".join(names)
    return f"{', '.join(names[:most])}, … ({len(names)} in all)"


def bytes_in_words(n: float) -> str:
    """A number of bytes to read.

    Example:
        >>> bytes_in_words(3 * 2**20), bytes_in_words(1500)
        ('3.0 MiB', '1.5 KiB')
    """
    power = 0
    while n >= 1024 and power < len(_UNITS) - 1:
        n /= 1024
        power += 1
    return f"{n:.{min(power, 1)}f} {_UNITS[power]}"


def split_remedy(message: str) -> tuple[str, str]:
    """The package's errors begin with one sentence of what happened, and go on with what to do."""
    detail, stop, remedy = message.partition(". ")
    return detail + stop.strip(), remedy
