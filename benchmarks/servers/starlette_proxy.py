"""A proxy as one writes it with Starlette and httpx: ``python -m benchmarks.servers.starlette_proxy PORT URL``.

It streams the answer, has one client with a pool large enough, and runs on uvloop and httptools.
"""

import sys
from collections.abc import AsyncIterator

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

NOT_PASSED_ON = {"connection", "content-length", "host", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade"}
_limits = httpx.Limits(max_connections=512, max_keepalive_connections=512)
_client = httpx.AsyncClient(base_url=sys.argv[2], limits=_limits, timeout=60)


async def proxy(request: Request) -> StreamingResponse:
    headers = [(name, value) for name, value in request.headers.items() if name not in NOT_PASSED_ON]
    asked = _client.build_request(request.method, request.url.path, headers=headers, content=await request.body())
    answer = await _client.send(asked, stream=True)

    async def body() -> AsyncIterator[bytes]:
        try:
            async for part in answer.aiter_raw():
                yield part
        finally:
            await answer.aclose()

    kept = {name: value for name, value in answer.headers.items() if name not in NOT_PASSED_ON - {"content-length"}}
    return StreamingResponse(body(), answer.status_code, kept)


if __name__ == "__main__":
    app = Starlette(routes=[Route("/{path:path}", proxy, methods=["GET", "POST"])])
    uvicorn.run(app, port=int(sys.argv[1]), log_level="error", access_log=False, loop="uvloop", http="httptools")
