"""Cores of other workers, used by steps that compute prompts while those workers leave them idle.

Two workers that share a machine have their own cores each, so that a prompt never slows another worker's answers. While
one of them has nothing to do, half the machine would idle too, and a long prompt take twice the time that one engine on
all cores takes. So OpenMP has threads for the spare cores as well. They run there as SCHED_IDLE, which gives way at
once to whatever else wants the core, and a step uses them only as long as little else does: a team of threads waits for
its last one, so a step with a thread that gets no time is slower than one without it. Every layer looks anew.

The work is shared out anew with it, which adds the same numbers in another order, as other company in a step does.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twostroke.policy.turns import SPARE_TOKENS

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

_LOOK_S = 0.08
"""The kernel counts in hundredths of a second."""
_STALE_S = 0.5
_TAKE, _GIVE_BACK = 0.45, 0.6
"""Shares of the cores' time that others use: below the first they are taken, above the second given back. At a half, a
thread there takes as long for its part of a layer as the own cores would for both."""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_BUSY = (1, 2, 3, 6, 7)
"""Of a cpu line's fields: user, nice, system, irq, softirq."""


class CoreUse:
    """How much of some cores' time others use, as the kernel counts it.

    own_s: seconds that our own threads have run on them so far.
    """

    def __init__(
        self,
        cores: Sequence[int],
        own_s: Callable[[], float],
        read: Callable[[], str] = Path("/proc/stat").read_text,
    ) -> None:
        self._names = {f"cpu{core}" for core in cores}
        self._own_s = own_s
        self._read = read
        self._used_s = 0.0
        self._at_s = float("-inf")

    def share(self, now_s: float) -> float | None:
        """Their share since the last answer; None while that is too short ago to tell, or so long ago that it says
        little of now."""
        passed_s = now_s - self._at_s
        if passed_s < _LOOK_S:
            return None
        ticks = sum(
            sum(int(fields[index]) for index in _BUSY)
            for line in self._read().splitlines()
            if (fields := line.split()) and fields[0] in self._names
        )
        used_s = ticks / _TICKS_PER_S - self._own_s()
        used, self._used_s, self._at_s = used_s - self._used_s, used_s, now_s
        return None if passed_s > _STALE_S else used / passed_s / len(self._names)


class SpareCores:
    """Chooses the threads of a worker's steps.

    own: threads on its own cores. set_threads: takes how many the next parallel regions have.
    """

    def __init__(self, own: int, spare: int, use: CoreUse, set_threads: Callable[[int], None]) -> None:
        self._own, self._all = own, own + spare
        self._use = use
        self._set_threads = set_threads
        self._wanted = False
        """Whether the step that runs would gain by them."""
        self._taken = False

    def begin(self, prompt_tokens: int) -> bool:
        """A step begins, on own cores. Whether it may come to use others."""
        self._wanted = prompt_tokens >= SPARE_TOKENS
        return self._wanted

    def look(self, now_s: float) -> bool:
        """Before a layer: takes the spare cores or gives them back. Whether the number of threads changed."""
        if not self._wanted or (share := self._use.share(now_s)) is None:
            return False
        take = share < (_GIVE_BACK if self._taken else _TAKE)
        if take == self._taken:
            return False
        self._taken = take
        self._set_threads(self._all if take else self._own)
        return True

    def end(self) -> None:
        """The step's layers are done."""
        self._wanted = False
        if self._taken:
            self._taken = False
            self._set_threads(self._own)


