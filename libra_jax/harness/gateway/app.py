"""The gateway's ASGI application: paths, authentication, deadlines, and one answer a request.

    POST /v1/chat/completions   OpenAI's Chat Completions
    POST /v1/responses          OpenAI's Responses
    GET  /v1/responses/ID       one of the session's last responses
    POST /v1/messages           Anthropic's Messages
    POST /v1/messages/count_tokens
    GET  /v1/models             the session's model
    GET  /health                200 while the event loop answers

Each path also exists below `/s/<secret>`, for clients that can set nothing but a URL.

No middleware and no response class stands between a request and `answers.Answer`. So the session hears of a delivery in
the same step of the event loop in which the response goes to the transport: before any request that the client sends
once it has read the response.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging

from starlette import routing
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.harness.gateway import (
    answers,
    anthropic_messages,
    errors,
    exchanges,
    fields,
    openai_chat,
    openai_responses,
    outputs,
    sessions,
)

LARGE_BODY = 2**18
"""Bytes of a request from which on a thread reads it: others would wait for the event loop."""

_log = logging.getLogger(__name__)


def application(conversations: protocols.Conversations, limits: config_lib.GatewayConfig) -> ASGIApp:
    """Returns the ASGI application that serves these sessions."""
    live_sessions = sessions.Sessions(conversations, limits)
    paths = [
        routing.Route("/v1/chat/completions", _Outputs(live_sessions, limits, openai_chat.read)),
        routing.Route("/v1/responses", _Outputs(live_sessions, limits, openai_responses.read)),
        routing.Route("/v1/responses/{name}", _Responses(live_sessions, limits)),
        routing.Route("/v1/messages", _Outputs(live_sessions, limits, anthropic_messages.read)),
        routing.Route("/v1/messages/count_tokens", _Outputs(live_sessions, limits, anthropic_messages.read_count)),
        routing.Route("/v1/models", _Models(live_sessions, limits)),
        routing.Route("/v1/models/{name:path}", _Models(live_sessions, limits)),
    ]
    health = routing.Route("/health", _Health(live_sessions, limits))
    missing = _NotFound(live_sessions, limits)
    below = routing.Router(paths, redirect_slashes=False, default=missing)
    routes = [*paths, health, routing.Mount("/s/{secret}", below)]
    return routing.Router(routes, redirect_slashes=False, default=missing)


def _secret(scope: Scope) -> str:
    """Returns the key of a request: of its path, or else of its headers. Empty if it has none."""
    if secret := scope.get("path_params", {}).get("secret"):
        return str(secret)
    headers = Headers(scope=scope)
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")


class _Endpoint:
    """An ASGI application for one path: writes what `respond` does, and each error in the API's own form."""

    methods: tuple[str, ...] = ("GET", "HEAD")

    def __init__(self, live_sessions: sessions.Sessions, limits: config_lib.GatewayConfig) -> None:
        self._sessions, self._limits = live_sessions, limits

    async def respond(self, scope: Scope, receive: Receive, answer: answers.Answer) -> None:
        """Writes the answer. May raise any error."""
        raise NotImplementedError

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        answer = answers.Answer(scope, send, self._limits.write_seconds)
        try:
            async with asyncio.timeout(self._limits.request_seconds) as limit:
                if scope["method"] not in self.methods:
                    raise errors.Problem(405, f"There is only {self.methods[0]} here.", code="method_not_allowed")
                await self.respond(scope, receive, answer)
            return
        except answers.ClientDisconnected:
            answer.cut()
            return
        except errors.Problem as error:
            problem = error
        except protocols.Refused as refused:
            problem = errors.of_refusal(refused)
        except protocols.DataError as error:
            problem = errors.Problem(400, str(error))
        except protocols.LibraError as error:  # its sentence is made for readers, and the run knows of it
            problem = errors.Problem(500, str(error), code="internal_error")
        except TimeoutError as error:
            problem = self._late(answer) if limit.expired() else self._failed(error)
        except Exception as error:
            problem = self._failed(error)
        await self._write(scope, answer, problem)

    def _late(self, answer: answers.Answer) -> errors.Problem:
        seconds = self._limits.request_seconds
        if answer.awaits_body:
            return errors.Problem(408, f"The body did not arrive within {seconds:g} s.", code="deadline_exceeded")
        # Clients retry it, and the session goes on from the tokens that it has.
        return errors.Problem(504, f"The request was not answered within {seconds:g} s.", code="deadline_exceeded")

    def _failed(self, error: Exception) -> errors.Problem:
        _log.error("A request failed.", exc_info=error)
        return errors.Problem(500, "The run could not answer. Its log says why.", code="internal_error")

    async def _write(self, scope: Scope, answer: answers.Answer, problem: errors.Problem) -> None:
        try:
            if not answer.started:
                anthropic = "/v1/messages" in scope["path"] or Headers(scope=scope).get("anthropic-version")
                body = errors.in_anthropic_form(problem) if anthropic else errors.in_openai_form(problem)
                await answer.json(problem.status, body, answers.retry_headers(problem))
            elif not answer.complete:
                await answer.fail_stream(problem)
        except answers.ClientDisconnected:
            answer.cut()


