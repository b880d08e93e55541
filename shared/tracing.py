"""OpenTelemetry traces through both processes: a step, its rollouts, the engine, the publish.

The standard variables decide. With ``OTEL_EXPORTER_OTLP_ENDPOINT`` (or ``.._TRACES_ENDPOINT``) set,
spans are sent there by OTLP over HTTP, and requests carry a ``traceparent`` header, as W3C has it.
Without, nothing is imported and all of this does nothing.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import httpx
    from opentelemetry.sdk.trace import TracerProvider

_BASE, _EXACT = "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
_provider: TracerProvider | None = None


def endpoint() -> str | None:
    """Where spans are sent; None if nobody has asked for any."""
    base = os.environ.get(_BASE)
    return os.environ.get(_EXACT) or (f"{base.rstrip('/')}/v1/traces" if base else None)


@contextlib.contextmanager
def exported(service: str) -> Iterator[None]:
    """Send this process's spans while it lasts, if there is an endpoint.

    Args:
        service: what the process is called, unless ``OTEL_SERVICE_NAME`` says otherwise.
    """
    global _provider  # noqa: PLW0603 - spans begin anywhere in a process, which has one name
    url = endpoint()
    if url is None:
        yield
        return
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    name = os.environ.get("OTEL_SERVICE_NAME", service)
    _provider = TracerProvider(resource=Resource.create({"service.name": name}))
    _provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url)))
    try:
        yield
    finally:
        provider, _provider = _provider, None
        provider.shutdown()


@contextlib.contextmanager
def span(
    name: str, headers: Mapping[str, str] | None = None, **attributes: str | int | float
) -> Iterator[Any]:
    """A piece of work, within the one that encloses it.

    Args:
        name: of the kind of work, such as ``publish load``.
        headers: of a request; the span then belongs to that of the caller.
        attributes: what is known at the start.

    Yields:
        The span, whose ``set_attribute`` adds to it; None when nothing is exported.
    """
    if _provider is None:
        yield None
        return
    from opentelemetry import propagate

    parent = None if headers is None else propagate.extract(headers)
    tracer = _provider.get_tracer("tito")
    with tracer.start_as_current_span(name, context=parent, attributes=attributes) as begun:
        yield begun


def headers() -> dict[str, str]:
    """What tells another process which span it works for."""
    carried: dict[str, str] = {}
    if _provider is not None:
        from opentelemetry import propagate

        propagate.inject(carried)
    return carried


def carry(request: httpx.Request) -> None:
    """Put these headers on a request; a hook of httpx's clients."""
    request.headers.update(headers())


async def carry_async(request: httpx.Request) -> None:
    """The same for its asynchronous client."""
    carry(request)
