"""What people see: progress and tables on stderr; one JSON object on stdout with ``--json``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn
from rich.progress import Progress as Bars
from rich.table import Table

from neaptide import jsonfile


class Progress:
    """Bars on a terminal, plain lines otherwise; NO_COLOR is rich's to honour."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True, highlight=False, soft_wrap=True)

    def note(self, text: str) -> None:
        """A line as it is: no markup, no emoji codes, tabs kept."""
        self.console.file.write(text + "\n")
        self.console.file.flush()

    @contextmanager
    def bar(self, name: str, total: int | None) -> Iterator[Callable[[int], None]]:
        """A download bar; yields the function that advances it by bytes."""
        if not self.console.is_terminal:
            size = f" ({total / 2**20:.1f} MiB)" if total else ""
            self.note(f"fetching {name}{size}")
            yield lambda done: None
            return
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        with Bars(*columns, console=self.console, transient=True) as bars:
            task = bars.add_task(name, total=total)
            yield lambda done: bars.advance(task, done)

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """A table; on a pipe, tab-separated lines."""
        if not self.console.is_terminal:
            for row in rows:
                self.note("\t".join(row))
            return
        table = Table(title=title, title_justify="left", show_edge=False)
        for column in columns:
            table.add_column(column, overflow="fold")
        for row in rows:
            table.add_row(*row)
        self.console.print(table)


def print_json(value: dict[str, Any]) -> None:
    """One object on stdout, with ``schema_version`` and sorted keys."""
    sys.stdout.buffer.write(jsonfile.encode({"schema_version": 1, **value}))
    sys.stdout.buffer.flush()