class _NotFound(_Endpoint):
    methods = ("GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS")

    async def respond(self, scope: Scope, receive: Receive, answer: answers.Answer) -> None:
        path = str(scope["path"])
        hint = " Anthropic's client adds /v1 itself: give it the address without." if "/v1/v1/" in path else ""
        raise errors.Problem(404, f"The gateway has no path {path[:200]}.{hint}", code="not_found")


class _Health(_Endpoint):
    async def respond(self, scope: Scope, receive: Receive, answer: answers.Answer) -> None:
        await answer.json(200, {"status": "ok"})


class _Responses(_Endpoint):
    """Returns a response again."""

    async def respond(self, scope: Scope, receive: Receive, answer: answers.Answer) -> None:
        _, session = self._sessions.find(_secret(scope))
        name = str(scope["path_params"]["name"])
        if name not in session.responses:
            raise errors.Problem(404, f"The session keeps no response {name[:80]!r}.", code="not_found")
        await answer.json(200, session.responses[name][1])


class _Models(_Endpoint):
    """Lists the one model, in the form of the client's API."""

    async def respond(self, scope: Scope, receive: Receive, answer: answers.Answer) -> None:
        self._sessions.find(_secret(scope))
        name = self._sessions.model
        one: exchanges.Json
        everything: exchanges.Json
        if Headers(scope=scope).get("anthropic-version"):
            one = {"type": "model", "id": name, "display_name": name, "created_at": "1970-01-01T00:00:00Z"}
            everything = {"data": [one], "has_more": False, "first_id": name, "last_id": name}
        else:
            one = {"id": name, "object": "model", "created": 0, "owned_by": "libra-jax"}
            everything = {"object": "list", "data": [one]}
        await answer.json(200, one if "name" in scope["path_params"] else everything)


class _Outputs(_Endpoint):
    """Answers with outputs of the model."""

    methods = ("POST",)

    def __init__(
        self, live_sessions: sessions.Sessions, limits: config_lib.GatewayConfig, read: exchanges.Read
    ) -> None:
        super().__init__(live_sessions, limits)
        self._read_body = read

    async def respond(self, scope: Scope, receive: Receive, answer: answers.Answer) -> None:
        # The key comes first: who has none may not send a body.
        conversation, session = self._sessions.find(_secret(scope))
        answer.awaits_body = True
        body = await answers.read_body(scope, receive, self._limits.max_body_bytes)
        answer.awaits_body = False
        # The libraries of OpenAI and Anthropic mark a further try, for which they drop the answer to the first one.
        marked = Headers(scope=scope).get("x-stainless-retry-count", "0") not in ("", "0")
        with session.tries(hash(body), marked) as retry:
            session.count_request(asyncio.get_running_loop().time())
            try:
                if len(body) < LARGE_BODY:
                    exchange = self._read(body, session)
                else:
                    exchange = await asyncio.to_thread(self._read, body, session)
            except errors.Problem as problem:
                if problem.code != errors.NO_THREADS:  # the client asks again without
                    conversation.note_refusal(problem.message)
                raise
            del body
            exchange.request = dataclasses.replace(exchange.request, retry=retry)
            with session.outputs(exchange.choices):
                await answers.while_connected(receive, answer, _answer(conversation, exchange, answer))

    def _read(self, body: bytes, session: sessions.GatewaySession) -> exchanges.Exchange:
        return self._read_body(fields.parse(body), self._sessions.model, session)


async def _answer(conversation: protocols.Conversation, exchange: exchanges.Exchange, answer: answers.Answer) -> None:
    model_outputs = outputs.Outputs(conversation, exchange.request, exchange.choices)
    try:
        if exchange.streams:
            await _stream(model_outputs, exchange, answer)
        else:
            await answer.json(200, exchange.body(await model_outputs.replies()))
        await model_outputs.delivered()
    finally:
        await model_outputs.close()


async def _stream(model_outputs: outputs.Outputs, exchange: exchanges.Exchange, answer: answers.Answer) -> None:
    replies: dict[int, protocols.Reply] = {}
    async for batch in model_outputs.parts():
        events = b""
        if not answer.started:
            # Not before the first part: a refusal before it has its own HTTP status.
            await answer.start_stream(exchange.failed)
            events = exchange.start()
        for choice, part in batch:
            if isinstance(part, protocols.Reply):
                replies[choice] = part
                events += exchange.end(choice, part)
            else:
                events += exchange.part(choice, part)
        if len(replies) < exchange.choices:
            await answer.write(events)
    await answer.end_stream(events + exchange.close([replies[choice] for choice in range(exchange.choices)]))
