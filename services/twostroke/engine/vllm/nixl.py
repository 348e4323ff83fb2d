"""vLLM's stock NIXL connector, made fit to share a machine, and its parameters on the wire.

Four things are changed, none of them in the protocol: the agent's progress thread sleeps between polls instead of
spinning on a whole core, and may run on any core; the pinning of the computing thread to the last core is undone; so is
the pinning of the engine core to the first one; and held KV can be released on the router's word instead of by
time-out.

The thread cannot be left out: connections are made by both sides' progress, and a prefill worker that has nothing to
compute makes none by itself.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlPullConnector

from twostroke.engine.vllm.affinity import run_where_the_worker_may, unpinned
from twostroke.v1.kv_pb2 import BlockGroup, NixlTransfer

# Long enough to cost little while idle, short beside a step.
PROGRESS_INTERVAL_US = 1000


class NixlConnector(NixlPullConnector):
    """The stock pull connector with the changes named above. Keeps the name that vLLM's configuration checks for."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        if role is KVConnectorRole.WORKER:
            with _calm_agent(), unpinned():
                super().__init__(vllm_config, role, kv_cache_config)
        else:
            run_where_the_worker_may()
            super().__init__(vllm_config, role, kv_cache_config)
        self._released: set[str] = set()

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Any) -> None:
        """Scheduler side: starts the side channel. The stock one waits for ever when its port is taken; this raises."""
        scheduler = self.connector_scheduler
        host, port = scheduler.side_channel_host, scheduler.side_channel_port
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            try:
                probe.bind((host, port))
            except OSError as error:
                raise RuntimeError(f"the KV side channel cannot listen on {host}:{port}: set --kv-port") from error
        super().set_xfer_handshake_metadata_pp_aware(metadata)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Scheduler side: the tokens to fetch. The stock one takes the prompt's for what came; a prompt that ends with
        tokens of the answer is longer."""
        params = request.kv_transfer_params or {}
        fetching = params.get("do_remote_prefill")
        count, in_background = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if count and fetching:
            count = min(count, params["remote_num_tokens"] - num_computed_tokens)
        return max(0, count), in_background and count > 0

    def release(self, request_ids: list[str]) -> int:
        """Worker side: gives up held KV at the next step. Returns how many of the ids held any."""
        worker = self.connector_worker
        held = [request_id for request_id in request_ids if request_id in worker._reqs_to_process]
        for request_id in held:
            worker._reqs_to_process.discard(request_id)
            worker._reqs_to_send.pop(request_id, None)
        self._released.update(held)
        return len(held)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """The stock results, and what was released since the last step."""
        results = super().get_transfer_results(finished_req_ids)
        if self._released:
            results.finished_sending.update(self._released)
            self._released.clear()
        return results


@contextmanager
def _calm_agent() -> Iterator[None]:
    """Agents made within poll every PROGRESS_INTERVAL_US; NIXL's Python API fixes that at "never sleep"."""
    from nixl._api import nixl_agent

    bindings = sys.modules[nixl_agent.__module__].nixlBind
    stock = bindings.nixlAgent

    def calm(name: str, config: Any) -> Any:
        config.pthrDelay = PROGRESS_INTERVAL_US
        return stock(name, config)

    bindings.nixlAgent = calm
    try:
        yield
    finally:
        bindings.nixlAgent = stock


def request_params() -> dict[str, Any]:
    """What a prefill request carries to have its KV held."""
    return {"do_remote_decode": True, "do_remote_prefill": False}


def to_wire(params: dict[str, Any]) -> NixlTransfer:
    """The stock connector's parameters of a finished prefill."""
    return NixlTransfer(
        engine_id=params["remote_engine_id"],
        remote_request_id=params["remote_request_id"],
        host=params["remote_host"],
        port=params["remote_port"],
        tensor_parallel=params["tp_size"],
        decode_context_parallel=params["dcp_size"],
        pipeline_parallel=params["pp_size"],
        groups=[BlockGroup(block_ids=group) for group in params["remote_block_ids"]],
        tokens=params["remote_num_tokens"],
        mode=params["transfer_mode"],
    )


def from_wire(transfer: NixlTransfer) -> dict[str, Any]:
    """The parameters of a decode request."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": transfer.engine_id,
        "remote_request_id": transfer.remote_request_id,
        "remote_host": transfer.host,
        "remote_port": transfer.port,
        "tp_size": transfer.tensor_parallel,
        "dcp_size": transfer.decode_context_parallel,
        "pp_size": transfer.pipeline_parallel,
        "remote_block_ids": tuple(list(group.block_ids) for group in transfer.groups),
        "remote_num_tokens": transfer.tokens,
        "remote_blocks_expiry_time": None,
        "transfer_mode": transfer.mode,
    }
