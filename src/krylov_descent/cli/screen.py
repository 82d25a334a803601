"""What the command line shows: results on standard output, complaints on standard error."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from krylov_descent.checking.finding import CheckReport, Finding

_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def say(text: str, style: str = "") -> None:
    """One line or paragraph; long lines are left to the terminal, so that they can be copied."""
    write = Console(soft_wrap=True, highlight=False).print
    write(Text(text, style=style))


def complain(what: str, remedy: str = "") -> None:
    """What went wrong, and what to do."""
    write = Console(stderr=True, soft_wrap=True, highlight=False).print
    write(Text.assemble(("Error: ", "bold red"), what))
    if remedy:
        write(Text.assemble(("→ ", "bold"), remedy))


def show(report: CheckReport) -> None:
    """A check as a table, and the line to paste below it."""
    table = Table(box=None, padding=(0, 1), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for finding in report.findings:
        table.add_row(Text(finding.status, style=_STYLES[finding.status]), finding.name, _told(finding))
    write = Console(highlight=False).print
    write(table)
    say("")
    say(report.verdict, "green" if report.ok else "bold red")
    say("")
    say(report.line, "cyan" if report.ok else "dim")


def _told(finding: Finding) -> Text:
    text = Text(finding.detail)
    if finding.remedy:
        text.append("\n→ ", style="bold")
        text.append(finding.remedy, style="italic")
    return text
