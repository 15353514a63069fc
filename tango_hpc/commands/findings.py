"""The findings of `tango doctor`: one line for each check, and the way out below."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rich.console import Console

from tango_hpc.base.formats import say


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    level: Literal["ok", "warn", "fail"]
    text: str
    remedy: str = ""


def show(finding: Finding, console: Console) -> None:
    """Print a finding."""
    mark = {"ok": "[green]ok  [/]", "warn": "[yellow]note[/]", "fail": "[red]FAIL[/]"}[finding.level]
    console.print(f"  {mark} ", end="")
    say(console, finding.text)
    if finding.remedy:
        say(console, f"       → {finding.remedy}")
