"""An OpenAI-compatible server (vLLM, SGLang): one question in, its answer out, whatever it takes.

Three kinds of failure: one that may pass (busy, timed out, cut) is tried again; one that is this
question's own is raised as UnusableError and the next question is asked; one that every question
would meet (wrong key, unknown model, server gone) is a ServerError and ends the regeneration.
"""

import asyncio
import email.utils
import ipaddress
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx2

from trainer.errors import ServerError
from trainer.regenerate.conversation import Reply, UnusableError, encode, parse_reply
from trainer.regenerate.options import Options

_CONNECT_S = 30.0
_LONGEST_PAUSE_S = 30.0
_LONGEST_ASKED_PAUSE_S = 600.0  # a Retry-After of days would be a hang
_MAY_PASS = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
_EVERYWHERE = frozenset({401, 403, 404, 405})
_NOT_COUNTED = frozenset({429, 503})  # the server says that it is busy; the question did not fail
# vLLM answers the first, SGLang one of the others; each beside /v1.
_VERSION_PATHS = ("/version", "/server_info", "/get_server_info")


class GivenUpError(Exception):
    """A question failed on every try, each time in a way that may pass."""


@dataclass(frozen=True)
class ServerFacts:
    """Who answers: the model's root is where the server loaded it from."""

    base_url: str
    model: str
    root: str | None
    max_model_len: int | None
    version: str | None


@dataclass(frozen=True)
class _Trouble:
    """A failure that may pass. counted: it uses up one of the question's tries."""

    reason: str
    counted: bool
    retry_after_s: float | None = None


