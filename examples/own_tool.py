"""A tool of your own, and problems that need it, for a pretrained model of 135M parameters.

It needs the model, 93 MB: python scripts/fetch_model.py. The command and a conversation are in
docs/how-to/own-environment.md. The model's chat template describes no tools, and a description in words does
not make it call one (+task.n_examples=0), so the prompt shows two calls.
"""

import random
from dataclasses import dataclass

from lit_rlkv.types import Message, Problem

SYSTEM = """You have a tool, multiply, that multiplies two numbers. Call it with
<tool_call>{"name": "multiply", "arguments": {"a": 1, "b": 1}}</tool_call>
and then give its result."""


def multiply(a: int, b: int) -> int:
    """Multiply two whole numbers.

    Args:
        a: the first number.
        b: the second number.

    Returns:
        The product.
    """
    return a * b


def question(a: int, b: int) -> Message:
    return Message("user", f"What is {a} times {b}?")


def call(a: int, b: int) -> str:
    return f'<tool_call>{{"name": "multiply", "arguments": {{"a": {a}, "b": {b}}}}}</tool_call>'


@dataclass(frozen=True)
class Multiplication:
    """`What is 37 times 46?`, after worked examples; the last turn has to say the product."""

    is_verifiable = True
    n_examples: int = 2
    """At most 2; with 0 the tool is described in words alone."""

    def sample(self, rng: random.Random) -> Problem:
        chat = [Message("system", SYSTEM)]
        for a, b in ((12, 7), (81, 35))[: self.n_examples]:
            said = [Message("assistant", call(a, b)), Message("tool", f"{a * b}")]
            chat += [question(a, b), *said, Message("assistant", f"The answer is {a * b}.")]
        a, b = rng.randint(11, 99), rng.randint(11, 99)
        chat += [question(a, b)]
        return Problem(tuple(chat), f"The answer is {a * b}.", f"{a * b}")

    def score(self, problem: Problem, completion: str) -> float:
        return float(completion.strip() == problem.solution)

    def corrupt(self, problem: Problem, rng: random.Random) -> str:
        return f"The answer is {int(problem.answer) + rng.randint(1, 9)}."
