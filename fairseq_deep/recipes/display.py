"""Progress of stages, training runs and downloads: bars on a terminal, periodic lines elsewhere.

The cursor is never hidden, so a killed command leaves the terminal usable. rich draws only when called, since a drawing
thread could hold a lock while a worker process is forked.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from types import SimpleNamespace
from typing import IO, Any

RICH = importlib.util.find_spec("rich") is not None
"""Whether rich is installed; distill works without it, and then names neither speed nor time left."""

DRAW, WINDOW = 0.5, 600
"""Seconds between updates of the bars, and of the mean speed that gives the time left."""


def clock(seconds: float) -> str:
    """Format a duration in seconds."""
    seconds = max(0, int(seconds))
    if seconds >= 3600:
        return f"{seconds // 3600} h {seconds % 3600 // 60:02} min"
    return f"{seconds // 60} min {seconds % 60:02} s"


def _make_bars(screen: Any, drawn: bool) -> Any:
    """Return rich's bars on *screen*; if they are not *drawn*, they only compute speeds."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn
    from rich.table import Column

    console = Console(file=screen, force_terminal=drawn, force_interactive=drawn)
    console.show_cursor = lambda show=True: False
    rest = Column(ratio=1, no_wrap=True, overflow="ellipsis")
    sizes = {"  {task.description}": Column(min_width=24), "{task.fields[count]}": None,
             "{task.fields[note]}": rest, "{task.fields[left]}": None}  # fmt: skip
    columns = [TextColumn(words, markup=False, table_column=size) for words, size in sizes.items()]
    columns.insert(1, BarColumn(20 if console.width >= 100 else 8))  # at 80 columns, the time left must fit
    return Progress(*columns, console=console, expand=True, auto_refresh=False, redirect_stdout=False,
                    redirect_stderr=False, get_time=lambda: time.time(), speed_estimate_period=WINDOW,
                    disable=not drawn)  # fmt: skip


class Display:
    """Progress bars with common columns: name, bar, done of total, speed or loss, time left.

    Args:
        every: interval of lines without bars, in seconds
        out: stream of lines, which has no bars; None: standard output, with bars on a terminal

    Attributes:
        drawn: whether there are bars
        due: time of the next line or drawing
    """

    def __init__(self, every: float = 10, out: IO[str] | None = None) -> None:
        screen = getattr(sys.stdout, "screen", sys.stdout)
        able = RICH and os.environ.get("TERM", "") not in ("", "dumb", "unknown")
        self.drawn, self.out, self.said = out is None and screen.isatty() and able, out, ""
        self.bars, self.tasks = _make_bars(screen, self.drawn) if RICH else None, dict[str, Any]()
        self.every, self.begun = DRAW if self.drawn else every, time.time()
        self.due = 0 if self.drawn else self.begun + every

    def __enter__(self) -> Display:
        return self

    def __exit__(self, *_: Any) -> None:
        if self.bars:
            self.bars.stop()  # the bars remain above later output

    def is_due(self) -> bool:
        """Return whether :meth:`show` would draw or print."""
        return time.time() >= self.due

    def show(self, name: str, done: float = 0, total: float | None = None, unit: str = "", note: str = "") -> None:
        """Update the bar *name*, or print a line if one is due and differs from the last one.

        Args:
            unit: unit of *done* and *total*; if empty, the elapsed time is shown
            note: speed or loss; if empty, the mean speed if it is not rounded to 0
        """
        task = self._update(name, done, total or None, unit)
        elapsed = clock(time.time() - self.begun)
        if not note and (task.speed or 0) >= 0.5:
            note = f"{task.speed:,.0f} {unit}/s"
        left = f"left {clock(task.time_remaining)}" if task.time_remaining else ""
        count = f"{done:,.9g}{f' of {total:,.9g}' if total else ''} {unit}" if unit else ""
        if self.drawn:
            self.bars.update(task.id, count=count or elapsed, note=plain(note), left=left)
            self.bars.start()
        if not self.is_due():
            return
        words = ", ".join(filter(None, (count, note, left)))
        if self.drawn:
            self.bars.refresh()
        elif words == self.said:
            return
        else:
            print(f"  {name if unit else elapsed}: {words}", file=self.out, flush=True)
        self.due, self.said = time.time() + self.every, words

    def _update(self, name: str, done: float, total: float | None, unit: str) -> Any:
        """Return rich's task, with another measurement of its speed."""
        if not self.bars:
            return SimpleNamespace(speed=None, time_remaining=None)
        if name in self.tasks and self.tasks[name].fields["unit"] != unit:
            self.remove(name)
        if name not in self.tasks:
            self.bars.add_task(name, total=total, unit=unit, count="", note="", left="")
            self.tasks[name] = self.bars.tasks[-1]
        self.bars.update(self.tasks[name].id, completed=done, total=total)
        return self.tasks[name]

    def print(self, text: str) -> None:
        """Print *text* above the bars."""
        if self.drawn and self.bars.live.is_started:
            self.bars.console.print(plain(text), markup=False, highlight=False, emoji=False, soft_wrap=True)
        else:
            print(text, file=self.out, flush=True)

    def remove(self, name: str) -> None:
        """Remove a bar."""
        if name in self.tasks:
            self.bars.remove_task(self.tasks.pop(name).id)


def plain(text: str) -> str:
    """Replace control characters, which could move the bars."""
    return "".join(each if each.isprintable() else " " for each in text)