class Server:
    """Asks one server; all methods belong to one event loop. Use as an async context manager."""

    def __init__(self, options: Options, say: Callable[[str], None]) -> None:
        self._options, self._say = options, say
        key = options.api_key()
        host = urlsplit(options.base_url).hostname or ""
        self._client = httpx2.AsyncClient(
            headers={} if key is None else {"Authorization": f"Bearer {key}"},
            timeout=httpx2.Timeout(None, connect=min(_CONNECT_S, options.timeout_s)),
            limits=httpx2.Limits(max_connections=None),
            trust_env=not _is_loopback(host),  # a proxy of the environment cannot reach our own
        )
        self._gone_since_s: float | None = None  # the first failure after the last answer
        self.trouble: str | None = None  # the last failure, until the next answer

    async def __aenter__(self) -> "Server":
        return self

    async def __aexit__(self, *_exception: object) -> None:
        await self._client.aclose()

    async def describe(self) -> ServerFacts:
        """Ask who is there; waits for a server that is still starting.

        Raises: ServerError when the model is not served, naming those that are.
        """
        options = self._options
        model = options.sampling.model
        try:
            document = await self._settle(lambda: self._get("/models"), options.retries)
        except (GivenUpError, UnusableError) as error:
            raise ServerError(f"{options.base_url}/models: {error}") from error
        entries = document.get("data") if isinstance(document, dict) else None
        listed = entries if isinstance(entries, list) else []
        known = {str(e.get("id")): e for e in listed if isinstance(e, dict)}
        if known and model not in known:
            raise ServerError(
                f"{options.base_url} does not serve --model {model}; it serves"
                f" {', '.join(sorted(known))}"
            )
        entry = known.get(model, {})
        length = entry.get("max_model_len")
        return ServerFacts(
            base_url=options.base_url,
            model=model,
            root=entry.get("root"),
            max_model_len=length if isinstance(length, int) else None,
            version=await self._version(),
        )

    async def ask(self, body: dict[str, Any]) -> Reply:
        """Return the answer to a chat completion request.

        Raises: UnusableError, GivenUpError, ServerError.
        """
        reply: Reply = await self._settle(lambda: self._post(body), self._options.retries)
        return reply

    async def _settle(self, attempt: Callable[[], Any], retries: int) -> Any:
        """Try until there is an answer; waits grow from pause_s, with jitter."""
        num_failed, num_waits = 0, 0
        while True:
            found = await self._in_time(attempt)
            if not isinstance(found, _Trouble):
                self._alive()
                return found
            num_failed += found.counted
            if num_failed > retries:
                raise GivenUpError(f"{found.reason}, {num_failed} times")
            left_s = self._check_patience(found)
            await asyncio.sleep(self._pause_s(num_waits, found.retry_after_s, left_s))
            num_waits += 1

    async def _in_time(self, attempt: Callable[[], Any]) -> Any:
        limit_s = self._options.timeout_s
        try:
            async with asyncio.timeout(limit_s):
                return await attempt()
        except TimeoutError:
            return _Trouble(f"no answer within {limit_s:g} s", counted=True)
        except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
            return _Trouble(f"no connection ({error or type(error).__name__})", counted=False)
        except httpx2.RequestError as error:  # a body that cannot be unpacked is one, too
            return _Trouble(f"the connection broke ({error or type(error).__name__})", counted=True)

    async def _post(self, body: dict[str, Any]) -> Reply | _Trouble:
        response = await self._client.post(
            f"{self._options.base_url}/chat/completions",
            content=encode(body),
            headers={"Content-Type": "application/json"},
        )
        if (trouble := self._judge(response)) is not None:
            return trouble
        try:
            return parse_reply(_document(response))
        except UnusableError:
            self._alive()
            raise
        except ValueError as error:
            return _Trouble(f"the answer is not one: {error}", counted=True)

    async def _get(self, path: str) -> Any:
        """Return a document, {} from a server that has no such path."""
        response = await self._client.get(f"{self._options.base_url}{path}")
        if response.status_code == 404:
            return {}
        if (trouble := self._judge(response)) is not None:
            return trouble
        try:
            return _document(response)
        except ValueError:
            return {}

    def _judge(self, response: httpx2.Response) -> _Trouble | None:
        """Return None for success or what may pass. Raises: UnusableError, ServerError."""
        status = response.status_code
        if status == 200:
            return None
        said = f"HTTP {status}: {_words(response)}"
        if status in _MAY_PASS:
            after_s = retry_after_s(response.headers.get("retry-after"))
            return _Trouble(said, status not in _NOT_COUNTED, after_s)
        if status in _EVERYWHERE or status < 400 or status >= 500:
            hint = "; --api-key-env NAME gives a key" if status in (401, 403) else ""
            raise ServerError(f"{self._options.base_url} answers {said}{hint}")
        self._alive()
        raise UnusableError(said)

    async def _version(self) -> str | None:
        root = self._options.base_url.removesuffix("/v1")
        for path in _VERSION_PATHS:
            try:
                async with asyncio.timeout(_CONNECT_S):
                    response = await self._client.get(f"{root}{path}")
                found = _document(response) if response.status_code == 200 else {}
                version = found.get("version")
            except (TimeoutError, httpx2.RequestError, ValueError, AttributeError):
                version = None
            if isinstance(version, str):
                return version
        return None

    def _alive(self) -> None:
        self._gone_since_s = self.trouble = None

    def _check_patience(self, trouble: _Trouble) -> float:
        """Return the seconds of patience left; a wait that the server asks for does not count.

        Raises: ServerError when there were failures and no answer for patience_s.
        """
        now, patience_s = time.monotonic(), self._options.patience_s
        self.trouble = trouble.reason
        if self._gone_since_s is None:
            self._gone_since_s = now
            self._say(f"{self._options.base_url}: {trouble.reason}; trying again")
        if trouble.retry_after_s is not None:
            self._gone_since_s = max(self._gone_since_s, now + trouble.retry_after_s)
        left_s = self._gone_since_s + patience_s - now
        if left_s <= 0:
            raise ServerError(
                f"{self._options.base_url}: no answer for {patience_s:g} s (last:"
                f" {trouble.reason}); see that the server runs, then run the same command again:"
                " what is answered is kept"
            )
        return left_s

    def _pause_s(self, num_waits: int, retry_after_s: float | None, left_s: float) -> float:
        """Return the next wait; jitter spreads those who were refused at the same moment."""
        grown = min(self._options.pause_s * 2.0**num_waits, _LONGEST_PAUSE_S)
        pause_s = grown * random.uniform(0.5, 1.0)  # noqa: S311 - no secret
        if retry_after_s is not None:
            return retry_after_s + pause_s
        return min(pause_s, left_s)  # the end of patience is told in time


def retry_after_s(value: str | None) -> float | None:
    """Return the seconds of a Retry-After header, a number or a date, that are waited."""
    if value is None:
        return None
    try:
        asked_s = float(value) if value.strip()[:1].isdigit() else _until(value)
    except ValueError:
        return None
    return min(max(asked_s, 0.0), _LONGEST_ASKED_PAUSE_S)


def _until(date: str) -> float:
    return email.utils.parsedate_to_datetime(date).timestamp() - time.time()


def _document(response: httpx2.Response) -> Any:
    """Return the JSON of a body. Raises: ValueError when it is none, or nested beyond reading."""
    try:
        return response.json()
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _words(response: httpx2.Response) -> str:
    """Return what an error response says, on one line."""
    text = response.text
    try:
        document = _document(response)
        error = document.get("error", document)
        text = error.get("message", text) if isinstance(error, dict) else str(error)
    except (ValueError, AttributeError):
        pass
    return " ".join(str(text).split())[:300] or response.reason_phrase


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
