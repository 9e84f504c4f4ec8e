"""`trainer regenerate` against a real HTTP server: order, contexts, refusals, cuts, settings."""

import json
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.regenerate.conftest import (
    CUT,
    ChatServer,
    MakeOptions,
    assistant,
    completion,
    echo,
    error,
    questions,
    read_lines,
    user,
)
from trainer.__main__ import main
from trainer.errors import DataError, ServerError
from trainer.regenerate.run import Files, regenerate


def test_output_keeps_the_inputs_order_whatever_order_answers_come_in(
    chat_server: ChatServer, make_options: MakeOptions
):
    later = threading.Barrier(4, timeout=60)

    def answer(body: Any, _times: int) -> Any:
        number = int(body["messages"][-1]["content"].split()[1])
        if number < 4:
            later.wait()  # the four are at work together ...
            time.sleep(0.03 * (4 - number))  # ... and end in the reverse order
        return echo(body)

    chat_server.answer = answer
    options = make_options(questions(8))
    regenerate(options)
    records = read_lines(options.output)
    assert [record["id"] for record in records] == [f"q{n}" for n in range(8)]
    assert records[3]["messages"] == [
        user("question 3"),
        assistant("answer 1 to question 3 ✓"),
    ]


def test_concurrency_is_reached_and_never_passed(
    chat_server: ChatServer, make_options: MakeOptions
):
    full = threading.Barrier(6, timeout=60)  # passes only when six questions are asked together

    def answer(body: Any, _times: int) -> Any:
        full.wait()
        return echo(body)

    chat_server.answer = answer
    regenerate(make_options(questions(18), concurrency=6))
    assert chat_server.max_at_once == 6
    assert len(chat_server.asked) == 18


def test_every_answer_is_replaced_and_becomes_context_of_the_next_question(
    chat_server: ChatServer, make_options: MakeOptions
):
    chat = {
        "id": "long",
        "source": "kept",
        "truncated": True,
        "messages": [
            {"role": "system", "content": "Be brief."},
            user("Wie heißt du?"),
            assistant("old 1"),
            user("And 你?"),
            assistant("old 2"),
            user("Bye 👋"),
        ],
    }
    options = make_options([chat])
    regenerate(options)
    (record,) = read_lines(options.output)
    first, second = (
        "answer 2 to Be brief. / Wie heißt du? ✓",
        "answer 4 to Be brief. / Wie heißt du? / And 你? ✓",
    )
    third = "answer 6 to Be brief. / Wie heißt du? / And 你? / Bye 👋 ✓"
    assert record["messages"] == [
        {"role": "system", "content": "Be brief."},
        user("Wie heißt du?"),
        assistant(first),
        user("And 你?"),
        assistant(second),
        user("Bye 👋"),
        assistant(third),
    ]
    assert (record["id"], record["source"], "truncated" in record) == ("long", "kept", False)
    assert [len(body["messages"]) for body in chat_server.asked] == [2, 4, 6]
    assert chat_server.asked[1]["messages"][2] == assistant(first)
    assert "你" in options.output.read_text(encoding="utf-8")  # readable, not escaped


def test_sharegpt_records_and_bare_prompts_are_answered(make_options: MakeOptions):
    shared = {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "old"}]}
    options = make_options([shared, "", {"messages": [user("alone")]}])
    regenerate(options)
    first, second = read_lines(options.output)
    assert (first["id"], second["id"]) == ("line-1", "line-3")
    assert first["messages"] == [user("hi"), assistant("answer 1 to hi ✓")]
    assert "conversations" not in first
    assert second["messages"] == [user("alone"), assistant("answer 1 to alone ✓")]


