"""`python -m twostroke.telemetry.tables FILE`: brings the tables between the marks of a document up to date."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from twostroke.telemetry.metrics import ROUTER_METRICS, WORKER_METRICS, Metric
from twostroke.telemetry.spans import SPANS, Attribute

Row = Sequence[str]


def tables() -> dict[str, str]:
    """Every table by the name of its mark."""
    attributes: dict[Attribute, list[str]] = {}
    for span in SPANS:
        for attribute in span.attributes:
            attributes.setdefault(attribute, []).append("edge" if span is SPANS[0] else span.name)
    return {
        "spans": _table(("span", "made by", "covers"), [(f"`{s.name}`", s.service, s.covers) for s in SPANS]),
        "attributes": _table(
            ("attribute", "on", "meaning"),
            [(f"`{each.key}`", ", ".join(on), each.meaning) for each, on in attributes.items()],
        ),
        "router-metrics": _metrics(ROUTER_METRICS),
        "worker-metrics": _metrics(WORKER_METRICS),
    }


def _metrics(metrics: Sequence[Metric]) -> str:
    rows = [(f"`{each.name}`", each.kind, ", ".join(each.labels) or "-", each.meaning) for each in metrics]
    return _table(("metric", "kind", "labels", "meaning"), rows)


def _table(head: Row, rows: Sequence[Row]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def filled(document: str) -> str:
    """The document with every table current."""
    for name, table in tables().items():
        head, mark, rest = document.partition(f"<!-- {name}: generated -->\n")
        document = f"{head}{mark}{table}\n<!-- end -->{rest.partition('<!-- end -->')[2]}" if mark else document
    return document


def main(path: str) -> None:
    """Entry point."""
    file = Path(path)
    file.write_text(filled(file.read_text()))


if __name__ == "__main__":
    main(sys.argv[1])
