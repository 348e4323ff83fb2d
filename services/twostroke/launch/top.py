"""`twostroke top`: the cluster and its requests in the terminal, as they change."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from twostroke.errors import UnavailableError
from twostroke.launch import cluster, timeline
from twostroke.launch.readiness import state_name
from twostroke.launch.status import link_line
from twostroke.v1.cluster_pb2 import REQUEST_STATE_RUNNING, RequestState, RequestView, WatchResponse
from twostroke.v1.worker_pb2 import Role

_TIMEOUT_S = 5.0
_ID_WIDTH = 24
_BESIDE_BAR = 78
"""Columns that all but the bars take."""
_STYLES = {"queue": "bright_black", "prefill": "yellow", "hand-off": "magenta", "decode": "cyan"}
_STATES = {"finished": "green", "failed": "red", "cancelled": "yellow"}


class Rates:
    """Tokens per second, from the growth of the workers' counters."""

    def __init__(self) -> None:
        self._last: tuple[float, int, int] | None = None

    def of(self, view: WatchResponse, now_s: float) -> tuple[float, float]:
        """Tokens written and prompt tokens read per second since the last call; 0 at the first, and where a worker
        began anew."""
        written = sum(worker.load.generated_tokens for worker in view.workers)
        read = sum(worker.load.computed_prompt_tokens for worker in view.workers)
        last, self._last = self._last, (now_s, written, read)
        if last is None or now_s <= last[0] or written < last[1] or read < last[2]:
            return 0.0, 0.0
        return (written - last[1]) / (now_s - last[0]), (read - last[2]) / (now_s - last[0])


async def run(console: Console, target: str, interval_s: float, limit: int, once: bool) -> None:
    """Shows the router at `target` until cancelled, or once. Raises UnavailableError when nothing answers at first."""
    rates = Rates()
    shown = await _screen(console, target, rates, limit)
    if once:
        console.print(shown)
        return
    with Live(shown, console=console, screen=console.is_terminal, auto_refresh=False) as live:
        while True:
            await asyncio.sleep(interval_s)
            try:
                shown = await _screen(console, target, rates, limit)
            except UnavailableError as error:
                shown = Group(Text(error.message, "red"))
            live.update(shown, refresh=True)


async def _screen(console: Console, target: str, rates: Rates, limit: int) -> Group:
    view = await cluster.fetch(target, _TIMEOUT_S)
    requests = await cluster.requests(target, limit, _TIMEOUT_S)
    return screen(view, requests, rates.of(view, time.monotonic()), console.width)


def screen(view: WatchResponse, requests: Sequence[RequestView], rates: tuple[float, float], width: int) -> Group:
    """All that is shown, for a terminal of `width` columns."""
    ready = Text("ready", "green") if view.ready else Text(f"waits for {view.waiting_for}", "red")
    numbers = f"  {view.requests} in flight  {rates[0]:.0f} tokens/s  {rates[1]:.0f} prompt tokens/s"
    bar_width = min(max(width - _BESIDE_BAR, 10), 60)
    longest_ms = max((_whole_ms(request) for request in requests), default=1.0)
    table = _table("request", "state", "prompt", "answer", "first", "whole", "strokes")
    for request in requests:
        table.add_row(*_row(request, longest_ms, bar_width))
    legend = Text.assemble(*(part for name, style in _STYLES.items() for part in (("█ ", style), f"{name}  ")))
    links = [Text(link_line(link)) for link in view.links]
    return Group(
        Text.assemble(f"{view.router_id} ", ready, numbers), Text(), _workers(view), *links, Text(), legend, table
    )


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, no_wrap=True)
    return table


def _workers(view: WatchResponse) -> Table:
    table = _table("worker", "role", "state", "run", "wait", "KV free", "held")
    for worker in sorted(view.workers, key=lambda worker: (worker.info.worker_id, worker.address)):
        load, blocks = worker.load, worker.info.total_blocks
        table.add_row(
            worker.info.worker_id or worker.address,
            Role.Name(load.role).removeprefix("ROLE_").lower() if load.role else "?",
            state_name(worker),
            str(load.running_requests),
            str(load.waiting_requests),
            f"{1 - load.used_blocks / blocks:.0%}" if blocks else "",
            str(load.held_handoffs),
        )
    return table


def _whole_ms(request: RequestView) -> float:
    return request.age_ms if request.state == REQUEST_STATE_RUNNING else request.timeline.finished_ms


def _row(request: RequestView, longest_ms: float, bar_width: int) -> tuple[Text | str, ...]:
    state = RequestState.Name(request.state).removeprefix("REQUEST_STATE_").lower()
    first_ms = request.timeline.first_token_ms
    return (
        request.request_id[:_ID_WIDTH],
        Text(state, _STATES.get(state, "")),
        str(request.prompt_tokens),
        str(request.completion_tokens),
        f"{first_ms:.0f} ms" if first_ms else "",
        f"{_whole_ms(request):.0f} ms",
        _bar(request, longest_ms, bar_width),
    )


def _bar(request: RequestView, longest_ms: float, width: int) -> Text:
    whole_ms = _whole_ms(request)
    cells: list[tuple[str, str]] = [(" ", "")] * width
    for span in timeline.spans(request.timeline):
        end_ms = max(span.end_ms, whole_ms if request.state == REQUEST_STATE_RUNNING and not span.end_ms else 0.0)
        start = min(int(span.start_ms / longest_ms * width), width - 1)
        end = max(int(end_ms / longest_ms * width), start + 1)
        for place in range(start, min(end, width)):
            cells[place] = ("█", _STYLES[span.name])
    bar = Text.assemble(*cells)
    if request.failed_attempts:
        bar.append(f" placed {request.timeline.attempts} times", "red")
    return bar
