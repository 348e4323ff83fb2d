"""A source rank in a process of its own, and a reading rank in this one, for tests and benchmarks of hand-offs."""

from __future__ import annotations

import json
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cached_property, partial
from typing import Any

from twostroke.bench.kv_rank import KvRank, Shape
from twostroke.config import child_environment
from twostroke.errors import DeadlineError, TwostrokeError, UnavailableError
from twostroke.kv.link import LinkReport
from twostroke.kv.memory import Blocks, slice_between
from twostroke.kv.mover import Callbacks
from twostroke.kv.receive import Outcome, Part, Receive
from twostroke.v1.kv_pb2 import KvMemory

START_S = 40.0


class SourceRank:
    """Owns `python -m twostroke.bench.kv_rank`; `end` ends it. prefix: a command to run it under, such as a network
    namespace's. flags: more of its flags. It starts beside the caller, and is waited for where it is first needed; that
    raises UnavailableError when it does not start."""

    def __init__(
        self,
        name: str,
        shape: Shape,
        *,
        seed: int = 1,
        options: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
        flags: Sequence[str] = (),
    ) -> None:
        self.name, self.content = name, shape.content(seed)
        command = [*prefix, sys.executable, "-m", "twostroke.bench.kv_rank", f"--name={name}", f"--seed={seed}", *flags]
        command += [f"--{size.replace('_', '-')}={value}" for size, value in asdict(shape).items()]
        command += [f"--option={key}={value}" for key, value in (options or {}).items()]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=child_environment(),
        )
        self._lines: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    @cached_property
    def _first(self) -> dict[str, Any]:
        return self._line(START_S)

    @property
    def address(self) -> bytes:
        """Of its transport."""
        return bytes.fromhex(self._first["address"])

    @property
    def memory(self) -> KvMemory:
        """Where its KV is."""
        return KvMemory.FromString(bytes.fromhex(self._first["memory"]))

    def _read(self) -> None:
        assert self.process.stdout is not None
        for text in self.process.stdout:
            if text.startswith("{"):
                self._lines.put(json.loads(text))
        self._lines.put({"event": "ended", "id": ""})

    def _line(self, timeout_s: float) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            raise DeadlineError(f"{self.name} said nothing for {timeout_s:g} s") from None
        if line.get("event") == "ended":
            raise UnavailableError(f"the process of {self.name} ended")
        return line

    def event(self, kind: str, about: str = "", timeout_s: float = 20.0) -> dict[str, Any]:
        """The next event of this kind; others are dropped. about: its id, or any. Raises DeadlineError when it does not
        come, UnavailableError when the process ends."""
        assert self._first
        end = time.monotonic() + timeout_s
        while True:
            line = self._line(max(0.0, end - time.monotonic()))
            if line.get("event") == kind and about in ("", line["id"]):
                return line

    def tell(self, command: str) -> None:
        """One command."""
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()

    def offer(self, handoff_id: str) -> tuple[int, int]:
        """Begins a hand-off; its slot and generation."""
        self.tell(f"offer {handoff_id}")
        offered = self.event("offered", handoff_id)
        return offered["slot"], offered["generation"]

    def announce(self, handoff_id: str, first: int, blocks: Sequence[int]) -> None:
        """These blocks are ready."""
        self.tell(f"announce {handoff_id} {first} {','.join(map(str, blocks))}")

    def serve(self, handoff_id: str, blocks: Sequence[int], token: int = 7) -> None:
        """All blocks at once, and the end."""
        self.announce(handoff_id, 0, blocks)
        self.tell(f"finish {handoff_id} {len(blocks)} {token}")

    def signal(self, number: signal.Signals) -> None:
        """To the process."""
        self.process.send_signal(number)

    def alive(self) -> bool:
        """Whether the process runs."""
        return self.process.poll() is None

    def end(self) -> None:
        """Kills it, also where it is stopped."""
        self.process.kill()
        self.process.wait()
        self._reading.join()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


class ReaderRank:
    """A rank of this process that reads; `close` ends it."""

    def __init__(
        self,
        name: str,
        shape: Shape,
        *,
        backend: str = "ucx",
        options: Mapping[str, str] | None = None,
        timeout_s: float = 5.0,
        verify: bool = True,
    ) -> None:
        self.name = name
        self._outcomes: queue.SimpleQueue[tuple[float, Outcome]] = queue.SimpleQueue()
        self._early: dict[str, tuple[float, Outcome]] = {}
        self.fatal: list[Exception] = []
        callbacks = Callbacks(
            lambda handoff_id: None,
            lambda handoff_id: None,
            lambda outcome: self._outcomes.put((time.monotonic(), outcome)),
            self.fatal.append,
        )
        rank = KvRank(name, shape, callbacks, backend=backend, options=options, timeout_s=timeout_s, verify=verify)
        self.kv, self.mover = rank.kv, rank.mover
        self.mover.start()

    def expect(self, handoff_id: str, hold: tuple[int, int], *sources: SourceRank) -> None:
        """Asks for a hand-off of a worker with these ranks. Raises LayoutMismatchError."""
        parts = [
            Part(source.name, source.memory, slice_between(source.memory, self.mover.memory), len(sources))
            for source in sources
        ]
        receive = Receive(handoff_id, handoff_id, *hold, parts, time.monotonic())

        def expect() -> None:
            for source in sources:
                self.mover.know(source.name, source.address)
            self.mover.reader.expect(receive)

        self.mover.call(expect)

    def begin(self, handoff_id: str, blocks: Sequence[int], first: int = 0) -> None:
        """There is room."""
        self.mover.call(lambda: self.mover.reader.begin(handoff_id, Blocks(first, list(blocks))))

    def outcome(self, handoff_id: str, timeout_s: float = 20.0) -> tuple[float, Outcome]:
        """How it ended, and when by the monotonic clock. Raises DeadlineError when it does not end."""
        end = time.monotonic() + timeout_s
        while handoff_id not in self._early:
            try:
                told = self._outcomes.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                raise DeadlineError(f"hand-off {handoff_id} did not end within {timeout_s:g} s") from None
            self._early[told[1].request_id] = told
        return self._early.pop(handoff_id)

    def read(self, source: SourceRank, handoff_id: str, theirs: Sequence[int], here: Sequence[int]) -> Outcome:
        """A whole hand-off, from its offer to its outcome. Raises DeadlineError."""
        self.expect(handoff_id, source.offer(handoff_id), source)
        self.begin(handoff_id, here)
        source.serve(handoff_id, theirs)
        return self.outcome(handoff_id)[1]

    def probe(self, source: SourceRank, timeout_s: float = 20.0) -> LinkReport | TwostrokeError:
        """Tries the link. Raises DeadlineError."""
        answers: queue.SimpleQueue[LinkReport | TwostrokeError] = queue.SimpleQueue()
        self.mover.call(partial(self.mover.probe, source.name, source.address, source.memory, answers.put))
        try:
            return answers.get(timeout=timeout_s)
        except queue.Empty:
            raise DeadlineError(f"the probe of {source.name} did not end within {timeout_s:g} s") from None

    def settle(self, timeout_s: float = 20.0) -> None:
        """Returns when the transfer thread has done all that it was told. Raises DeadlineError."""
        done = threading.Event()
        self.mover.call(done.set)
        if not done.wait(timeout_s):
            raise DeadlineError(f"the transfer thread of {self.name} did not answer within {timeout_s:g} s")

    def close(self) -> None:
        """Ends it."""
        self.mover.close()
