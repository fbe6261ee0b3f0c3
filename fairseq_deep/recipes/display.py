"""Progress of stages, training runs and downloads: bars on a terminal, periodic lines elsewhere.

The cursor is never hidden, so a killed command leaves the terminal usable. rich draws only when called, since a drawing
thread could hold a lock while a worker process is forked.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

DRAW = 0.5  # seconds between updates of the bars
BASIS, SHARE = 30, 0.05
"""Seconds, or share of the work, after which a mean speed gives an estimate of the time left."""


def clock(seconds: float) -> str:
    """Format a duration in seconds."""
    seconds = max(0, int(seconds))
    if seconds >= 3600:
        return f"{seconds // 3600} h {seconds % 3600 // 60:02} min"
    return f"{seconds // 60} min {seconds % 60:02} s"


def _make_bars() -> Any:
    """Return rich's bars on standard output; None if it is not a terminal, or rich is missing."""
    screen = getattr(sys.stdout, "screen", sys.stdout)
    if not screen.isatty() or os.environ.get("TERM", "") in ("", "dumb", "unknown"):
        return None
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn
        from rich.table import Column
    except ImportError:
        return None
    console = Console(file=screen, force_terminal=True, force_interactive=True)
    console.show_cursor = lambda show=True: False
    rest = Column(ratio=1, no_wrap=True, overflow="ellipsis")
    sizes = {"  {task.description}": Column(min_width=24), "{task.fields[count]}": None,
             "{task.fields[note]}": rest, "{task.fields[left]}": None}  # fmt: skip
    columns = [TextColumn(words, markup=False, table_column=size) for words, size in sizes.items()]
    columns.insert(1, BarColumn(20 if console.width >= 100 else 8))  # at 80 columns, the time left must fit
    quiet = {"auto_refresh": False, "redirect_stdout": False, "redirect_stderr": False}
    return Progress(*columns, console=console, expand=True, **quiet)


class Display:
    """Progress bars with common columns: name, bar, done/total, speed or loss, time left.

    Args:
        every: interval of lines without bars, in seconds
        bars: whether to draw bars on a terminal

    Attributes:
        bars: rich's bars, or None
        due: time of the next line
    """

    def __init__(self, every: float = 10, bars: bool = True) -> None:
        self.bars: Any = _make_bars() if bars else None
        self.ids: dict[str, Any] = {}
        self.first: dict[tuple[str, str], tuple[float, float]] = {}
        self.every, self.begun, self.drawn = every, time.time(), 0.0
        self.due = self.begun + every

    def __enter__(self) -> Display:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def is_due(self) -> bool:
        """Return whether :meth:`show` would draw or print."""
        return time.time() >= (self.due if self.bars is None else self.drawn + DRAW)

    def show(self, name: str, done: float = 0, total: float | None = None, unit: str = "", note: str = "",
             left: float | None = None, line: str = "") -> None:  # fmt: skip
        """Update the bar *name*, or print a line if one is due.

        Args:
            unit: unit of *done* and *total*; if empty, the bar shows the elapsed time
            note: speed or loss; if empty, the mean speed
            left: time left in seconds; if None, it is computed from the mean speed
            line: text of a printed line; if empty, the text of the bar
        """
        now = time.time()
        begun, start = self.first.setdefault((name, unit), (now, done))
        speed = (done - start) / (now - begun) if now > begun else 0
        if left is None and total and speed > 0 and done < total:
            known = now - begun >= BASIS or done - start >= SHARE * total
            left = (total - done) / speed if known else None
        note = note or (f"{speed:,.0f} {unit}/s" if speed else "")
        ends = "" if left is None else f"left {clock(left)}"
        if self.bars is not None:
            count = f"{done:,.9g}{f'/{total:,.9g}' if total else ''} {unit}" if unit else clock(now - self.begun)
            self._draw(name, total or None, completed=done, count=count, note=plain(note), left=ends)
        elif self.is_due():
            self.due = now + self.every
            words = ", ".join(filter(None, (f"{done:,.9g}{f' of {total:,.9g}' if total else ''} {unit}", note, ends)))
            print(f"  {line or f'{name}: {words}'}", flush=True)

    def _draw(self, name: str, total: float | None, **fields: Any) -> None:
        if name not in self.ids:
            self.ids[name] = self.bars.add_task(name, total=total, **fields)
        self.bars.update(self.ids[name], total=total, **fields)
        self.bars.start()
        if self.is_due():
            self.bars.refresh()
            self.drawn = time.time()

    def print(self, text: str) -> None:
        """Print *text* above the bars."""
        if self.bars is not None and self.bars.live.is_started:
            self.bars.console.print(plain(text), markup=False, highlight=False, emoji=False, soft_wrap=True)
        else:
            print(text, flush=True)

    def remove(self, name: str) -> None:
        """Remove a bar."""
        if name in self.ids:
            self.bars.remove_task(self.ids.pop(name))

    def close(self) -> None:
        """Stop updating the bars; they remain above later output."""
        if self.bars is not None:
            self.bars.stop()


def plain(text: str) -> str:
    """Replace control characters, which could move the bars."""
    return "".join(each if each.isprintable() else " " for each in text)
