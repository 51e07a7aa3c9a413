"""A small OpenAI proxy in front of prefill and decode servers of vLLM.

Run it:  python examples/vllm/proxy.py --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200

Every request goes to one prefill and one decode server, in turn. ``--dispatch sequential`` asks prefill first and hands
its answer's ``kv_transfer_params`` to decode; they are those of one prompt, so a list of several prompts is refused.
``--dispatch concurrent`` asks both at once, so that decode has its blocks ready while prefill computes; the proxy then
has to know prefill's engine id and where it listens: ``--prefill http://127.0.0.1:8100,p0,127.0.0.1:5600``. A list of
prompts is welcome there. The first token that leaves waits for prefill's answer, so that prefill's error can take its
place.

A server that fails ends the request on the other one, too, and so does a client that hangs up.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http
import itertools
import json
import logging
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
CLIENT_IS_GONE = 499  # nginx's number; nobody reads it

logger = logging.getLogger("proxy")


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


class Failed(Exception):
    """A request ends with this answer."""

    def __init__(self, status: int, content: bytes) -> None:
        self.status, self.content = status, content

    @classmethod
    def because(cls, status: int, message: str) -> Failed:
        """In OpenAI's form."""
        error = {"message": message, "type": http.HTTPStatus(status).phrase, "param": None, "code": status}
        return cls(status, json.dumps({"error": error}).encode())

    @classmethod
    def to_reach(cls, url: str, exc: httpx.HTTPError) -> Failed:
        """A server that is not there, or broke off."""
        message = f"{url}: {exc or type(exc).__name__}"
        logger.warning(message)
        return cls.because(503 if isinstance(exc, httpx.ConnectError) else 502, message)


class Proxy:
    """Sends each request to a pair of servers."""

    def __init__(self, prefills: list[PrefillServer], decodes: list[str], *, is_concurrent: bool) -> None:
        self._prefills = itertools.cycle(prefills)
        self._decodes = itertools.cycle(decodes)
        self._is_concurrent = is_concurrent
        # No connection is used twice: vLLM closes those that are idle, now and then just as another request sets out.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._client = httpx.AsyncClient(timeout=None, limits=limits)

    async def handle(self, request: Request) -> Response:
        """One completion, unless the client hangs up before."""
        answering = asyncio.create_task(self._answer(request.url.path, await request.body()))
        leaving = asyncio.create_task(_until_gone(request))
        try:
            await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
            return await answering if answering.done() else Response(status_code=CLIENT_IS_GONE)
        finally:
            leaving.cancel()
            answering.cancel()  # both legs with it

    async def models(self) -> Response:
        """What decode serves."""
        answer = await self._send("GET", f"{next(self._decodes)}/v1/models")
        return await _passed_on(answer, is_stream=False)

    async def health(self) -> Response:
        """The proxy is up."""
        return JSONResponse({"status": "ok"})

    async def close(self) -> None:
        """Hang up on everybody."""
        await self._client.aclose()

    async def _answer(self, path: str, raw: bytes) -> Response:
        body = _parsed(raw)
        prefill, decode = next(self._prefills), f"{next(self._decodes)}{path}"
        dispatch = self._concurrent if self._is_concurrent else self._sequential
        answer = await dispatch(prefill, decode, path, body, f"{uuid.uuid4()}")
        return await _passed_on(answer, is_stream=bool(body.get("stream")))

    async def _sequential(
        self, prefill: PrefillServer, decode: str, path: str, body: dict[str, Any], name: str
    ) -> httpx.Response:
        if _num_prompts(body) > 1:
            raise Failed.because(400, "a list of prompts needs a proxy with --dispatch concurrent; send one at a time")
        answer = await self._prefill(prefill, path, body, {"do_remote_decode": True}, name)
        kv = answer.json().get("kv_transfer_params")
        return await self._send("POST", decode, body | {"kv_transfer_params": kv}, name)

    async def _concurrent(
        self, prefill: PrefillServer, decode: str, path: str, body: dict[str, Any], name: str
    ) -> httpx.Response:
        asked = {"do_remote_decode": True, "transfer_id": name}
        told = body | {"kv_transfer_params": prefill.source() | {"transfer_id": name}}
        legs = [
            asyncio.create_task(self._prefill(prefill, path, body, asked, name)),
            asyncio.create_task(self._send("POST", decode, told, name)),
        ]
        try:
            return (await asyncio.gather(*legs))[1]
        except BaseException:  # one of them failed, or the client is gone: neither is left waiting
            await _hang_up(legs)
            raise

    async def _prefill(
        self, server: PrefillServer, path: str, body: dict[str, Any], kv: dict[str, Any], name: str
    ) -> httpx.Response:
        """Have the prompt computed, once for all samples. The token that comes with it is decode's to find again."""
        short = body | {"max_tokens": 1, "stream": False, "kv_transfer_params": kv}
        for unwanted in ("stream_options", "min_tokens"):
            short.pop(unwanted, None)
        for alone in {"max_completion_tokens", "n", "best_of"} & body.keys():
            short[alone] = 1
        return await _read(await self._send("POST", server.url + path, short, name))

    async def _send(self, method: str, url: str, body: dict[str, Any] | None = None, name: str = "") -> httpx.Response:
        """What a server has to say; its head, that is. Raises Failed if it is no success."""
        request = self._client.build_request(method, url, json=body, headers={"X-Request-Id": name} if name else {})
        try:
            answer = await self._client.send(request, stream=True)
        except httpx.HTTPError as exc:
            raise Failed.to_reach(url, exc) from exc
        if not answer.is_success:
            raise Failed(answer.status_code, (await _read(answer)).content)
        return answer


