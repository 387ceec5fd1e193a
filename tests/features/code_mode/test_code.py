"""Scripts of code mode on this side of the socket: how they run, what they print, and the queue of their calls."""

from __future__ import annotations

import shutil
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goondan.features.code_mode.jail.code import run_code
from goondan.features.code_mode.jail.code.code_scripts import calls as printing
from goondan.features.code_mode.jail.code.code_scripts.calls import IN_FLIGHT, MAX_HEAD, MAX_TAIL, Calls, Printed
from goondan.features.code_mode.wire import ERRORS
from goondan.toolhost.inside import ToolError
from goondan.toolhost.inside.api import AgentError
from tests.contract.test_codes_of_handlers import call_of, said
from tests.python_calls import python_calls

#: Calls of Python functions in a script's process for one call: up to the question, and from its answer on.
MOST_CALLS = 17

Question = tuple[str, Any, Callable[[dict[str, Any]], None]]


def result(value: Any) -> dict[str, Any]:
    return {"value": {"status": "ok", "output": value}}


class Host:
    """The other side: answers each question from a thread of its own, as the reader of a worker does."""

    def __init__(self, answer: Callable[[str, Any], dict[str, Any]] | None = None) -> None:
        self.answer = answer or (lambda op, value: result({"op": op, **value}))
        self.asked: list[tuple[str, Any]] = []
        self.batches: list[int] = []
        self.held: list[Question] | None = None
        self.most = 0
        self._open = 0
        self._lock = threading.Lock()

    @property
    def tools(self) -> tuple[Callable[[list[Question]], None], Callable[[Any], object]]:
        """What a handler has of it: a question is asked, and an answer waited for."""
        return self, lambda done: done.acquire()

    def __call__(self, questions: list[Question]) -> None:
        with self._lock:
            self.batches.append(len(questions))
            self.asked += [(op, value) for op, value, _ in questions]
            self._open += len(questions)
            self.most = max(self.most, self._open)
        if self.held is not None:
            self.held += questions
            return
        threading.Thread(target=self._answer_all, args=(questions,)).start()

    def _answer_all(self, questions: list[Question]) -> None:
        for op, value, take in questions:
            with self._lock:
                self._open -= 1
            take(self.answer(op, value))


def run(code: str, host: Host | None = None, language: str = "python") -> dict[str, Any]:
    ctx: Any = SimpleNamespace(tools=(host or Host()).tools, workdir=".", cancelled=False)
    return run_code.run(ctx, {"language": language, "code": code})


def test_a_call_takes_few_calls_of_python() -> None:
    def count(calls: int) -> int:
        with python_calls(lambda code: "code_scripts" in code.co_filename) as called:
            run(f"for _ in range({calls}): tools.a__b(x=1)")
        return len(called)

    assert count(11) - count(1) <= 10 * MOST_CALLS


def fails(code: str, host: Host | None = None) -> ToolError:
    with pytest.raises(ToolError) as caught:
        run(code, host)
    return caught.value


def test_what_a_script_prints_is_its_output_and_nothing_else() -> None:
    assert run("x = tools.a__b(n=1)\nprint('hi', 7)\nimport sys; print('e', file=sys.stderr)\nx") == {
        "printed": "hi 7\ne\n",
        "calls": 1,
    }
    assert sys.stdout.__class__ is not Printed


def test_tools_are_called_by_name_with_their_arguments() -> None:
    host = Host()
    out = run(
        "print(tools.a__b(x=1)['args'], tools['c-d__e']({'y': 2}, z=3)['name'], tools.f__g()['args'])\n"
        "print(tools.search('w', 3)[0])\n"
        "print(tools.describe('a__b', 'c__d'))\n",
        Host(lambda op, value: result(value) if op == "tool" else {"value": {"tools": [value], "total": 1}}),
    )
    assert out["printed"] == ("{'x': 1} c-d__e {}\n{'query': 'w', 'limit': 3}\n[{'names': ['a__b', 'c__d']}]\n")
    run("tools.a__b()", host)
    assert host.asked == [("tool", {"name": "a__b", "args": {}})]


