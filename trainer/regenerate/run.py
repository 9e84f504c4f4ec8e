"""One regeneration from the input to the output, over as many runs as it takes.

OUTPUT.journal holds what is settled while the work goes on. At its end OUTPUT is written in the
input's order, OUTPUT.rejected lists the lines that gave no conversation, and OUTPUT.meta.json tells
settings, servers and counts. Killed and run again, no line is asked again that the journal has;
conversations in flight, at most --concurrency of them, begin anew.
"""

import asyncio
import hashlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trainer.contract.durable import sync, write_by_rename
from trainer.errors import DataError, ServerError
from trainer.regenerate.conversation import Chat, Reply, UnusableError, encode, parse_chat
from trainer.regenerate.journal import ANSWER, GIVEN_UP, REFUSED, Journal
from trainer.regenerate.options import Options
from trainer.regenerate.progress import Progress, say
from trainer.regenerate.server import GivenUpError, Server, ServerFacts

VERSION = 1
# A server that refuses this many at the start, and answers none, refuses what all have in common.
_ALL_REFUSED = 20
_SYNC_S = 2.0


@dataclass(frozen=True)
class Files:
    """What lies beside the output."""

    output: Path

    @property
    def journal(self) -> Path:
        """Entries while the work goes on."""
        return self.output.with_name(f"{self.output.name}.journal")

    @property
    def rejected(self) -> Path:
        """Lines without a conversation: number, reason, id."""
        return self.output.with_name(f"{self.output.name}.rejected")

    @property
    def meta(self) -> Path:
        """Settings, servers and counts."""
        return self.output.with_name(f"{self.output.name}.meta.json")


@dataclass(frozen=True)
class InputFacts:
    """The input as it was when the regeneration began."""

    path: str
    sha256: str
    num_lines: int
    num_chats: int  # lines that are not blank


def regenerate(options: Options) -> None:
    """Ask for every answer and write the output.

    Raises: DataError, ConfigError, or ServerError when the server is gone or some questions got no
    answer; the same command goes on from there.
    """
    facts = _input_facts(options.input)
    try:
        _regenerate(options, Files(options.output), facts)
    except OSError as error:  # a full disk, a directory that may not be written
        raise DataError(
            f"{error.filename or options.output}: {error.strerror or error}; what is answered is"
            " kept: mend this, then run the same command again"
        ) from error


def _regenerate(options: Options, files: Files, facts: InputFacts) -> None:
    settings = {
        "v": VERSION,
        "sampling": options.sampling.to_dict(),
        "input_sha256": facts.sha256,
    }
    if _is_complete(options, files, settings):
        return
    journal = Journal(files.journal, facts.num_lines)
    try:
        if _is_complete(options, files, settings):  # another process came to its end meanwhile
            return
        if journal.has_answers and journal.settings is not None:
            _require_same(journal.settings, settings, files)
        else:
            journal.begin(settings)
        run = _Run(options, files, facts, journal)
        asyncio.run(run.ask_all())
        counts = run.write_output()
        if not counts["given_up"]:
            files.journal.unlink()  # while it is held: nobody else has begun to fill it
    finally:
        journal.close()
    if counts["given_up"]:
        held = f"; {options.output} holds the others" if counts["answered"] else ""
        raise ServerError(
            f"{counts['given_up']} of {facts.num_chats} conversations got no answer in"
            f" {options.retries + 1} tries each ({files.rejected} names them){held}. The same"
            " command asks them again"
        )


def _is_complete(options: Options, files: Files, settings: dict[str, Any]) -> bool:
    """Say whether there is nothing left to do. Raises: DataError for a file of somebody else."""
    meta = _read_meta(files)
    if meta is None and options.output.exists():
        raise DataError(f"{options.output} is there and no output of regenerate; name another one")
    if meta is None or meta["state"] != "finished" or not options.output.is_file():
        return False
    _require_same(meta["settings"], settings, files)
    files.journal.unlink(missing_ok=True)  # a kill may have come before this
    say(f"{options.output} is complete: {_told(meta['counts'])}; nothing was asked")
    return True