def test_cut_answer_is_marked_and_ends_its_conversation(
    chat_server: ChatServer, make_options: MakeOptions
):
    def answer(body: Any, _times: int) -> Any:
        if body["messages"][-1]["content"] == "tell all":
            return completion("once upon a", finish="length", num_tokens=4)
        return echo(body)

    chat_server.answer = answer
    messages = [user("hi"), assistant("x"), user("tell all"), assistant("x"), user("thanks")]
    options = make_options([{"messages": messages}, *questions(1)], sampling={"max_tokens": 4})
    regenerate(options)
    cut, whole = read_lines(options.output)
    assert cut["truncated"] is True
    assert [m["role"] for m in cut["messages"]] == ["user", "assistant"] * 2
    assert cut["messages"][-1]["content"] == "once upon a"
    assert cut["generation"]["finish"] == ["stop", "length"]
    assert "truncated" not in whole
    assert json.loads(Files(options.output).meta.read_text())["counts"] == {
        "answered": 2,
        "cut": 1,
        "rejected": 0,
        "given_up": 0,
        "answer_tokens": 10,
    }


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_reasoning_is_kept_under_the_name_that_templates_read(
    chat_server: ChatServer, make_options: MakeOptions, name: str
):
    chat_server.answer = lambda _body, _times: completion("42", **{name: "six times seven"})
    options = make_options([{"messages": [user("what?"), assistant("x"), user("why?")]}])
    regenerate(options)
    (record,) = read_lines(options.output)
    told = {"role": "assistant", "content": "42", "reasoning_content": "six times seven"}
    assert record["messages"] == [user("what?"), told, user("why?"), told]
    assert chat_server.asked[1]["messages"][1] == told


@pytest.mark.parametrize(
    ("content", "answer", "thought"),
    [
        ("<think>\nsix\n</think>\n\n42", "42", "six"),
        ("six\n</think>\n\n42", "42", "six"),  # the prompt ended with the opening mark
        ("<think>\n\n</think>\n\n42", "42", None),
        ("write <think>x</think> so", "write <think>x</think> so", None),
    ],
)
def test_thought_that_the_server_left_in_the_answer_is_parted_from_it(
    chat_server: ChatServer,
    make_options: MakeOptions,
    content: str,
    answer: str,
    thought: str | None,
):
    chat_server.answer = lambda _body, _times: completion(content)
    options = make_options(questions(1))
    regenerate(options)
    message = read_lines(options.output)[0]["messages"][-1]
    assert (message["content"], message.get("reasoning_content")) == (answer, thought)


@pytest.mark.parametrize("message", [{"reasoning_content": "six times"}, {}])
def test_answer_cut_within_its_thought_is_kept_as_one_and_marked(
    chat_server: ChatServer, make_options: MakeOptions, message: dict[str, str]
):
    content = None if message else "<think>\nsix times"
    chat_server.answer = lambda _body, _times: completion(content, finish="length", **message)
    options = make_options(questions(1))
    regenerate(options)
    (record,) = read_lines(options.output)
    told = {"role": "assistant", "content": "", "reasoning_content": "six times"}
    assert (record["messages"][-1], record["truncated"]) == (told, True)