def test_a_failed_call_is_an_exception_with_its_code_and_advice() -> None:
    error = {"message": "no", "code": "E_TOOL_NOT_IN_CATALOG", "suggestion": "search"}
    host = Host(lambda op, value: {"error": error})
    code = "try:\n  tools.x__y()\nexcept ToolCallError as error:\n  print(error.code, error.message, error.suggestion)"
    assert run(code, host)["printed"] == "E_TOOL_NOT_IN_CATALOG no search\n"
    caught = fails("def f():\n    tools.x__y()\n\nf()", host)
    assert caught.code == "E_SCRIPT_FAILED"
    assert str(caught) == (
        "line 4, in <module>: f()\nline 2, in f: tools.x__y()\nToolCallError [E_TOOL_NOT_IN_CATALOG]: no (search)"
    )


def test_a_pending_result_is_a_handle() -> None:
    host = Host(lambda op, value: {"value": {"status": "pending", "handle": "a/7"}})
    assert run("print(tools.a__b(), tools.a__b().handle)", host)["printed"] == "Pending(handle='a/7') a/7\n"


def test_several_calls_at_once_are_in_order_sixteen_on_their_way() -> None:
    host = Host(lambda op, value: result(value["args"]["n"]))
    out = run("print(tools.parallel(*[tools.a__b.later(n=n) for n in range(100)]) == list(range(100)))", host)
    assert out == {"printed": "True\n", "calls": 100}
    assert host.most == IN_FLIGHT
    assert host.batches[0] == IN_FLIGHT, "written together"
    assert run("print(tools.map(tools.a__b, [{'n': 1}, {'n': 2}]), tools.parallel())", host)["printed"] == "[1, 2] []\n"


def test_of_several_calls_the_first_that_failed_is_raised_when_all_are_done() -> None:
    def answer(op: str, value: Any) -> dict[str, Any]:
        number = value["args"]["n"]
        return {"error": {"message": f"no {number}", "code": "E_X"}} if number % 2 else result(number)

    host = Host(answer)
    assert "no 1" in str(fails("tools.map(tools.a__b, [{'n': n} for n in range(5)])", host))
    assert len(host.asked) == 5
    out = run("print([str(x) for x in tools.map(tools.a__b, [{'n': 0}, {'n': 1}], errors=True)])", host)
    assert out["printed"] == "['0', 'no 1']\n"
    assert "tools.NAME.later" in str(fails("tools.parallel(7)"))


def test_a_script_may_await() -> None:
    host = Host(lambda op, value: result(value["args"]["n"]))
    code = "import asyncio\nprint(await asyncio.gather(*[tools.a__b(n=n) for n in range(40)]) == list(range(40)))"
    assert run(code, host)["printed"] == "True\n"
    assert host.most <= IN_FLIGHT
    failing = Host(lambda op, value: {"error": {"message": "no", "code": "E_X"}})
    assert "ToolCallError [E_X]: no" in str(fails("await tools.a__b()", failing))


def test_threads_may_call() -> None:
    code = (
        "from concurrent.futures import ThreadPoolExecutor\n"
        "with ThreadPoolExecutor(20) as pool:\n"
        "    print(sum(pool.map(lambda n: tools.a__b(n=n), range(50))))\n"
    )
    host = Host(lambda op, value: result(value["args"]["n"]))
    assert run(code, host)["printed"] == f"{sum(range(50))}\n"
    assert host.most <= IN_FLIGHT


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("1 +", "SyntaxError"),
        ("1/0", "line 1, in <module>: 1/0\nZeroDivisionError: division by zero"),
        ("import sys; sys.exit(3)", "sys.exit(3)"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("tools.a__b(1, 2)", "TypeError"),
        ("tools.a__b([1])", "by name, or as one dict"),
        ("def f(): f()\nf()", "RecursionError"),
        ("x = 'ä' * 3\nraise ValueError(x)", "ValueError: äää"),
        ("tools._private", "AttributeError"),
    ],
)
def test_a_script_that_fails_is_one_error_with_the_lines_of_the_script(code: str, said: str) -> None:
    caught = fails(code)
    assert caught.code == "E_SCRIPT_FAILED"
    assert said in str(caught)
    assert len(str(caught)) < 2500
    assert "python_script.py" not in str(caught)


