"""Metrics of a cluster as Prometheus reads them: names, labels, and the text of a scrape.

Names are the same wherever they are scraped, by Ray's agents or from `rayq cluster metrics
--serve`, so that one dashboard and one set of alerts work for both: `ray_rayq_bytes_in_total`.
Everything is declared as a gauge; `runtime/ray/metrics.py` says why.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rayq.metrics import CATALOGUE, SECONDS_BOUNDS, Metric, Sample

RAY_PREFIX = "ray_"
BUCKET_LABEL = "le"
INFINITY = "+Inf"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


def exported_labels(metric: Metric) -> dict[str, tuple[str, ...]]:
    """The names under which an endpoint shows a metric, and the labels of each. (Ray's adds its own
    labels: the node's address, the process, the session.)"""
    name = RAY_PREFIX + metric.name
    if metric.kind != "histogram":
        return {name: metric.labels}
    return {
        f"{name}_bucket": (*metric.labels, BUCKET_LABEL),
        f"{name}_sum": metric.labels,
        f"{name}_count": metric.labels,
    }


def series(metric: Metric, sample: Sample) -> Iterator[tuple[str, dict[str, str], float]]:
    """The names (without Ray's prefix), labels and values of one sample."""
    labels = sample.labels
    if metric.kind != "histogram":
        yield metric.name, labels, sample.value
        return
    assert sample.buckets is not None and sample.count is not None
    for bound, count in zip(SECONDS_BOUNDS, sample.buckets, strict=True):
        yield f"{metric.name}_bucket", {**labels, BUCKET_LABEL: f"{bound:g}"}, count
    yield f"{metric.name}_bucket", {**labels, BUCKET_LABEL: INFINITY}, sample.count
    yield f"{metric.name}_sum", labels, sample.value
    yield f"{metric.name}_count", labels, sample.count


def exposition(samples: Iterable[Sample]) -> str:
    """The samples in Prometheus's text format, grouped by name."""
    lines: dict[str, list[str]] = {}
    for sample in samples:
        metric = CATALOGUE[sample.name]
        for short, labels, value in series(metric, sample):
            name = RAY_PREFIX + short
            if name not in lines:
                text = metric.help.translate(_ESCAPES)
                lines[name] = [f"# HELP {name} {text}", f"# TYPE {name} gauge"]
            inside = ",".join(
                f'{key}="{text.translate(_ESCAPES)}"' for key, text in sorted(labels.items())
            )
            lines[name].append(f"{name}{{{inside}}} {value:.17g}")
    return "".join(f"{line}\n" for of_name in lines.values() for line in of_name)
