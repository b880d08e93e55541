"""Prometheus metrics of the service. Each application has its own registry."""

from __future__ import annotations

from collections import Counter as Counted

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from rollout_server.policies import Publish, PublishState
from rollout_server.quotas import Cost
from shared.protocol import Group

_ROLLOUT_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_PUBLISH_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics:
    """Counters, gauges and histograms; names carry their units."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.requests = Counter(
            "tito_requests", "Requests answered.", ["route", "status"], registry=self._registry
        )
        self.request_seconds = Histogram(
            "tito_request_seconds",
            "Time from a request's first byte to its answer's last.",
            ["route"],
            buckets=_ROLLOUT_SECONDS,
            registry=self._registry,
        )
        self.in_flight = Gauge(
            "tito_requests_in_flight", "Requests being worked on.", registry=self._registry
        )
        self.ready = Gauge(
            "tito_ready", "1 while the engine can generate.", registry=self._registry
        )
        self._samples = Counter(
            "tito_samples", "Samples finished.", ["finish_reason"], registry=self._registry
        )
        self._tokens = Counter(
            "tito_tokens", "Tokens of prompts and completions.", ["kind"], registry=self._registry
        )
        self._queued = Gauge(
            "tito_queued", "What waits for the engine.", ["unit"], registry=self._registry
        )
        self._running = Gauge(
            "tito_running_samples", "Samples handed to the engine.", registry=self._registry
        )
        self._refused = Counter(
            "tito_refused",
            "Requests turned away with 429.",
            ["caller", "limit"],
            registry=self._registry,
        )
        self._version = Gauge(
            "tito_policy_version", "Live version.", ["policy"], registry=self._registry
        )
        self._publishes = Counter(
            "tito_publishes", "Publishes that ended.", ["state"], registry=self._registry
        )
        self._publish_seconds = Histogram(
            "tito_publish_seconds",
            "Time that each stage of a successful publish took.",
            ["stage"],
            buckets=_PUBLISH_SECONDS,
            registry=self._registry,
        )

    def observe_group(self, group: Group) -> None:
        """Count a finished group's samples and tokens."""
        self._tokens.labels("prompt").inc(len(group.prompt_ids))
        for reason, count in Counted(sample.finish_reason for sample in group.samples).items():
            self._samples.labels(reason).inc(count)
        tokens = sum(len(sample.completion_ids) for sample in group.samples)
        self._tokens.labels("completion").inc(tokens)

    def observe_queue(self, queued: Cost, running_samples: int) -> None:
        """Record what waits and what runs."""
        self._queued.labels("samples").set(queued.samples)
        self._queued.labels("tokens").set(queued.tokens)
        self._running.set(running_samples)

    def observe_refusal(self, caller: str, limit: str) -> None:
        """Count a request that the queue had no room for."""
        self._refused.labels(caller, limit).inc()

    def observe_version(self, policy: str, version: int) -> None:
        """Record which version is live."""
        self._version.labels(policy).set(version)

    def observe_publish(self, policy: str, publish: Publish) -> None:
        """Record a publish that has ended, one way or another."""
        self._publishes.labels(publish.state.value).inc()
        if publish.state is PublishState.LIVE and publish.version is not None:
            self.observe_version(policy, publish.version)
            for stage, seconds in publish.timings.items():
                self._publish_seconds.labels(stage).observe(seconds)

    def render(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self._registry)