def test_an_error_repeats_the_end_of_what_was_printed() -> None:
    text = str(fails("print('x' * 5000 + 'the end')\n1/0"))
    assert text.endswith("the end\n")
    assert len(text) < 2000


def test_a_script_that_leaves_with_zero_has_not_failed() -> None:
    assert run("print(1)\nimport sys\nsys.exit()\nprint(2)")["printed"] == "1\n"


def test_what_cannot_be_sent_fails_that_call_alone() -> None:
    class Picky(Host):
        def __call__(self, questions: list[Question]) -> None:
            if any(value["args"].get("bad") for _, value, _ in questions):
                raise TypeError("the arguments: not JSON")
            super().__call__(questions)

    host = Picky()
    out = run(
        "got = tools.parallel(*[tools.a__b.later(n=n, bad=n == 3) for n in range(40)], errors=True)\n"
        "print([n for n, value in enumerate(got) if isinstance(value, ToolCallError)], got[3].code)",
        host,
    )
    assert out["printed"] == "[3] E_TOOL_INVALID_ARGS\n"
    out = run(
        "got = tools.parallel(*[tools.a__b.later(n=n, bad=True) for n in range(2000)], errors=True)\n"
        "print(sum(isinstance(value, ToolCallError) for value in got), tools.a__b(n=1))",
        host,
    )
    assert out["printed"].startswith("2000 {"), "however many there are"


def test_when_the_call_is_over_nothing_is_asked_any_more() -> None:
    class Ended(Host):
        def __call__(self, questions: list[Question]) -> None:
            raise AgentError("the call has ended", code="E_CALL_ENDED")

    assert "E_CALL_ENDED" in str(fails("tools.a__b()", Ended()))


def test_an_answer_makes_room_for_the_next_in_the_queue() -> None:
    host = Host()
    host.held = []
    calls = Calls(host.tools)
    taken: list[int] = []

    def taker(number: int) -> Callable[[dict[str, Any]], None]:
        return lambda frame: taken.append(number)

    calls.start([("tool", {"n": number}, taker(number)) for number in range(IN_FLIGHT + 2)])
    assert len(host.held) == IN_FLIGHT
    host.held[0][2](result(1))
    assert [value["n"] for _, value, _ in host.held] == list(range(IN_FLIGHT + 1))
    assert taken == [0]
    assert calls.count == IN_FLIGHT + 2


def test_a_language_that_nobody_knows_and_a_jail_without_the_permission() -> None:
    with pytest.raises(ValueError, match="python or javascript"):
        run("1", language="cobol")
    with pytest.raises(ToolError, match="may not call"):
        run_code.run(SimpleNamespace(tools=None), {"language": "python", "code": "1"})  # type: ignore[arg-type]


@given(st.lists(st.text(max_size=40), max_size=40), st.integers(1, 30), st.integers(1, 20))
def test_printed_keeps_the_beginning_and_the_end(pieces: list[str], head: int, tail: int) -> None:
    patch = pytest.MonkeyPatch()
    patch.setattr(printing, "MAX_HEAD", head)
    patch.setattr(printing, "MAX_TAIL", tail)
    try:
        made = Printed()
        assert [made.write(piece) for piece in pieces] == [len(piece) for piece in pieces]
        whole, text = "".join(pieces), made.text()
    finally:
        patch.undo()
    if len(whole) <= head + tail:
        assert text == whole
    else:
        assert text == f"{whole[:head]}\n… {len(whole) - head - tail} characters left out …\n{whole[-tail:]}"