def test_settings_reach_the_server_and_are_told_in_sidecar_and_record(
    chat_server: ChatServer, make_options: MakeOptions, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("MY_KEY", "sk-quite-secret")
    sampling = {
        "temperature": 0.6,
        "top_p": 0.95,
        "max_tokens": 256,
        "thinking": False,
        "seed": 7,
        "extra": {"top_k": 20},
    }
    options = make_options(questions(3), sampling=sampling, api_key_env="MY_KEY")
    regenerate(options)
    body = chat_server.asked[0]
    assert {k: body[k] for k in ("model", "temperature", "top_p", "max_tokens", "top_k")} == {
        "model": "tiny",
        "temperature": 0.6,
        "top_p": 0.95,
        "max_tokens": 256,
        "top_k": 20,
    }
    assert body["chat_template_kwargs"] == {"enable_thinking": False}
    assert len({body["seed"] for body in chat_server.asked}) == 3  # each answer has its own
    assert all(0 <= body["seed"] < 1 << 31 for body in chat_server.asked)
    assert chat_server.headers[0]["Authorization"] == "Bearer sk-quite-secret"
    meta = json.loads(Files(options.output).meta.read_text())
    assert meta["state"] == "finished"
    assert meta["settings"]["sampling"] == {"model": "tiny"} | sampling
    assert meta["servers"] == [
        {
            "base_url": chat_server.base_url,
            "model": "tiny",
            "root": "/models/tiny",
            "max_model_len": 64,
            "version": "0.11.2",
        }
    ]
    for record in read_lines(options.output):
        assert record["enable_thinking"] is False
        assert record["generation"] == {
            "model": "tiny",
            "server": "0.11.2",
            "settings": meta["settings_digest"],
            "finish": ["stop"],
            "tokens": [3],
        }
    written = [path.read_text() for path in options.output.parent.iterdir()]
    assert not [text for text in written if "sk-quite-secret" in text]


def test_settings_left_out_are_not_sent(chat_server: ChatServer, make_options: MakeOptions):
    regenerate(make_options(questions(1)))
    assert set(chat_server.asked[0]) == {"model", "messages", "stream"}


def test_bad_lines_and_refused_questions_are_written_aside_with_numbers(
    chat_server: ChatServer, make_options: MakeOptions
):
    def answer(body: Any, _times: int) -> Any:
        text = body["messages"][-1]["content"]
        if text == "too long":
            return error(400, "maximum context length is 64 tokens")
        if text == "blank":
            return completion(" \n")
        return completion(None, finish="tool_calls") if text == "call" else echo(body)

    chat_server.answer = answer
    tool = {"role": "tool", "content": "20 degrees"}
    options = make_options(
        [
            *questions(1),
            "{not json",
            {"id": "x2", "messages": [user("too long")]},
            {"messages": [assistant("hello")]},
            {"messages": [user("a"), assistant("b"), tool, assistant("c")]},
            {"messages": [user("call")]},
            {"messages": [user("blank")]},
            r'{"messages": [{"role": "user", "content": "half \ud83d"}]}',
        ],
        concurrency=1,
    )
    regenerate(options)
    assert [record["id"] for record in read_lines(options.output)] == ["q0"]
    rejected = {r["line"]: r for r in read_lines(Files(options.output).rejected)}
    assert sorted(rejected) == [2, 3, 4, 5, 6, 7, 8]
    assert rejected[2]["reason"].startswith("not JSON")
    assert rejected[3]["id"] == "x2"
    assert rejected[3]["reason"] == "answer 1: HTTP 400: maximum context length is 64 tokens"
    assert rejected[4]["reason"] == "message 0 answers no user"
    assert rejected[5]["reason"] == "message 2 has the role 'tool'"
    assert "'tool_calls'" in rejected[6]["reason"]
    assert rejected[7]["reason"] == "answer 1: the server gave an empty answer"
    assert "surrogates" in rejected[8]["reason"]
    assert len([p for p in chat_server.prompts() if p == "too long"]) == 1  # not tried again


def test_refusals_of_all_first_questions_end_the_run_instead_of_rejecting_a_million(
    chat_server: ChatServer, make_options: MakeOptions
):
    chat_server.answer = lambda _body, _times: error(400, "top_p must be in (0, 1]")
    options = make_options(questions(500))
    with pytest.raises(ServerError, match=r"first 20 conversations.*top_p must be in"):
        regenerate(options)
    assert len(chat_server.asked) < 30
    chat_server.answer = lambda body, _times: echo(body)
    changed = replace(options, sampling=replace(options.sampling, top_p=0.9))
    regenerate(changed)  # nothing had been answered, so other settings may begin anew
    assert len(read_lines(options.output)) == 500


@pytest.mark.parametrize("status", [401, 403, 404])
def test_refusal_of_everyone_ends_the_run_at_once(
    chat_server: ChatServer, make_options: MakeOptions, status: int
):
    chat_server.answer = lambda _body, _times: error(status, "no entry")
    with pytest.raises(ServerError, match=f"answers HTTP {status}: no entry"):
        regenerate(make_options(questions(50)))
    assert len(chat_server.asked) <= 4


def test_model_that_is_not_served_is_told_with_those_that_are(
    chat_server: ChatServer, make_options: MakeOptions
):
    options = make_options(questions(1))
    options = replace(options, sampling=replace(options.sampling, model="other"))
    with pytest.raises(ServerError, match="does not serve --model other; it serves tiny"):
        regenerate(options)
    assert chat_server.asked == []


@pytest.mark.parametrize(("status", "num_answered"), [(404, 2), (400, 0), (500, 0)])
def test_server_without_a_list_of_models_is_asked_all_the_same_but_not_a_broken_one(
    chat_server: ChatServer, make_options: MakeOptions, status: int, num_answered: int
):
    chat_server.models_status = status
    options = make_options(questions(2), retries=1)
    if num_answered:
        regenerate(options)
    else:
        with pytest.raises(ServerError, match=f"/models: HTTP {status}"):
            regenerate(options)
    assert len(chat_server.asked) == num_answered


@pytest.mark.parametrize("models", [5, [{"id": ["tiny"]}, {"id": "tiny"}], [], None, {"id": 1}])
def test_list_of_models_that_is_none_is_no_traceback(
    chat_server: ChatServer, make_options: MakeOptions, models: Any
):
    chat_server.models = models
    options = make_options(questions(1))
    regenerate(options)
    assert [record["id"] for record in read_lines(options.output)] == ["q0"]


def test_finished_output_is_left_alone_and_other_settings_are_refused(
    chat_server: ChatServer, make_options: MakeOptions, capsys: pytest.CaptureFixture[str]
):
    options = make_options(questions(2), sampling={"temperature": 0.0})
    regenerate(options)
    before = options.output.read_bytes()
    regenerate(options)
    assert "is complete: 2 conversations" in capsys.readouterr().err
    assert len(chat_server.asked) == 2
    warmer = replace(options, sampling=replace(options.sampling, temperature=1.0))
    with pytest.raises(DataError, match=r"temperature was 0\.0, now 1\.0"):
        regenerate(warmer)
    options.input.write_text(options.input.read_text() + '{"messages": []}\n')
    with pytest.raises(DataError, match="input_sha256 was"):
        regenerate(options)
    assert options.output.read_bytes() == before


def test_foreign_file_is_not_overwritten(make_options: MakeOptions):
    options = make_options(questions(1))
    options.output.write_text("mine\n")
    with pytest.raises(DataError, match="no output of regenerate"):
        regenerate(options)
    assert options.output.read_text() == "mine\n"


def test_question_that_fails_every_time_is_given_up_and_asked_by_the_next_run(
    chat_server: ChatServer, make_options: MakeOptions
):
    def answer(body: Any, _times: int) -> Any:
        return CUT if body["messages"][-1]["content"] == "question 1" else echo(body)

    chat_server.answer = answer
    options = make_options(questions(3), retries=2)
    with pytest.raises(ServerError, match="1 of 3 conversations got no answer in 3 tries each"):
        regenerate(options)
    assert chat_server.prompts().count("question 1") == 3
    assert [r["id"] for r in read_lines(options.output)] == ["q0", "q2"]
    (aside,) = read_lines(Files(options.output).rejected)
    assert (aside["line"], aside["id"]) == (2, "q1")
    assert "the connection broke" in aside["reason"]
    chat_server.asked.clear()
    chat_server.answer = lambda body, _times: echo(body)
    regenerate(options)
    assert chat_server.prompts() == ["question 1"]
    assert [r["id"] for r in read_lines(options.output)] == ["q0", "q1", "q2"]
    files = Files(options.output)
    assert (files.rejected.exists(), files.journal.exists()) == (False, False)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (["--base-url", "127.0.0.1:8000"], "expected http://HOST:PORT/v1"),
        (["--base-url", "http://127.0.0.1:port/v1"], "expected http://HOST:PORT/v1"),
        (["--base-url", "http://127.0.0.1:99999/v1"], "expected http://HOST:PORT/v1"),
        (["--base-url", "http://[::1/v1"], "expected http://HOST:PORT/v1"),
        (["--base-url", "http://me:secret@host/v1"], "--base-url holds a password"),
        (["--concurrency", "0"], "--concurrency 0: at least 1"),
        (["--temperature", "nan"], "--temperature nan: at least 0"),
        (["--top-p", "1.5"], "--top-p 1.5: above 0, to 1"),
        (["--max-tokens", "0"], "--max-tokens 0: at least 1"),
        (["--patience-s", "-1"], "--patience-s -1: at least 0"),
        (["--api-key-env", "NO_SUCH_KEY"], "there is no such variable"),
        (["--api-key-env", "TWO_LINES"], "--api-key-env TWO_LINES: the key holds a line break"),
        (["--extra", '{"stream": true, "n": 2}'], "--extra: n, stream cannot be set"),
        (
            ["--output", "held.jsonl"],
            "held.jsonl.journal: Is a directory; what is answered is kept",
        ),
        (["--input", "none.jsonl"], "No such file"),
        (["--output", "no/such/out.jsonl"], "no such directory"),
    ],
)
def test_wrong_options_are_one_line_and_status_2(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    changes: list[str],
    told: str,
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TWO_LINES", "secret\nsecret")
    (tmp_path / "held.jsonl.journal").mkdir()
    (tmp_path / "in.jsonl").write_text('{"messages": [{"role": "user", "content": "hi"}]}\n')
    argv = ["--input", "in.jsonl", "--output", "out.jsonl", "--base-url", "http://127.0.0.1:9/v1"]
    assert main(["regenerate", *argv, "--model", "m", *changes]) == 2
    stderr = capsys.readouterr().err
    assert stderr.startswith("error: ")
    assert told in stderr
    assert "secret" not in stderr
    assert stderr.count("\n") == 1
