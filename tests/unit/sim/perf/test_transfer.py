"""Hand-off times."""

import pytest

from twostroke.sim.perf.transfer import MOONCAKE_TABLES, MeasuredTransfers, TransferModel


@pytest.mark.parametrize("table", MOONCAKE_TABLES, ids=lambda table: table.name)
def test_published_tables_are_met_within_a_tenth(table: MeasuredTransfers) -> None:
    model = table.fit()
    for size, measured_s in zip(table.sizes_bytes(), table.seconds, strict=True):
        assert model.transfer_s(size) == pytest.approx(measured_s, rel=0.1)
    assert 0.3 < model.efficiency < 0.9
    assert 0 < model.base_s < 2e-3


def test_descriptors_cost_on_their_own() -> None:
    model = TransferModel(base_s=1e-3, link_bytes_per_s=1e9, efficiency=0.5, descriptor_s=2e-6)
    assert model.transfer_s(1e9, descriptors=100_000) == pytest.approx(1e-3 + 2.0 + 0.2)


def test_one_chunk_is_exposed_whole() -> None:
    model = TransferModel(base_s=0.0, link_bytes_per_s=1e9, efficiency=1.0)
    assert model.exposed_s([1e9], [5.0]) == pytest.approx(1.0)


def test_chunks_hide_behind_prefill() -> None:
    model = TransferModel(base_s=0.0, link_bytes_per_s=1e9, efficiency=1.0)
    # A second of prefill per chunk, half a second of transfer: only the last one is waited for.
    assert model.exposed_s([5e8] * 4, [1.0, 2.0, 3.0, 4.0]) == pytest.approx(0.5)
    # Two seconds of transfer per chunk: the link is the bottleneck from the first chunk on.
    assert model.exposed_s([2e9] * 4, [1.0, 2.0, 3.0, 4.0]) == pytest.approx(1 + 8 - 4)


def test_a_shared_link_gives_each_its_part() -> None:
    model = TransferModel(base_s=1e-3, link_bytes_per_s=1e9, efficiency=1.0)
    assert model.shared(4).transfer_s(1e9) == pytest.approx(1e-3 + 4.0)