def _parsed(raw: bytes) -> dict[str, Any]:
    with contextlib.suppress(ValueError):
        body = json.loads(raw)
        if isinstance(body, dict):
            return body
    raise Failed.because(400, "the body is no JSON object")


def _num_prompts(body: dict[str, Any]) -> int:
    """A prompt is a text or a list of token ids."""
    prompt = body.get("prompt")
    if not isinstance(prompt, list) or all(isinstance(token, int) for token in prompt):
        return 1
    return len(prompt)


async def _read(answer: httpx.Response) -> httpx.Response:
    try:
        await answer.aread()
    except httpx.HTTPError as exc:
        raise Failed.to_reach(f"{answer.url}", exc) from exc
    return answer


async def _passed_on(answer: httpx.Response, *, is_stream: bool) -> Response:
    if is_stream:
        return StreamingResponse(_pieces(answer), media_type="text/event-stream")
    return Response((await _read(answer)).content, media_type="application/json")


async def _pieces(answer: httpx.Response) -> AsyncIterator[bytes]:
    try:
        async for piece in answer.aiter_raw():
            yield piece
    except httpx.HTTPError as exc:  # too late for another status
        yield b"\n\ndata: " + Failed.to_reach(f"{answer.url}", exc).content + b"\n\n"
    finally:
        await answer.aclose()  # a client that hung up: decode hears of it


async def _until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _hang_up(legs: list[asyncio.Task[httpx.Response]]) -> None:
    for leg in legs:
        leg.cancel()
    for ended in await asyncio.gather(*legs, return_exceptions=True):
        if isinstance(ended, httpx.Response):
            await ended.aclose()  # decode has begun to answer


async def _failure(_: Request, exc: Failed) -> Response:
    return Response(exc.content, exc.status, media_type="application/json")


def application(proxy: Proxy) -> FastAPI:
    """The web application around it."""

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await proxy.close()

    app = FastAPI(lifespan=lifespan)
    app.add_exception_handler(Failed, _failure)
    for path in PATHS:
        app.add_api_route(path, proxy.handle, methods=["POST"], response_model=None)
    app.add_api_route("/v1/models", proxy.models, methods=["GET"], response_model=None)
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
    logging.basicConfig(format="%(asctime)s proxy: %(message)s")
    app = application(Proxy(prefills, options.decode, is_concurrent=is_concurrent))
    config = uvicorn.Config(app, host=options.host, port=options.port, log_level="warning")
    listener = config.bind_socket()
    listener.listen()  # whoever connects from here on is answered
    print(f"proxy listens on http://{options.host}:{options.port}, dispatch {options.dispatch}", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        uvicorn.Server(config).run([listener])
    return 0


if __name__ == "__main__":
    sys.exit(main())