def use_spare_cores(runner: Any, own: Sequence[int], spare: Sequence[int]) -> bool:
    """Lets a model runner's steps use the spare cores. OpenMP must have been started with threads for all of them.

    Returns False, and changes nothing for the steps, where this vLLM or its OpenMP does not have what it takes.
    """
    from vllm import _custom_ops

    layers = _layers(runner.get_model())
    openmp = ctypes.CDLL(None)
    needed = ("omp_set_num_threads", "omp_get_max_threads", "omp_get_thread_num", "GOMP_parallel")
    missing = [name for name in needed if not hasattr(openmp, name)]
    if not hasattr(_custom_ops, "cpu_attn_get_scheduler_metadata"):
        missing.append("vLLM's CPU attention")
    if not missing and openmp.omp_get_max_threads() != len(own) + len(spare):
        missing.append(f"{len(own) + len(spare)} OpenMP threads")
    if missing or not layers:
        log.warning("--spare-cores is of no use here: there is no %s", ", ".join(missing) or "list of layers")
        if hasattr(openmp, "omp_set_num_threads"):
            openmp.omp_set_num_threads(len(own))
        return False
    helpers = _yield_to_others(openmp, own, spare)
    # A matrix product keeps the number of threads that it is first made for as the most that it uses.
    runner._dummy_run(runner.scheduler_config.max_num_batched_tokens)
    openmp.omp_set_num_threads(len(own))

    def helped_s() -> float:
        return sum(map(_run_s, helpers))

    use = CoreUse(spare, helped_s)
    cores = SpareCores(len(own), len(spare), use, openmp.omp_set_num_threads)
    plans = _AttentionPlans(_custom_ops)
    execute_model, sample_tokens = runner.execute_model, runner.sample_tokens
    spared_s = 0.0

    @wraps(execute_model)
    def execute(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal spared_s
        plans.forget()
        spared_s = 0.0
        if not cores.begin(sum(count for count in scheduler_output.num_scheduled_tokens.values() if count > 1)):
            return execute_model(scheduler_output, *args, **kwargs)
        before_s = helped_s()
        try:
            return execute_model(scheduler_output, *args, **kwargs)
        finally:
            cores.end()
            spared_s = (helped_s() - before_s) / len(own)

    @wraps(sample_tokens)
    def sample(*args: Any, **kwargs: Any) -> Any:
        output = sample_tokens(*args, **kwargs)
        if output is not None:
            output.spared_s = spared_s
        return output

    def look(*_: Any) -> None:
        if cores.look(time.monotonic()):
            plans.renew()

    runner.execute_model, runner.sample_tokens = execute, sample
    for layer in layers:
        layer.register_forward_pre_hook(look)
    return True


class _AttentionPlans:
    """vLLM divides attention among threads once a step, and refuses to compute with others."""

    def __init__(self, ops: Any) -> None:
        self._plan = ops.cpu_attn_get_scheduler_metadata
        self._made: list[tuple[torch.Tensor, tuple[Any, ...], dict[str, Any]]] = []
        ops.cpu_attn_get_scheduler_metadata = self._remember

    def _remember(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        plan: torch.Tensor = self._plan(*args, **kwargs)
        self._made.append((plan, args, kwargs))
        return plan

    def forget(self) -> None:
        """A step begins."""
        self._made.clear()

    def renew(self) -> None:
        """Divides anew what the running step's layers have yet to compute."""
        from vllm.forward_context import get_forward_context

        found = get_forward_context().attn_metadata
        renewed = []
        for plan, args, kwargs in self._made:
            users = {id(each): each for each in found.values() if getattr(each, "scheduler_metadata", None) is plan}
            if users:
                again = self._plan(*args, **kwargs)
                renewed.append((again, args, kwargs))
            for each in users.values():
                each.scheduler_metadata = again
        self._made = renewed


def _layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    from torch.nn import ModuleList

    lists = [module for module in model.modules() if isinstance(module, ModuleList)]
    return list(max(lists, key=len, default=[]))


def _yield_to_others(openmp: ctypes.CDLL, own: Sequence[int], spare: Sequence[int]) -> list[Path]:
    """Makes OpenMP's threads for the spare cores ones that run when nothing else would; returns where the kernel counts
    their time."""
    helpers = []

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    def settle(_: int | None) -> None:
        if openmp.omp_get_thread_num() < len(own):
            return
        # Also own cores: that is where such a thread can go on when it is driven away in mid-layer.
        os.sched_setaffinity(0, [*own, *spare])
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        helpers.append(Path(f"/proc/self/task/{threading.get_native_id()}/schedstat"))

    openmp.GOMP_parallel(settle, None, len(own) + len(spare), 0)
    return helpers


def _run_s(schedstat: Path) -> float:
    return int(schedstat.read_text().split()[0]) / 1e9
