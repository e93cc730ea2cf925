"""`/openapi.json`: the routes in OpenAPI 3.1.  Bodies are described by the types that read them."""

from collections.abc import Mapping
from typing import Any

import msgspec

import jaxserve
from jaxserve import request as limits
from jaxserve.openai_api import bodies
from jaxserve.server import files_batches, text_process

_REF = "#/components/schemas/"
# What `SamplingParams` and admission check beside types.
_BOUNDS: Mapping[str, dict[str, Any]] = {
    "max_tokens": {"minimum": 0, "maximum": limits.MAX_INT},
    "max_completion_tokens": {"minimum": 0, "maximum": limits.MAX_INT},
    "min_tokens": {"minimum": 0, "maximum": limits.MAX_INT},
    "temperature": {"minimum": 0},
    "top_k": {"minimum": -1, "maximum": limits.MAX_INT},
    "top_p": {"minimum": 0, "maximum": 1},
    "min_p": {"minimum": 0, "maximum": 1},
    "presence_penalty": {"minimum": -2, "maximum": 2},
    "frequency_penalty": {"minimum": -2, "maximum": 2},
    "repetition_penalty": {"minimum": 0.01, "maximum": 100},
    "n": {"minimum": 1, "maximum": limits.MAX_SAMPLES},
    "seed": {"minimum": -(2**63), "maximum": 2**64 - 1},
    "stop": {"minLength": 1, "maxLength": limits.MAX_STOP_LENGTH,
             "maxItems": limits.MAX_STOP_STRINGS},
    "stop_token_ids": {"maxItems": limits.MAX_STOP_IDS},
    "logit_bias": {"maxProperties": limits.MAX_BIAS},
    "prompt_logprobs": {"minimum": 0, "maximum": limits.MAX_LOGPROBS},
    "logprobs": {"minimum": 0, "maximum": limits.MAX_LOGPROBS},
    "top_logprobs": {"minimum": 0, "maximum": limits.MAX_LOGPROBS},
}  # fmt: skip
_TEXT = {"type": ["string", "null"]}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": _TEXT,
                "code": {"type": "string"},
            },
        }
    },
}
_OBJECT = {"type": "object"}
_UPLOAD = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": {"type": "string", "contentMediaType": "application/octet-stream"},
        "purpose": {"const": "batch"},
    },
}


def describe(model: str, *, has_files: bool) -> dict[str, Any]:
    """The whole description; `has_files`: with /v1/files and /v1/batches."""
    paths: dict[str, Any] = {
        "/v1/chat/completions": {"post": _post("Answers a chat.", "Chat", streams=True)},
        "/v1/completions": {"post": _post("Continues prompts.", "Text", streams=True)},
        "/v1/models": {"get": _get("Lists what is served.")},
        "/v1/models/{name}": {"get": _get("One of them.", "name")},
        "/tokenize": {"post": _post("Token ids of a text or a chat.", "Tokenize")},
        "/detokenize": {"post": _post("Text of token ids.", "Detokenize")},
        "/health": {"get": _probe("503: a restart would help.")},
        "/ready": {"get": _probe("200: a request would be taken.")},
        "/metrics": {"get": _get("Figures, for Prometheus.", media="text/plain")},
    }
    types = [*bodies.BODIES, text_process.Tokenize, text_process.Detokenize]
    if has_files:
        types.append(files_batches.NewBatch)
        paths |= _file_paths()
    _, components = msgspec.json.schema_components(types, ref_template=_REF + "{name}")
    schemas = _public(components)
    for name in ("Chat", "Text"):
        _narrow(schemas[name]["properties"])
    schemas["Error"] = _ERROR
    return {
        "openapi": "3.1.0",
        "info": {"title": f"jaxserve: {model}", "version": jaxserve.__version__},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _file_paths() -> dict[str, Any]:
    upload = _post("Keeps a JSONL file of batch lines.", "")
    upload["requestBody"]["content"] = {"multipart/form-data": {"schema": _UPLOAD}}
    raw = "application/octet-stream"
    delete = _get("Forgets a file.", "name")
    return {
        "/v1/files": {"get": _get("Lists files.", query=True), "post": upload},
        "/v1/files/{name}": {"get": _get("A file's record.", "name"), "delete": delete},
        "/v1/files/{name}/content": {"get": _get("What is in it.", "name", media=raw)},
        "/v1/batches": {
            "get": _get("Lists batches.", query=True),
            "post": _post("Runs a file.", "NewBatch"),
        },
        "/v1/batches/{name}": {"get": _get("How a batch is doing.", "name")},
        "/v1/batches/{name}/cancel": {"post": _get("Ends a batch.", "name")},
    }


def _public(components: Mapping[str, Any]) -> dict[str, Any]:
    """Under names without the underscore of a module's own."""
    text = msgspec.json.encode(components).decode().replace(f"{_REF}_", _REF)
    return {name.lstrip("_"): schema for name, schema in msgspec.json.decode(text).items()}


def _narrow(properties: dict[str, Any]) -> None:
    """What the types do not say."""
    for name, bounds in _BOUNDS.items():
        if name in properties:
            properties[name] |= bounds
    for name, values in bodies.NEUTRAL.items():
        properties[name] = {"enum": [None, *values]}


def _probe(summary: str) -> dict[str, Any]:
    probe = _get(summary)
    content = {"application/json": {"schema": _OBJECT}}
    probe["responses"]["503"] = {"description": "No.", "content": content}
    return probe


def _get(
    summary: str, name: str = "", *, media: str = "application/json", query: bool = False
) -> dict[str, Any]:
    schema = _OBJECT if media == "application/json" else {"type": "string"}
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    ]
    if query:
        number = {"type": "integer", "minimum": 1, "maximum": 10_000}
        parameters = [
            {"name": "limit", "in": "query", "required": False, "schema": number},
            {"name": "after", "in": "query", "required": False, "schema": {"type": "string"}},
        ]
    return {
        "summary": summary,
        "parameters": parameters if name or query else [],
        "responses": _responses({media: {"schema": schema}}),
    }


def _post(summary: str, body: str, *, streams: bool = False) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": _OBJECT}}
    if streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    schema = {"$ref": _REF + body}
    return {
        "summary": summary,
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        "responses": _responses(content),
    }


def _responses(content: dict[str, Any]) -> dict[str, Any]:
    error = {"application/json": {"schema": {"$ref": _REF + "Error"}}}
    return {
        "200": {"description": "Done.", "content": content},
        "default": {"description": "Why not.", "content": error},
    }
