"""The counters of one service, in Prometheus' text format."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

if TYPE_CHECKING:
    from vitruvian.serve.service import Service

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)


class Metrics:
    """Requests, images, batches and queues."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.requests = Counter("vit_requests", "Responses", ["route", "status"], registry=self.registry)
        self.seconds = Histogram(
            "vit_request_seconds",
            "From a request's first byte to its response",
            ["route"],
            buckets=SECONDS,
            registry=self.registry,
        )
        self.images = Counter("vit_images", "Images that the model computed", ["model"], registry=self.registry)
        self.batches = Histogram(
            "vit_batch_images", "Images in a batch", ["model"], buckets=BATCH_SIZES, registry=self.registry
        )
        self.compute = Histogram(
            "vit_batch_seconds", "Seconds a batch takes", ["model"], buckets=SECONDS, registry=self.registry
        )
        self.accepted = Gauge("vit_accepted_images", "Images waiting or computed", ["model"], registry=self.registry)

    def batch(self, model: str, images: int, seconds: float) -> None:
        self.images.labels(model).inc(images)
        self.batches.labels(model).observe(images)
        self.compute.labels(model).observe(seconds)

    def response(self, route: str, status: int, seconds: float) -> None:
        self.requests.labels(route, str(status)).inc()
        self.seconds.labels(route).observe(seconds)

    def text(self, service: Service) -> bytes:
        for name, served in service.models.items():
            self.accepted.labels(name).set(served.batcher.accepted)
        return generate_latest(self.registry)
