"""A small OpenAI proxy in front of prefill and decode servers of vLLM.

Run it:  python examples/vllm/proxy.py --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200

Every request goes to one prefill and one decode server, in turn. ``--dispatch sequential`` asks prefill first and hands
its answer's ``kv_transfer_params`` to decode. ``--dispatch concurrent`` asks both at once, so that decode has its
blocks ready while prefill computes; the proxy then has to know prefill's engine id and where it listens:
``--prefill http://127.0.0.1:8100,p0,127.0.0.1:5600``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import sys
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

PATHS = ("/v1/completions", "/v1/chat/completions")


@dataclass(frozen=True)
class PrefillServer:
    """Where its API is, and for concurrent dispatch its engine id and the address that kvpush listens on."""

    url: str
    engine_id: str = ""
    kv_address: str = ""

    def source(self) -> dict[str, Any]:
        """What decode has to know to be written to."""
        host, _, port = self.kv_address.rpartition(":")
        return {
            "do_remote_prefill": True,
            "remote_engine_id": self.engine_id,
            "remote_host": host,
            "remote_port": int(port),
        }


class Proxy:
    """Sends each request to a pair of servers."""

    def __init__(self, prefills: list[PrefillServer], decodes: list[str], *, is_concurrent: bool) -> None:
        self._prefills = itertools.cycle(prefills)
        self._decodes = itertools.cycle(decodes)
        self._is_concurrent = is_concurrent
        # No connection is used twice: vLLM closes those that are idle, now and then just as another request sets out.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._client = httpx.AsyncClient(timeout=None, limits=limits)
        self._prefilling: set[asyncio.Task[Any]] = set()

    async def handle(self, request: Request) -> Response:
        """One completion."""
        body = await request.json()
        path = request.url.path
        prefill, decode = next(self._prefills), next(self._decodes)
        name = f"{uuid.uuid4()}"
        if self._is_concurrent:
            asked = {"do_remote_decode": True, "transfer_id": name}
            task = asyncio.create_task(self._prefill(prefill, path, body, asked, name))
            self._prefilling.add(task)  # a task that nobody keeps may vanish
            task.add_done_callback(self._prefilling.discard)
            kv = prefill.source() | {"transfer_id": name}
        else:
            answer = await self._prefill(prefill, path, body, {"do_remote_decode": True}, name)
            if answer.status_code != 200:
                return Response(answer.content, answer.status_code, media_type="application/json")
            kv = answer.json()["kv_transfer_params"]
        return await self._decode(decode, path, body | {"kv_transfer_params": kv}, name)

    async def _prefill(
        self, server: PrefillServer, path: str, body: dict[str, Any], kv: dict[str, Any], name: str
    ) -> httpx.Response:
        """Have the prompt computed. The one token that comes with it is decode's to find again."""
        short = body | {"max_tokens": 1, "stream": False, "kv_transfer_params": kv}
        for unwanted in ("stream_options", "min_tokens"):
            short.pop(unwanted, None)
        if "max_completion_tokens" in body:
            short["max_completion_tokens"] = 1
        return await self._client.post(server.url + path, json=short, headers={"X-Request-Id": name})

    async def _decode(self, url: str, path: str, body: dict[str, Any], name: str) -> Response:
        request = self._client.build_request("POST", url + path, json=body, headers={"X-Request-Id": name})
        answer = await self._client.send(request, stream=True)
        if not body.get("stream"):
            await answer.aread()
            return Response(answer.content, answer.status_code, media_type="application/json")
        return StreamingResponse(_lines(answer), answer.status_code, media_type="text/event-stream")

    async def health(self) -> Response:
        """The proxy is up."""
        return JSONResponse({"status": "ok"})

    async def close(self) -> None:
        """Hang up on everybody."""
        await self._client.aclose()


async def _lines(answer: httpx.Response) -> AsyncIterator[bytes]:
    try:
        async for piece in answer.aiter_raw():
            yield piece
    finally:
        await answer.aclose()  # a client that hung up: decode hears of it


def application(proxy: Proxy) -> FastAPI:
    """The web application around it."""

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await proxy.close()

    app = FastAPI(lifespan=lifespan)
    for path in PATHS:
        app.add_api_route(path, proxy.handle, methods=["POST"], response_model=None)
    app.add_api_route("/health", proxy.health, methods=["GET"], response_model=None)
    return app


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--prefill", action="append", required=True, metavar="URL[,ENGINE_ID,HOST:PORT]")
    parser.add_argument("--decode", action="append", required=True, metavar="URL")
    parser.add_argument("--dispatch", choices=("sequential", "concurrent"), default="sequential")
    options = parser.parse_args()
    prefills = [PrefillServer(*text.split(",")) for text in options.prefill]
    is_concurrent = options.dispatch == "concurrent"
    if is_concurrent and not all(server.kv_address for server in prefills):
        parser.error("concurrent dispatch needs --prefill URL,ENGINE_ID,HOST:PORT")
    proxy = Proxy(prefills, options.decode, is_concurrent=is_concurrent)
    uvicorn.run(application(proxy), host=options.host, port=options.port, log_level="warning")
    return 0


if __name__ == "__main__":
    sys.exit(main())
