"""What docs and configuration say about telemetry."""

from pathlib import Path

import yaml

from twostroke.telemetry.metrics import ROUTER_METRICS, WORKER_METRICS
from twostroke.telemetry.spans import SPANS
from twostroke.telemetry.tables import filled, tables

ROOT = Path(__file__).parents[3]
DOCUMENT = ROOT / "docs" / "observability.md"


def test_the_tables_of_the_document_are_current() -> None:
    """`make docs` makes them so."""
    text = DOCUMENT.read_text()
    assert filled(text) == text
    assert all(f"<!-- {name}: generated -->\n{table}\n<!-- end -->" in text for name, table in tables().items())


def test_every_span_and_metric_is_in_a_table() -> None:
    text = DOCUMENT.read_text()
    assert all(f"`{span.name}`" in text for span in SPANS)
    assert all(f"`{metric.name}`" in text for metric in (*ROUTER_METRICS, *WORKER_METRICS))


def test_names_say_their_kind() -> None:
    for metric in (*ROUTER_METRICS, *WORKER_METRICS):
        assert metric.name.endswith("_total") == (metric.kind == "counter"), metric.name
        assert bool(metric.buckets) == (metric.kind == "histogram"), metric.name
        assert list(metric.buckets) == sorted(set(metric.buckets))


def test_jaegers_configuration_hangs_together() -> None:
    """Jaeger itself cannot be had here: every part that is named is defined, and every part that is defined is used."""
    config = yaml.safe_load((ROOT / "docker" / "jaeger.yaml").read_text())
    service, pipeline = config["service"], config["service"]["pipelines"]["traces"]
    assert set(service["extensions"]) == set(config["extensions"])
    for kind in ("receivers", "processors", "exporters"):
        assert set(pipeline[kind]) == set(config[kind]), kind
    backends = config["extensions"]["jaeger_storage"]["backends"]
    assert config["extensions"]["jaeger_query"]["storage"]["traces"] in backends
    assert config["exporters"]["jaeger_storage_exporter"]["trace_storage"] in backends
    assert config["receivers"]["otlp"]["protocols"]["grpc"]["endpoint"].endswith(":4317")