class _Run:
    """One run of the program over the lines that are not settled yet."""

    def __init__(self, options: Options, files: Files, facts: InputFacts, journal: Journal) -> None:
        self._options, self._files, self._facts = options, files, facts
        self._journal = journal
        settled = sum(journal.is_settled(n) for n in range(1, facts.num_lines + 1))
        self._progress = Progress(facts.num_chats, settled)
        self._any_answer = journal.has_answers
        self._early_refusals: list[tuple[int, dict[str, str]]] = []
        self._settings = options.sampling.digest
        self._server_version: str | None = None

    async def ask_all(self) -> None:
        """Ask for every answer that is missing, ``concurrency`` conversations at a time."""
        lines = self._unsettled()
        first = next(lines, None)
        if first is None:
            return
        async with Server(self._options, say) as server:
            await self._greet(server)
            ticker = asyncio.create_task(self._tick(server))
            workers = [
                asyncio.create_task(self._work(lines, server, first if n == 0 else None))
                for n in range(self._options.concurrency)
            ]
            try:
                await _all_or_first_error(workers)
            finally:
                ticker.cancel()
                self._progress.end()
        for number, told in self._early_refusals:
            self._refuse(number, told)

    def write_output(self) -> dict[str, int]:
        """Write output, rejected lines and the sidecar from the journal; returns the counts."""
        counts = dict.fromkeys(("answered", "cut", "rejected", "given_up"), 0)
        counts["answer_tokens"] = 0
        output = _Partial(self._files.output)
        rejected = _Partial(self._files.rejected)
        for number, kind, value in self._journal.entries():
            if kind == ANSWER:
                _count(counts, value)
                output.write(encode(value) + b"\n")
            else:
                counts["rejected" if kind == REFUSED else "given_up"] += 1
                rejected.write(encode({"line": number} | value) + b"\n")
        if not counts["answered"]:
            output.finish(keep=False)
            rejected.finish()
            if counts["given_up"]:  # the server's fault, not the input's
                return counts
            raise DataError(
                f"{self._options.input}: no line gave a conversation; {self._files.rejected} tells"
                " why for each"
            )
        rejected.finish(keep=counts["rejected"] + counts["given_up"] > 0)
        output.finish()
        state = "incomplete" if counts["given_up"] else "finished"
        self._write_meta(state, None, counts)
        say(f"{self._files.output}: {_told(counts)}")
        return counts

    async def _greet(self, server: Server) -> None:
        """Learn who answers, and refuse to go on with another model under the same name."""
        facts = await server.describe()
        meta = _read_meta(self._files) or {}
        for old in meta.get("servers", ()):
            if self._journal.has_answers and old["root"] and facts.root not in (old["root"], None):
                raise DataError(
                    f"the server's {facts.model} was loaded from {facts.root}, the answers so far"
                    f" are by {old['root']}; serve that one, or name another --output"
                )
        self._server_version = facts.version
        self._write_meta("running", facts, None)
        version = f" {facts.version}" if facts.version else ""
        left = self._facts.num_chats - self._progress.num_settled
        say(f"{facts.base_url}{version} serves {facts.model}; {left} conversations to ask for")

    async def _work(
        self, lines: Iterator[tuple[int, bytes]], server: Server, mine: tuple[int, bytes] | None
    ) -> None:
        while (line := mine or next(lines, None)) is not None:
            mine = None
            number, text = line
            try:
                await self._converse(parse_chat(number, text), server)
            except UnusableError as error:
                self._refuse(number, {"reason": str(error)})

    async def _converse(self, chat: Chat, server: Server) -> None:
        """Ask for the answers of one conversation, each in the context of those before."""
        replies: list[Reply] = []
        said: list[dict[str, Any]] = []
        for turn, messages in enumerate(chat.turns):
            said += messages
            body = self._options.sampling.body(said, chat.number, turn)
            if chat.tools:
                body["tools"] = list(chat.tools)
            try:
                reply = await server.ask(body)
            except GivenUpError as error:
                self._progress.num_given_up += 1
                self._journal.append(chat.number, GIVEN_UP, {"id": chat.id, "reason": str(error)})
                return
            except UnusableError as error:
                self._refuse_answer(chat, f"answer {turn + 1}: {error}")
                return
            self._progress.answered(reply)
            self._any_answer = True
            replies.append(reply)
            if reply.cut:
                break
            said.append(reply.message())
        generation = {
            "model": self._options.sampling.model,
            "server": self._server_version,
            "settings": self._settings,
        }
        record = chat.output(replies, generation)
        if self._options.sampling.thinking is not None:
            record["enable_thinking"] = self._options.sampling.thinking
        self._journal.append(chat.number, ANSWER, record)
        self._progress.num_settled += 1

    def _refuse(self, number: int, told: dict[str, str]) -> None:
        self._journal.append(number, REFUSED, told)
        self._progress.num_rejected += 1
        self._progress.num_settled += 1

    def _refuse_answer(self, chat: Chat, reason: str) -> None:
        """Note a refusal of the server; before its first answer it may mean all conversations."""
        told = {"id": chat.id, "reason": reason}
        if self._any_answer:
            self._refuse(chat.number, told)
            return
        self._early_refusals.append((chat.number, told))
        if len(self._early_refusals) == _ALL_REFUSED:
            raise ServerError(
                f"{self._options.base_url} refused each of the first {_ALL_REFUSED} conversations,"
                f" the last one with: {reason}; change the options or the input"
            )

    def _unsettled(self) -> Iterator[tuple[int, bytes]]:
        """Yield (number, line) of every line that is neither blank nor settled."""
        with self._options.input.open("rb") as stream:
            for number, line in enumerate(stream, 1):
                if line.strip() and not self._journal.is_settled(number):
                    yield number, line

    async def _tick(self, server: Server) -> None:
        while True:
            await asyncio.sleep(_SYNC_S)
            self._journal.sync()
            self._progress.show(server.trouble)

    def _write_meta(
        self, state: str, server: ServerFacts | None, counts: dict[str, int] | None
    ) -> None:
        old = _read_meta(self._files) or {}
        servers = list(old.get("servers", ())) if self._journal.has_answers else []
        if server is not None and asdict(server) not in servers:
            servers.append(asdict(server))
        now = round(time.time(), 3)
        document = {
            "v": VERSION,
            "state": state,
            "settings": self._journal.settings,
            "settings_digest": self._settings,
            "input": asdict(self._facts),
            "servers": servers,
            "counts": counts,
            "began_unix_s": old.get("began_unix_s", now) if servers else now,
            "written_unix_s": now,
        }
        write_by_rename(self._files.meta, (json.dumps(document, indent=1) + "\n").encode())


