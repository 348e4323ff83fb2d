"""Shows what each of several things waits for: a live table on a terminal, lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text


def say(console: Console, text: str, style: str = "") -> None:
    """Prints one line as it is: no markup, no wrapping."""
    console.print(Text(text, style=style), soft_wrap=True, highlight=False)


class Board:
    """Texts by name, with the time since the board began. A context manager; the live table vanishes at its end."""

    def __init__(self, console: Console, names: Sequence[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._started_s = clock()
        self._texts = dict.fromkeys(names, "")
        self._done_s: dict[str, float] = {}
        self._live = Live(get_renderable=self._table, console=console, refresh_per_second=8, transient=True)

    def __enter__(self) -> Board:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the board began."""
        return self._clock() - self._started_s

    def show(self, name: str, text: str, *, done: bool = False) -> None:
        """Sets a text; `done` stops its clock. A text that stays the same shows nothing new."""
        if done:
            self._done_s.setdefault(name, self.elapsed_s)
        else:
            self._done_s.pop(name, None)
        if self._texts.get(name) == text:
            return
        self._texts[name] = text
        if not self._console.is_terminal:
            say(self._console, f"[{self.elapsed_s:6.1f} s] {name}: {text}")

    def _table(self) -> Table:
        table = Table.grid(padding=(0, 2))
        for name, text in self._texts.items():
            elapsed_s = self._done_s.get(name, self.elapsed_s)
            style = "green" if name in self._done_s else "cyan"
            table.add_row(Text(name, style=style), Text(f"{elapsed_s:6.1f} s"), Text(text, overflow="ellipsis"))
        return table
