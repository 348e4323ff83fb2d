"""How vLLM's processes wait for each other, on the queue that they really use."""

import threading
import time
from collections.abc import Iterator

import pytest

pytest.importorskip("vllm", reason="the engine is not installed")

from vllm.distributed.device_communicators import shm_broadcast

from twostroke.engine.vllm.waiting import ShortSpin

pytestmark = pytest.mark.vllm


@pytest.fixture
def queues(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[shm_broadcast.MessageQueue, shm_broadcast.MessageQueue]]:
    """A writer and its reader."""
    monkeypatch.setattr(shm_broadcast, "SpinCondition", ShortSpin)
    writer = shm_broadcast.MessageQueue(1, 1)
    reader = shm_broadcast.MessageQueue.create_from_handle(writer.export_handle(), 0)
    waits = threading.Thread(target=writer.wait_until_ready)
    waits.start()
    reader.wait_until_ready()
    waits.join()
    yield writer, reader
    reader.shutdown()
    writer.shutdown()


@pytest.mark.parametrize("waited_s", [0.5, 3.5])
def test_a_message_whose_notification_is_lost_is_little_later(
    queues: tuple[shm_broadcast.MessageQueue, shm_broadcast.MessageQueue],
    monkeypatch: pytest.MonkeyPatch,
    waited_s: float,
) -> None:
    """vLLM's own readers look by themselves every 5 s; its spinning hides that a notification was dropped."""
    writer, reader = queues
    writer.enqueue("first")
    assert reader.dequeue(timeout=10) == "first"
    monkeypatch.setattr(writer._spin_condition, "notify", lambda: None)
    sent_s: list[float] = []

    def send() -> None:
        sent_s.append(time.monotonic())
        writer.enqueue("second")

    later = threading.Timer(waited_s, send)
    later.start()
    assert reader.dequeue(timeout=10) == "second"
    # A sixteenth of the longer wait would be 220 ms.
    assert time.monotonic() - sent_s[0] < 0.15
    later.join()


def test_a_reader_of_frequent_messages_sleeps_between_them(
    queues: tuple[shm_broadcast.MessageQueue, shm_broadcast.MessageQueue],
) -> None:
    writer, reader = queues
    writer.enqueue("first")
    assert reader.dequeue(timeout=10) == "first"
    used_s = time.thread_time()
    with pytest.raises(TimeoutError):
        reader.dequeue(timeout=0.5)
    # vLLM's own would spin all the time.
    assert time.thread_time() - used_s < 0.1