async def _all_or_first_error(workers: list["asyncio.Task[None]"]) -> None:
    """Wait for all; after the first failure the others are ended and it is raised."""
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)


class _Partial:
    """A file that appears whole or not at all, written in pieces."""

    def __init__(self, path: Path) -> None:
        self._path, self._partial = path, path.with_name(f".{path.name}.partial")
        self._stream = self._partial.open("wb")
        self.write = self._stream.write

    def finish(self, *, keep: bool = True) -> None:
        """Put it in place; without ``keep`` there is none, nor an old one."""
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self._stream.close()
        if keep:
            self._partial.replace(self._path)
        else:
            self._partial.unlink()
            self._path.unlink(missing_ok=True)
        sync(self._path.parent)


def _input_facts(path: Path) -> InputFacts:
    digest, num_lines, num_chats = hashlib.sha256(), 0, 0
    try:
        with path.open("rb") as stream:
            for line in stream:
                digest.update(line)
                num_lines += 1
                num_chats += bool(line.strip())
    except OSError as error:
        raise DataError(f"--input {path}: {error.strerror or error}") from error
    if not num_chats:
        raise DataError(f"--input {path}: the file is empty")
    return InputFacts(str(path), digest.hexdigest(), num_lines, num_chats)


def _read_meta(files: Files) -> dict[str, Any] | None:
    try:
        document: dict[str, Any] = json.loads(files.meta.read_text(encoding="utf-8"))
        known = document["v"] <= VERSION and bool(document["state"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return document if known else None


def _require_same(old: dict[str, Any], new: dict[str, Any], files: Files) -> None:
    """Raise DataError naming every setting that differs from those of the answers so far."""
    olds, news = _flat(old), _flat(new)
    changed = [
        f"{name} was {json.dumps(olds.get(name))}, now {json.dumps(news.get(name))}"
        for name in sorted(olds.keys() | news.keys())
        if olds.get(name) != news.get(name)
    ]
    if changed:
        raise DataError(
            f"{files.output} was begun with other settings: {'; '.join(changed)}. Name another"
            f" --output, or remove {files.output.name}* to start over"
        )


def _flat(settings: dict[str, Any]) -> dict[str, Any]:
    sampling: dict[str, Any] = settings.get("sampling", {})
    return {key: value for key, value in settings.items() if key != "sampling"} | sampling


def _count(counts: dict[str, int], record: dict[str, Any]) -> None:
    counts["answered"] += 1
    counts["cut"] += bool(record.get("truncated"))
    counts["answer_tokens"] += sum(n or 0 for n in record["generation"]["tokens"])


def _told(counts: dict[str, int]) -> str:
    parts = [f"{counts['answered']} conversations", f"{counts['cut']} cut at max_tokens"]
    parts += [f"{counts['rejected']} lines rejected"] if counts["rejected"] else []
    parts += [f"{counts['given_up']} without an answer"] if counts["given_up"] else []
    return ", ".join(parts)
