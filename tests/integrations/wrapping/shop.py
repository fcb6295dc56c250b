"""A small HTTP service with an OpenAPI description, which can be made to misbehave. Run, it tells its port."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import sys
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
KEY = "the-shop's-key"
ITEM = {
    "type": "object",
    "properties": {
        "id": {"type": "integer", "readOnly": True},
        "name": {"type": "string"},
        "price": {"type": "number", "minimum": 0, "exclusiveMinimum": True},
        "note": {"type": "string", "nullable": True},
        "parts": {"type": "array", "items": {"$ref": "#/components/schemas/Item"}},
    },
    "required": ["id", "name", "price"],
}
DOCUMENT: dict[str, Any] = {
    "openapi": "3.0.3",
    "info": {"title": "The Shop", "version": "1"},
    "security": [{"key": []}],
    "components": {
        "schemas": {"Item": ITEM},
        "securitySchemes": {"key": {"type": "apiKey", "in": "header", "name": "X-Key"}},
    },
    "paths": {
        "/items": {
            "get": {
                "operationId": "listItems",
                "summary": "What there is.",
                "parameters": [
                    {"name": "tag", "in": "query", "schema": {"type": "array", "items": {"type": "string"}}},
                    {"name": "limit", "in": "query", "schema": {"type": "integer"}},
                ],
                "responses": {},
            },
            "post": {
                "operationId": "addItem",
                "requestBody": {
                    "required": True,
                    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Item"}}},
                },
                "responses": {},
            },
        },
        "/items/{id}": {
            "parameters": [{"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}],
            "get": {"operationId": "getItem", "responses": {}},
            "delete": {"operationId": "deleteItem", "responses": {}},
        },
        "/open": {"get": {"operationId": "open", "security": [], "responses": {}}},
        "/picture": {"get": {"operationId": "picture", "responses": {}}},
        "/does/{what}": {
            "parameters": [{"name": "what", "in": "path", "required": True, "schema": {"type": "string"}}],
            "get": {"operationId": "does", "responses": {}},
            "post": {"operationId": "doesOnce", "responses": {}},
        },
        "/upload": {
            "post": {"operationId": "upload", "requestBody": {"content": {"multipart/form-data": {}}}, "responses": {}}
        },
    },
}

items: dict[int, dict[str, Any]] = {}
asked: list[str] = []
"""What was asked for so far, by paths."""


async def listed(request: Request) -> Response:
    return JSONResponse({"items": list(items.values()), "query": request.query_params.multi_items()})


async def added(request: Request) -> Response:
    item = await request.json()
    id = len(items) + 1
    items[id] = {**item, "id": id}
    return JSONResponse(items[id], 201)


async def one(request: Request) -> Response:
    given = request.path_params["id"]
    if not given.isdigit() or int(given) not in items:
        return JSONResponse({"error": f"there is no item {given}"}, 404)
    if request.method == "DELETE":
        del items[int(given)]
        return Response(status_code=204)
    return JSONResponse(items[int(given)])


async def does(request: Request) -> Response:
    what = request.path_params["what"]
    if what.startswith("count-"):
        return JSONResponse({"asked": asked.count(what.removeprefix("count-"))})
    asked.append(what)
    if what.isdigit():
        return JSONResponse({"error": "it said so"}, int(what), headers={"Retry-After": "0"})
    if what == "busy-once":
        return JSONResponse({"times": asked.count(what)}, 429 if asked.count(what) == 1 else 200)
    if what == "away":
        return RedirectResponse("http://127.0.0.2:9/elsewhere")
    if what == "near":
        return RedirectResponse("/open", 307)
    if what == "large":
        return Response(b"x" * (5 * 1024 * 1024), media_type="text/plain")
    if what == "slow":
        await asyncio.sleep(60)
    if what == "death":
        os._exit(1)
    return JSONResponse({"asked": asked.count(what)})


def guarded(endpoint: Any) -> Any:
    async def answer(request: Request) -> Response:
        if request.headers.get("x-key") != KEY:
            return JSONResponse({"error": "who are you?"}, 401)
        return await endpoint(request)

    return answer


async def opened(request: Request) -> Response:
    return JSONResponse({"open": True, "key": request.headers.get("x-key")})


async def picture(request: Request) -> Response:
    return Response(PNG, media_type="image/png")


async def document(request: Request) -> Response:
    return JSONResponse(DOCUMENT)


APP = Starlette(
    routes=[
        Route("/items", guarded(listed), methods=["GET"]),
        Route("/items", guarded(added), methods=["POST"]),
        Route("/items/{id:path}", guarded(one), methods=["GET", "DELETE"]),
        Route("/open", opened),
        Route("/picture", guarded(picture)),
        Route("/does/{what}", guarded(does), methods=["GET", "POST"]),
        Route("/openapi.json", document),
    ]
)


def main(app: Any) -> None:
    """Serve on a free port, and tell it."""

    class Server(uvicorn.Server):
        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets)
            print(json.dumps(self.servers[0].sockets[0].getsockname()[1]), flush=True)

    Server(uvicorn.Config(app, port=0, log_level="error")).run()


if __name__ == "__main__":
    sys.exit(main(APP))
