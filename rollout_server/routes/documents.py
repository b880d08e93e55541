"""What ``/openapi.json`` says of requests that routes read by themselves.

Bodies may be msgpack or JSON and are read off the event loop, queries know no unknown fields, so
FastAPI sees neither; these put the same models into the document.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from shared.protocol import FENCE_HEADER, JSON, MSGPACK


def body(model: type[BaseModel], example: dict[str, Any] | None = None) -> dict[str, Any]:
    """A document of a model, with an example that the server accepts, if there can be one."""
    schema = _inlined(model.model_json_schema())
    shown = {} if example is None else {"example": example}
    content = {JSON: {"schema": schema, **shown}, MSGPACK: {"schema": schema}}
    return {"requestBody": {"required": True, "content": content}}


def query(model: type[BaseModel]) -> list[dict[str, Any]]:
    """Each field of a model as a parameter of the query."""
    properties = _inlined(model.model_json_schema())["properties"]
    return [
        {"name": name, "in": "query", "required": False, "schema": schema}
        for name, schema in properties.items()
    ]


def header(name: str, description: str, pattern: str) -> dict[str, Any]:
    """A header that may be sent."""
    schema = {"type": "string", "pattern": pattern}
    return {"name": name, "in": "header", "description": description, "schema": schema}


FENCE = header(FENCE_HEADER, "Number of the lease under which it is published.", "^[0-9]{1,18}$")


def _inlined(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema with its definitions where they are used: none of ours refers to itself."""
    definitions = schema.pop("$defs", {})

    def walk(node: Any) -> Any:
        if isinstance(node, list):
            return [walk(item) for item in node]
        if not isinstance(node, dict):
            return node
        if "$ref" in node:
            return walk(definitions[node["$ref"].rpartition("/")[2]])
        return {key: walk(value) for key, value in node.items()}

    inlined: dict[str, Any] = walk(schema)
    return inlined
