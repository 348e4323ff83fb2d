"""`twostroke status`: the router's view of its cluster as a table or as JSON."""

from __future__ import annotations

import json
from typing import Any

from google.protobuf.json_format import MessageToDict
from rich.console import Console
from rich.table import Table
from rich.text import Text

from twostroke.launch.board import say
from twostroke.launch.readiness import state_name
from twostroke.launch.state import RunState
from twostroke.v1.cluster_pb2 import LINK_STATE_QUARANTINED, LinkState, LinkView, WatchResponse, WorkerView
from twostroke.v1.worker_pb2 import Role

_EPOCH_CHARACTERS = 8
_WIDTH = 160
_COLUMNS = ("worker", "role", "address", "state", "epoch", "engine", "model", "load", "KV blocks", "held", "requests")
_STATE_STYLES = {"ready": "green", "starting": "yellow", "refused": "red", "unreachable": "red"}


def show(console: Console, router: str, view: WatchResponse, local: RunState | None) -> None:
    """Prints the router's view, and the ends of processes that `up` saw."""
    # A narrow terminal had better break lines than columns.
    console.width = max(console.width, _WIDTH)
    ready = Text("ready", "green") if view.ready else Text(f"not ready: {view.waiting_for or 'no reason given'}", "red")
    console.print(Text.assemble(f"router {view.router_id} at {router}: ", ready), soft_wrap=True, highlight=False)
    if view.workers:
        console.print(_table(view), highlight=False)
    for worker in _workers(view):
        if worker.detail:
            say(console, f"{worker.info.worker_id or worker.address}: {worker.detail}")
    for worker in _workers(view):
        if worker.steps.observed:
            say(console, prediction_line(worker))
    for pair in view.refused_pairs:
        say(console, f"refused: {pair.prefill_worker_id} to {pair.decode_worker_id}: {pair.reason}", "red")
    for link in view.links:
        say(console, link_line(link), "red" if link.state == LINK_STATE_QUARANTINED else "")
    if view.HasField("role_advice"):
        say(console, f"roles: {view.role_advice.why}")
    if view.ways:
        say(console, f"ways open: {', '.join(view.ways)}; KV blocks known in prefix caches: {view.known_blocks}")
    say(console, _counters(view))
    for record in local.processes if local is not None else ():
        if record.exit:
            say(console, f"{record.name} {record.exit}; log: {record.log}", "red")


def _table(view: WatchResponse) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in _COLUMNS:
        table.add_column(column, no_wrap=True)
    for worker in _workers(view):
        table.add_row(*_row(worker))
    return table


def _workers(view: WatchResponse) -> list[WorkerView]:
    return sorted(view.workers, key=lambda worker: (worker.info.worker_id, worker.address))


def as_json(router: str, view: WatchResponse, local: RunState | None) -> str:
    """The same for programs: the WatchResponse in proto field names, the router's address, the local processes."""
    shown: dict[str, Any] = {"router": router}
    shown |= MessageToDict(view, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    if local is not None:
        shown["processes"] = [
            {
                "name": record.name,
                "pid": record.process.pid,
                "alive": record.process.alive(),
                "exit": record.exit,
                "log": record.log,
            }
            for record in local.processes
        ]
    return json.dumps(shown, indent=2)


def _row(worker: WorkerView) -> tuple[Text | str, ...]:
    info, load, state = worker.info, worker.load, state_name(worker)
    role = load.role if worker.HasField("load") else info.role
    known, loaded = worker.HasField("info"), worker.HasField("load")
    return (
        info.worker_id or "?",
        Role.Name(role).removeprefix("ROLE_").lower() if role else "?",
        worker.address,
        Text(state, _STATE_STYLES.get(state, "")),
        info.epoch[:_EPOCH_CHARACTERS],
        f"{info.engine} {info.engine_version}".strip(),
        info.model.rstrip("/").rpartition("/")[2],
        f"{load.running_requests} run, {load.waiting_requests} wait" if loaded else "",
        f"{load.used_blocks}/{info.total_blocks}" if known and loaded else "",
        f"{load.held_handoffs} ({load.held_blocks} blocks)" if loaded else "",
        str(worker.router_requests),
    )


def prediction_line(worker: WorkerView) -> str:
    """What is predicted of a worker's steps, in one line."""
    steps = worker.steps
    return (
        f"steps of {worker.info.worker_id}: {steps.decode_ms:.2f} ms with one answer, {steps.prefill_token_us:.1f} us "
        f"per prompt token; error {steps.error:.1%} after {steps.observed}, {steps.set_aside} not believed"
    )


def link_line(link: LinkView) -> str:
    """A link in one line."""
    state = LinkState.Name(link.state).removeprefix("LINK_STATE_").lower()
    parts = [state, *link.lanes]
    if link.bytes_per_s:
        parts += [f"{link.bytes_per_s / 1e9:.2f} GB/s", f"{link.latency_ms:.3f} ms"]
    if link.failures:
        parts.append(f"{link.failures} failures")
    if link.detail:
        parts.append(link.detail)
    return f"link {link.prefill_worker_id} to {link.decode_worker_id}: {', '.join(parts)}"


def _counters(view: WatchResponse) -> str:
    loads = [worker.load for worker in view.workers]
    handoffs = view.handoffs
    moved_bytes = sum(load.kv_received_bytes for load in loads)
    return (
        f"requests in flight {view.requests}; prompts recomputed on decode {view.recomputed_prompts}; "
        f"hand-offs {sum(load.kv_received_handoffs for load in loads)} ({moved_bytes / 2**20:.1f} MiB): "
        f"{handoffs.offered} offered, {handoffs.receiving} receiving, {handoffs.received} received, "
        f"{handoffs.released} released, {handoffs.lost} lost; "
        f"prompt tokens computed {sum(load.computed_prompt_tokens for load in loads)}; "
        f"tokens generated {sum(load.generated_tokens for load in loads)}"
    )