def test_a_flood_of_text_takes_little_memory() -> None:
    made = Printed()
    for _ in range(100):
        made.write("x" * 100_000)
    assert len(made.text()) < MAX_HEAD + MAX_TAIL + 100
    assert not made.isatty()
    assert made.writable()
    made.flush()
    made.writelines(["a", "b"])
    assert made.text().endswith("ab")
    with pytest.raises(TypeError):
        made.write(b"x")  # type: ignore[arg-type]


# --- JavaScript

needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="there is no Node")


@needs_node
def test_a_script_in_javascript() -> None:
    def answer(op: str, value: Any) -> dict[str, Any]:
        if op == "tools":
            return {"value": {"tools": [{"name": "a__b"}], "total": 1}}
        if value["args"].get("pending"):
            return {"value": {"status": "pending", "handle": "a/7"}}
        if value["args"].get("fails"):
            return {"error": {"message": "no", "code": "E_X", "suggestion": "s"}}
        return result(value["args"].get("n"))

    host = Host(answer)
    code = """
    const all = await Promise.all([...Array(100).keys()].map((n) => tools.a__b({ n })));
    console.log(all.every((value, at) => value === at), (await tools.search("x"))[0].name);
    const pending = await tools.a__b({ pending: true });
    console.log(pending instanceof Pending, pending.handle, await tools.a__b());
    try { await tools["a-b__c"]({ fails: true }); } catch (error) {
      console.log(error instanceof ToolCallError, error.code, error.message, error.suggestion);
    }
    console.error("also this");
    """
    assert run(code, host, "javascript") == {
        "printed": "true a__b\ntrue a/7 null\ntrue E_X no s\nalso this\n",
        "calls": 103,
    }
    assert host.most <= IN_FLIGHT


@needs_node
@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("throw new Error('broken')", "Error: broken"),
        ("await nobody()", "ReferenceError"),
        ("}", "SyntaxError"),
        ("throw 7", "threw 7"),
        ("setTimeout(() => { throw new Error('later') }); await new Promise((r) => setTimeout(r, 5000))", "later"),
        ("process.exit(4)", "status 4"),
        ("process.kill(process.pid, 'SIGKILL')", "status -9"),
    ],
)
def test_a_script_in_javascript_that_fails_is_one_error(code: str, said: str) -> None:
    ctx: Any = SimpleNamespace(tools=Host().tools, workdir=".", cancelled=False)
    with pytest.raises(ToolError) as caught:
        run_code.run(ctx, {"language": "javascript", "code": code})
    assert caught.value.code == "E_SCRIPT_FAILED"
    assert said in str(caught.value)


def test_without_node_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(ToolError) as caught:
        run("1", language="javascript")
    assert (caught.value.code, caught.value.suggestion) == ("E_SCRIPT_LANGUAGE", "Write the script in Python.")


@needs_node
def test_a_cancelled_script_in_javascript_ends() -> None:
    ctx: Any = SimpleNamespace(tools=Host().tools, workdir=".", cancelled=True)
    ctx.cancelled = False
    timer = threading.Timer(0.2, lambda: setattr(ctx, "cancelled", True))
    timer.start()
    with pytest.raises(ToolError) as caught:
        run_code.run(ctx, {"language": "javascript", "code": "await new Promise((r) => setTimeout(r, 50000))"})
    assert caught.value.code == "E_CANCELLED"


def test_the_tool_says_its_codes_of_its_own_calls_and_no_other_tool_does() -> None:
    for code in ERRORS:
        assert said(code, call_of(bundled=True))["code"] == code
        assert said(code, call_of())["code"] == f"tool:{code}"
