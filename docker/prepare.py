"""Runs in the build, once, what every start would run again.

Looks through the model's class, which vLLM does in a process of its own and remembers in VLLM_CACHE_ROOT, and imports
what router and workers import, for the bytecode.
"""

import importlib
import sys

from vllm.engine.arg_utils import AsyncEngineArgs

AsyncEngineArgs(model=sys.argv[1], dtype="float32", enforce_eager=True).create_engine_config()
for module in (
    "twostroke.engine.vllm.core",
    "twostroke.engine.vllm.direct.connector",
    "twostroke.engine.vllm.extension",
    "twostroke.engine.vllm.forced_tokens",
    "twostroke.engine.vllm.nixl",
    "twostroke.router.__main__",
    "twostroke.router.vllm.front_end",
    "twostroke.router.vllm.http_edge",
    "twostroke.rpc.probe",
    "twostroke.worker.assembly",
    "vllm.entrypoints.launchers.api_server.entry",
    "vllm.model_executor.models.llama",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.structured_output",
    "vllm.v1.worker.cpu_worker",
):
    importlib.import_module(module)
