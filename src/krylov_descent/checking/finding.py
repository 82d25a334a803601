"""The findings of a check, the methods of its trial, and their report as text or JSON."""

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
        name: the subject of the check.
        status: "ok"; "warn", with which training works; or "fail", with which it does not.
        detail: the result.
        remedy: the remedy, if one is needed.

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
class TrialRow:
    """One method of a trial.

    Attributes:
        name, line: the method, and the lines to paste for it.
        seconds, steps: the processor seconds that it ran, and the steps that it took.
        loss_before, loss_after: the losses at its start and end; the latter NaN if it raised or was not finite.
        curve: seconds and losses, from the start to the end.
        note: the error that it raised, or "".
    """

    name: str
    line: str
    seconds: float
    steps: int
    loss_before: float
    loss_after: float
    curve: tuple[tuple[float, float], ...]
    note: str = ""


@dataclass(frozen=True)
class CheckReport:
    """All findings of a check; ``str(report)`` is a table.

    Attributes:
        findings: the findings, in the order of the checks.
        line: the imports and the optimizer to paste.
        trial: the methods that were tried, those with the fewest settings first; empty without a trial.

    Example:
        >>> from krylov_descent import CheckReport, Finding
        >>> report = CheckReport((Finding("closure", "ok", "runs"),), "optimizer = KSD(model.parameters())")
        >>> report.ok
        True
    """

    findings: tuple[Finding, ...]
    line: str
    trial: tuple[TrialRow, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing failed; warnings may remain."""
        return all(finding.status != "fail" for finding in self.findings)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON."""
        findings = [asdict(finding) for finding in self.findings]
        trial = [{k: None if x != x else x for k, x in asdict(row).items()} for row in self.trial]
        return {"ok": self.ok, "findings": findings, "line": self.line, "trial": trial}

    @property
    def verdict(self) -> str:
        """The verdict in one sentence."""
        failed, warned = (sum(f.status == status for f in self.findings) for status in ("fail", "warn"))
        if failed:
            return f"{counted(failed, 'check')} failed. Remedy what failed, and check again."
        return f"Ready to train, with {counted(warned, 'warning')}." if warned else "Ready to train."

    def __str__(self) -> str:
        width = min(120, max(60, shutil.get_terminal_size((100, 24)).columns))
        rows = [_row(finding, width) for finding in self.findings]
        if self.trial:
            rows += ["", f"  {'trial':<22}{'steps':>9}{'loss':>11}"]
        for row in self.trial:
            loss = "—" if row.loss_after != row.loss_after else f"{row.loss_after:.3g}"
            text = f"{row.name:<22}{row.steps:>9,}{loss:>11}  {row.note}"
            rows.append(f"{'→' if row.line == self.line else ' '} {text}"[:width].rstrip())
        return "\n".join([*rows, "", self.verdict, "", self.line])


def _row(finding: Finding, width: int) -> str:
    status = finding.status if finding.status == "ok" else finding.status.upper()
    head = f"{status:<{_STATUS}}{finding.name:<{_NAME}}"
    lines = _wrapped(finding.detail, width, head)
    if finding.remedy:
        lines += _wrapped(finding.remedy, width, " " * (len(head) - 2) + "→ ")
    return "\n".join(lines)


def _wrapped(text: str, width: int, head: str) -> list[str]:
    """Return wrapped lines, the first after ``head`` and the others indented; code and numbers stay whole."""
    wrapper = textwrap.TextWrapper(width, break_long_words=False, break_on_hyphens=False)
    wrapper.initial_indent, wrapper.subsequent_indent = head, " " * len(head)
    return wrapper.wrap(text)


def counted(n: int, noun: str) -> str:
    """Return a number with its noun: 1 check, 2 checks."""
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def listed(names: Sequence[str], most: int = 8) -> str:
    """Return the names in a row, or the first ``most`` and the number of all."""
    if len(names) <= most:
        return ", ".join(names)
    return f"{', '.join(names[:most])}, … ({len(names)} in all)"


def bytes_in_words(n: float) -> str:
    """Return bytes in a readable unit: 1.5 KiB, 3.0 MiB."""
    power = 0
    while n >= 1024 and power < len(_UNITS) - 1:
        n /= 1024
        power += 1
    return f"{n:.{min(power, 1)}f} {_UNITS[power]}"


def split_remedy(message: str) -> tuple[str, str]:
    """Split an error message of this package into its first sentence and the remedy."""
    detail, stop, remedy = message.partition(". ")
    return detail + stop.strip(), remedy
