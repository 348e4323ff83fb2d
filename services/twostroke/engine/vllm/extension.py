"""What we add to vLLM's worker processes, called through its collective RPC."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.kv_transfer import get_kv_transfer_group

from twostroke.engine.vllm.generators import rewind_on_cpu
from twostroke.engine.vllm.spare_cores import use_spare_cores


class WorkerExtension:
    """Mixed into vLLM's worker class."""

    def twostroke_release(self, request_ids: list[str]) -> int:
        """Gives up KV held for these requests; returns how many held any."""
        return int(get_kv_transfer_group().release(request_ids))

    def twostroke_pin(self, cores: list[int]) -> list[int]:
        """Pins the thread that computes; returns where it runs now."""
        if cores:
            os.sched_setaffinity(0, cores)
        return sorted(os.sched_getaffinity(0))

    def twostroke_spare_cores(self, own: list[int], spare: list[int]) -> bool:
        """Lets prompts use other workers' cores while those are idle; returns whether that is possible."""
        return use_spare_cores(self.model_runner, own, spare)  # type: ignore[attr-defined]

    def twostroke_weights(self) -> tuple[int, int, int, int]:
        """Bytes of this rank's weights, parameters of routed experts, others of the layers, and CPU threads."""
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        return *count_weights(runner.get_model()), torch.get_num_threads()

    def twostroke_keep_seeds(self) -> None:
        """Makes seeded requests safe whose prompt takes several steps; needed on the CPU only."""
        rewind_on_cpu(self.model_runner)  # type: ignore[attr-defined]

    def twostroke_log_steps(self, path: str) -> None:
        """From now on appends one JSON line per step: tokens, and the monotonic times in seconds at which it began, the
        forward pass ended, and the token was chosen. For benchmarks."""
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        log = Path(path).open("a", buffering=1)  # noqa: SIM115 open as long as the process
        step: dict[str, Any] = {}

        def execute(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            step.update(begin_s=time.monotonic(), tokens=scheduler_output.total_num_scheduled_tokens)
            step["requests"] = list(scheduler_output.num_scheduled_tokens)
            result = execute_model(scheduler_output, *args, **kwargs)
            step["forward_end_s"] = time.monotonic()
            return result

        def sample(*args: Any, **kwargs: Any) -> Any:
            result = sample_tokens(*args, **kwargs)
            if step.get("tokens"):
                log.write(json.dumps({**step, "end_s": time.monotonic()}) + "\n")
            return result

        execute_model: Callable[..., Any] = runner.execute_model
        sample_tokens: Callable[..., Any] = runner.sample_tokens
        runner.execute_model = wraps(execute_model)(execute)
        runner.sample_tokens = wraps(sample_tokens)(sample)


def count_weights(model: torch.nn.Module) -> tuple[int, int, int]:
    """Bytes of a rank's weights, parameters of routed experts, and others of its layers.

    Linear layers count by their shape: vLLM packs their weights for the CPU and leaves nothing of the parameters, and
    quantized ones are packed several to an element.
    """
    nbytes = experts = others = 0
    seen: set[int] = set()
    for path, module in model.named_modules():
        own = [weight for weight in module.parameters(recurse=False) if id(weight) not in seen]
        if not own:
            continue
        # Input and output embeddings may be one.
        seen.update(map(id, own))
        linear = _linear_size(module)
        size = linear or sum(weight.numel() for weight in own)
        nbytes += sum(weight.nbytes for weight in own)
        nbytes += sum(linear * weight.itemsize for weight in own if not weight.numel())
        if ".experts" in path:
            experts += size
        elif "embed" not in path and "lm_head" not in path:
            others += size
    return nbytes, experts, others


def _linear_size(module: torch.nn.Module) -> int:
    """Elements of the matrix of one of vLLM's linear layers on this rank; 0 for other modules."""
    if not hasattr(module, "output_partition_sizes"):
        return 0
    return int(sum(module.output_partition_sizes) * getattr(module, "input_size_per_partition", module.input_size))
