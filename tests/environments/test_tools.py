"""Tools: calls are found by a pattern or the tokenizer, run, and answered, errors included."""

import asyncio
import functools
import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from lit_rlkv.environments import Tools, calculator
from lit_rlkv.environments.tools import MAX_CALLS, _event_loop
from lit_rlkv.tasks import Products
from lit_rlkv.trust import trusting
from lit_rlkv.types import Message
from tests.chat_templates import byte_tokenizer, trl_tokenizer

EXPRESSION = r"\A(?P<arguments>[0-9]+[*+][0-9]+)\Z"


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: one.
        b: the other.
    """
    return a + b


def fail(text: str) -> str:
    """Fail.

    Args:
        text: why.
    """
    raise RuntimeError(text)


def described(function: Any) -> Any:
    """Give a function of one number what a tool needs."""
    function.__doc__ = "Do it.\n\nArgs:\n    n: a number.\n"
    function.__annotations__["n"] = int
    return function


@described
async def later(n):
    await asyncio.sleep(0.01)
    return n + 1


@described
def soon(n):
    return later(n)


@described
def city(n):
    return {"city": "Zürich", (1, 2): n}


@described
def blank(n=3):
    return None


@described
def leave(n):
    sys.exit(n)


@described
async def leave_later(n):
    raise GeneratorExit


@described
def address(n):
    return [object()]


@described
def numbers(n):
    return (n for n in range(3))


@described
def accuse(n):
    raise ValueError(f"{object()}" + "1" * 3_000_000)


class Unsaid(Exception):
    def __str__(self) -> str:
        raise RuntimeError("never")


@described
def unsaid(n):
    raise Unsaid


@described
def listed(n):
    yield n


@described
async def listed_later(n):
    yield n


def results(tools: Tools, response: str) -> Any:
    observation, reward, done = tools.step(response)
    assert (reward, done) == (0.0, observation is None)
    return observation


@pytest.mark.parametrize(
    ("pattern", "response"),
    [
        (None, 'So <tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'),
        (None, '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1, \\"b\\": 2}"}</tool_call>'),
        (r"(?P<name>\w+)(?P<arguments>\{.*?\})", 'add{"a": 1, "b": 2}'),
        (r"call (?P<call>\{.*\})", 'call {"name": "add", "arguments": {"a": 1, "b": 2}}'),
        (r"(?P<name>\w{1,9}){e}(?P<arguments>.*)", 'add{e}{"a": 1, "b": 2}'),  # no approximate matching
    ],
)
def test_a_call_is_found_and_answered(pattern: str | None, response: str):
    assert results(Tools([add, fail], pattern), response) == [Message("tool", "3")]


def test_every_call_of_a_turn_has_its_message():
    call = '<tool_call>{"name": "add", "arguments": {"a": %d, "b": 2}}</tool_call>'
    assert [message.content for message in results(Tools([add]), call % 1 + call % 5)] == ["3", "7"]


@pytest.mark.parametrize(
    ("call", "says"),
    [
        ('{"name": "fail", "arguments": {"text": "broken"}}', "broken"),
        ('{"name": "none", "arguments": {}}', "none"),
        ('{"name": "add", "arguments": {"a": 1}}', "missing"),
        ('{"name": ["add"]', "broken JSON"),
        ('{"name": "add", "arguments": {"a": 1,}}', "broken JSON"),
        ('{"name": "add", "arguments": "{\\"a\\": 1,}"}', "broken JSON"),
        ("[" * 100_000, "broken JSON"),
        ("3", "must be an object"),
    ],
)
def test_an_error_is_the_observation(call: str, says: str):
    (message,) = results(Tools([add, fail]), f"<tool_call>{call}</tool_call>")
    assert message.content.startswith("error: ")
    assert says in message.content


CALL = '<tool_call>{"name": "%s", "arguments": {"n": 1}}</tool_call>'


@pytest.mark.parametrize(
    ("tool", "result"),
    [
        (later, "2"),
        (soon, "2"),
        (city, "{'city': 'Zürich', (1, 2): 1}"),
        (blank, "None"),
        (leave, "error: SystemExit: 1"),
        (leave_later, "error: GeneratorExit"),
        (address, "error: the result has no text of its own: [<object object>]"),
        (numbers, "error: the result has no text of its own: <generator object numbers.<locals>.<genexpr>>"),
        (unsaid, "error: Unsaid"),
    ],
)
def test_a_result_is_its_text_and_an_error_takes_no_other_result(tool: Any, result: str):
    sum_ = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
    said = [message.content for message in results(Tools([tool, add]), CALL % tool.__name__ + sum_)]
    assert said == [result, "3"]


def test_async_tools_of_all_threads_share_an_event_loop():
    lock, n_done = asyncio.Lock(), 0

    @described
    async def count(n):
        nonlocal n_done
        async with lock:  # belongs to the loop in which somebody first waits for it
            await asyncio.sleep(0.01)
            n_done += n

    _event_loop.cache_clear()
    with ThreadPoolExecutor(20) as pool:
        said = [*pool.map(Tools([count]).step, [CALL % "count"] * 20)]
    assert said == [([Message("tool", "None")], 0.0, False)] * 20
    assert n_done == 20


def test_arguments_may_be_left_out_and_errors_are_short_and_the_same_in_each_run():
    for arguments in ["", ', "arguments": null', ', "arguments": {}']:
        call = f'<tool_call>{{"name": "blank"{arguments}}}</tool_call>'
        assert results(Tools([blank]), call) == [Message("tool", "None")]
    (message,) = results(Tools([accuse]), CALL % "accuse")
    assert message.content.startswith("error: <object object>1")
    assert len(message.content) < 400


@pytest.mark.parametrize(
    ("text", "n_calls"),
    [("<tool_call>", 0), ('<tool_call>{"name": "add"}', 0), ("</tool_call>", 0), (CALL % "later", 100_000)],
)
def test_calls_are_found_in_linear_time(text: str, n_calls: int):
    started_at = time.monotonic()
    assert sum(1 for _ in Tools([add])._calls(text * 100_000)) == n_calls
    assert time.monotonic() - started_at < 20  # by a pattern that searches from each tag, minutes


def test_a_pattern_that_takes_for_ever_is_ended_while_others_run():
    tools, ticks = Tools([later], r"(?P<arguments>(.|..)+)$(?<!.)"), []

    async def tick() -> None:
        running = asyncio.create_task(asyncio.to_thread(tools.step, "12+7;" * 20))
        while not running.done():
            ticks.append(time.monotonic())
            await asyncio.sleep(0.01)
        await running

    with pytest.raises(TimeoutError, match=r"environment\.pattern=.* for 100 characters"):
        asyncio.run(tick())
    assert len(ticks) > 10


def test_a_turn_without_a_call_is_the_last():
    assert results(Tools([add]), "the answer is 3") is None
    assert results(Tools([calculator], EXPRESSION, role=None), "12") is None


ADDED = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
QUESTION = {"role": "user", "content": "1+2?"}


@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("gemma4", "<|tool_response>"), ("gptoss", "<|call|>"), ("glm4moe", ""), ("lfm2_2_5", "<|im_end|>"),
        ("llama3_1", "<|eot_id|>"), ("nemotron_3_nano", "<|im_end|>"), ("qwen2_5", "<|im_end|>"),
        ("qwen3", "<|im_end|>"), ("qwen3_5_think", "<|im_end|>"),
    ],
)  # fmt: skip
def test_the_tokenizers_response_template_finds_the_calls_that_its_chat_template_writes(name: str, end: str):
    utils = pytest.importorskip("trl.chat_template_utils")
    tokenizer = utils.add_response_schema(trl_tokenizer(name, ends=(end,) if end else ()))
    write = partial(tokenizer.apply_chat_template, tools=[add], tokenize=False)
    turn = {"role": "assistant", "content": "", "reasoning_content": "I add.", "tool_calls": [ADDED]}
    prompt = write([QUESTION], add_generation_prompt=True)
    said = write([QUESTION, turn]).removeprefix(prompt).rstrip("\n").removesuffix(end)
    tools = Tools([add])
    tools.bind(tokenizer)
    for tools.prefix in ("", prompt):
        (result,) = results(tools, said)
        assert (result, result.name) == (Message("tool", "3"), "add")
        assert results(tools, "The answer is 3") is None
    assert tools.worked_observation(said, "3")[0].name == "add"
    # A call that was given is none of this turn's; one that was drafted in an open thought is none at all.
    tools.prefix = f"{said}{end}"
    assert results(tools, "The answer is 3") is None
    if prompt.endswith("<think>\n") and name == "qwen3_5_think":
        tools.prefix, call = prompt, said[said.index("<tool_call>") :]
        assert results(tools, f"I might say {call}, but no") is None
        assert results(tools, f"yes\n</think>\n\n{call}") == [Message("tool", "3")]


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ({"tools": []}, "tools"),
        ({"tools": "add"}, "tools"),
        ({"tools": [lambda text: text]}, "docstring"),
        ({"tools": [add, add]}, "add twice"),
        ({"tools": [functools.lru_cache(add)]}, "the tool add must be a function"),
        ({"tools": [partial(add, 1)]}, "must be a function"),
        ({"tools": [listed]}, "the tool listed must be a function or method that returns a value"),
        ({"tools": [listed_later]}, "listed_later must be"),
        ({"tools": ["os.system"]}, "trusted"),
        ({"tools": [add], "pattern": "("}, "pattern"),
        ({"tools": [add], "pattern": "add"}, "pattern"),
        ({"tools": [add, fail], "pattern": "(?P<arguments>.*)"}, "pattern"),
    ],
)
def test_tools_that_cannot_work_are_refused(arguments: dict[str, Any], names: str):
    with pytest.raises(ValueError, match=names):
        Tools(**arguments)


def test_a_tool_may_be_named_in_a_trusted_module():
    with trusting(["tests"]):
        assert results(Tools([f"{__name__}.add"]), "") is None
    with trusting(["tests"]), pytest.raises(ValueError, match="nothing"):
        Tools([f"{__name__}.nothing"])


@pytest.mark.parametrize(
    ("expression", "result"), [("12*7", "84"), ("3 - 10", "-7"), ("-3+1", "-2"), ("2**3", None), ("1", None)]
)
def test_the_calculator_takes_one_operation(expression: str, result: str | None):
    if result is None:
        with pytest.raises(ValueError, match="numbers"):
            calculator(expression)
    else:
        assert calculator(expression) == result


def test_demonstrations_of_products_are_what_the_calculator_answers():
    task, rng = Products(n_terms=4), random.Random(0)
    for _ in range(20):
        problem = task.sample(rng)
        tools = Tools([calculator], EXPRESSION, role=None)
        for response, observation in zip(problem.turns[::2], problem.turns[1::2], strict=True):
            assert results(tools, response) == observation
        assert results(tools, problem.solution) is None
        assert task.score(problem, problem.solution) == 1.0
        assert task.score(problem, task.corrupt(problem, rng)) == 0.0


def test_calls_drafted_in_a_thought_are_none():
    call = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
    for response in (f"<think>maybe {call}", f"<think>maybe {call}</think>3"):
        assert Tools([add]).step(response) == (None, 0.0, True)
    assert [message.content for message in results(Tools([add]), f"<think>so</think>{call}")] == ["3"]


def test_a_turn_has_a_bound_of_calls_and_no_name_that_the_model_made_up():
    call = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
    (message,) = results(Tools([add]), call * (MAX_CALLS + 1))
    assert message.content.startswith(f"error: a turn must have at most {MAX_CALLS} calls")
    (message,) = results(Tools([add]), call.replace("add", "<|start|>system"))
    assert message.name is None


@pytest.mark.parametrize("role", ["tool", None])
def test_worked_turns_of_several_calls_give_what_the_rollout_gives(role):
    calls = "".join(
        f'<tool_call>{{"name": "add", "arguments": {{"a": {n}, "b": 2}}}}</tool_call>' for n in (1, 4)
    )
    tools = Tools([add], role=role)
    assert tools.worked_observation(calls, "3\n6") == tools.step(calls)[0]
    with pytest.raises(ValueError, match="of 2 calls must have a line for each, got 1"):
        tools.worked_observation(calls, "3")


@pytest.mark.parametrize("pattern", ["(?P<call>a{99999999999})", "(" * 5000 + "(?P<call>a)" + ")" * 5000])
def test_patterns_that_python_cannot_compile_are_refused(pattern):
    with pytest.raises(ValueError, match="is not a regular expression"):
        Tools([add], pattern=pattern)


def test_a_response_template_that_cannot_be_read_is_refused_before_any_response():
    tokenizer = byte_tokenizer("{{ messages }}", "<eos>")
    tokenizer.response_template = {"fields": {}}
    with pytest.raises(ValueError, match="response_template cannot be read"):
        Tools([add]).bind(tokenizer)
