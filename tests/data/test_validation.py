"""Checks of rows with tokenizer and model."""

import json

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from lit_rlkv.data.chat import encode_prompt
from lit_rlkv.data.demonstrations import encode_completions
from lit_rlkv.data.prompts import PromptSource
from lit_rlkv.data.tokenizers import build_task_tokenizer, encode
from lit_rlkv.data.validation import check_answers, check_completions_fit, check_prompts_fit, measure
from lit_rlkv.environments import Tools, calculator
from lit_rlkv.rewards import Numeric
from lit_rlkv.tasks import ChainSum, JsonlTask, Products, load_problems, read_preferences
from tests.chat_templates import trl_tokenizer
from tests.hand_built import make_model


def words(*known, template=None):
    """A tokenizer of whole words, with a token for those that it does not know."""
    backend = Tokenizer(
        models.WordLevel({w: n for n, w in enumerate(("<unk>", "<eos>", *known))}, unk_token="<unk>")
    )
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="<eos>")
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture
def write(tmp_path):
    def to_file(*rows):
        (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return tmp_path / "a.jsonl"

    return to_file


def rows(n, prompt="1+1=", answer="2"):
    return [{"prompt": f"{index}+{prompt}", "answer": answer} for index in range(n)]


def test_an_unknown_word_in_a_message_that_the_template_leaves_out_is_refused(write):
    messages = [{"role": "system", "content": "odd"}, {"role": "user", "content": "a b"}]
    task = JsonlTask(write(*({"prompt": messages, "answer": "a"} for _ in range(30))))
    template = "{% for m in messages if m.role == 'user' %}{{ m.content }} {% endfor %}b"
    with pytest.raises(ValueError, match="no token for 'odd'"):
        measure(task, words("a", "b", template=template), 0, needs_eval_split=False)
    sizes = measure(task, words("a", "b", "odd", template=template), 0, needs_eval_split=False)
    assert sizes.prompts == [3] * 30


def test_rows_are_measured_by_their_tokens(write):
    task = JsonlTask(
        write(*(row | {"prompt": "a b " * (n + 1)} for n, row in enumerate(rows(30, answer="b a"))))
    )
    template = "{% for m in messages %}a {{ m.content }} {% endfor %}b"
    for tokenizer in (words("a", "b"), words("a", "b", template=template)):
        sizes = measure(task, tokenizer, 0, needs_eval_split=False)
        problems = [task.at(index) for index in range(30)]
        assert sizes.prompts == [len(encode_prompt(tokenizer, problem.prompt)) for problem in problems]
        assert sizes.solutions == [len(encode(tokenizer, problem.solution)) + 1 for problem in problems]


@pytest.mark.parametrize(
    "make", [build_task_tokenizer, lambda: words("1+1=", "2", *(f"{n}+1+1=" for n in range(300)))]
)
def test_words_without_a_token_are_named_with_their_rows_however_far_down(write, make):
    data = rows(300)
    data[250]["prompt"], data[270]["answer"] = "Ä", "Ö"
    with pytest.raises(ValueError, match="2 of 300 rows cannot be used") as caught:
        measure(JsonlTask(write(*data)), make(), 0, needs_eval_split=False)
    assert "a.jsonl:251: the tokenizer has no token for 'Ä'" in str(caught.value)
    assert "a.jsonl:271: the tokenizer has no token for 'Ö'" in str(caught.value)


def test_a_chat_without_a_template_is_named_with_its_row(write):
    chat = {"prompt": [{"role": "user", "content": "1"}], "answer": "2"}
    task = load_problems(str(write(*rows(100), chat)))
    with pytest.raises(ValueError, match=r"a\.jsonl:101: the tokenizer has no chat template"):
        measure(task, build_task_tokenizer(), 0, needs_eval_split=False)


def test_a_task_tokenizer_that_adds_tokens_is_not_counted_by_characters(write):
    task, plain, adds = JsonlTask(write(*rows(30))), build_task_tokenizer(), build_task_tokenizer()
    adds.backend_tokenizer.post_processor = processors.TemplateProcessing(
        "<eos> $A", special_tokens=[("<eos>", 1)]
    )
    templated = build_task_tokenizer()
    templated.chat_template = "{% for m in messages %}ask {{ m.content }}<eos>{% endfor %}"
    for tokenizer, n_more in ((plain, 0), (adds, 1), (templated, 5)):
        prompts = measure(task, tokenizer, 0, needs_eval_split=False).prompts
        assert prompts == [len(task.at(index).prompt) + n_more for index in range(30)]
        assert prompts == [len(encode_prompt(tokenizer, task.at(index).prompt)) for index in range(30)]
        with pytest.raises(ValueError, match=r"a\.jsonl:2: the tokenizer has no token for 'Ä'"):
            measure(JsonlTask(write(*rows(1), *rows(1, "Ä"))), tokenizer, 0, needs_eval_split=False)


def test_progress_counts_every_row_once_whether_it_is_good_or_bad(write):
    data, seen = rows(2500), []
    measure(
        JsonlTask(write(*data)), build_task_tokenizer(), 0, needs_eval_split=True, on_progress=seen.append
    )
    assert sum(seen) == 2500
    data[1500]["prompt"] = "Ä"
    seen.clear()
    with pytest.raises(ValueError, match=r"^[^\n]*a\.jsonl:1501: the tokenizer has no token for 'Ä'[^\n]*$"):
        measure(
            JsonlTask(write(*data)), build_task_tokenizer(), 0, needs_eval_split=True, on_progress=seen.append
        )
    assert sum(seen) == 2500


def test_rows_without_a_problem_to_evaluate_on_are_refused(write):
    task = JsonlTask(write({"prompt": "question 0", "answer": "2"}))
    measure(task, build_task_tokenizer(), 0, needs_eval_split=False)
    with pytest.raises(ValueError, match=r"none of the 1 problems of .* falls into the eval split"):
        measure(task, build_task_tokenizer(), 0, needs_eval_split=True)


def test_prompts_too_long_for_the_model_are_named_the_longest_first(write):
    data = rows(100)
    data[40]["prompt"], data[90]["prompt"] = "1" * 60, "2" * 70
    sizes = measure(JsonlTask(write(*data)), build_task_tokenizer(), 0, needs_eval_split=False)
    model = make_model(max_position_embeddings=64)
    check_prompts_fit(
        model, measure(JsonlTask(write(*rows(9))), build_task_tokenizer(), 0, needs_eval_split=False), 8
    )
    with pytest.raises(ValueError, match=r"may reach 78 tokens, but .* has positions for 64") as caught:
        check_prompts_fit(model, sizes, 8)
    assert "; 2 of 100 problems are too long: " in str(caught.value)
    named = str(caught.value).split("too long: ")[1].split(", ")
    assert [name.split(".jsonl:")[1] for name in named] == ["91 (70 tokens)", "41 (60 tokens)"]


def test_the_first_problems_of_other_tasks_are_measured():
    sizes = measure(ChainSum(n_terms=3), build_task_tokenizer(), 0, needs_eval_split=True)
    assert len(sizes.prompts) == 64
    assert set(sizes.prompts) == {6}


def pairs(n, **last):
    """Preferences of one shape, and a last one."""
    rows = [{"prompt": f"{index}?", "chosen": "2", "rejected": "33"} for index in range(n)]
    return [*rows, rows[0] | last]


@pytest.mark.parametrize(
    "make", [build_task_tokenizer, lambda: words("2", "33", *(f"{n}?" for n in range(80)))]
)
def test_every_rejected_side_is_checked(write, make):
    tokenizer = make()
    sizes = measure(read_preferences(write(*pairs(80))), tokenizer, 0, needs_eval_split=False)
    assert sizes.rejected == [len(encode(tokenizer, "33")) + 1] * 81
    with pytest.raises(ValueError, match=r"a\.jsonl:81: the tokenizer has no token for 'Ä'"):
        measure(read_preferences(write(*pairs(80, rejected="Ä"))), tokenizer, 0, needs_eval_split=False)


@pytest.mark.parametrize("side", ["chosen", "rejected"])
def test_pairs_too_long_for_the_model_are_named_with_their_rows(write, side):
    model = make_model(max_position_embeddings=64)

    def check(n_characters, **options):
        task = read_preferences(write(*pairs(99, **{side: "1" * n_characters})))
        check_completions_fit(
            model, measure(task, build_task_tokenizer(), 0, needs_eval_split=False), **options
        )

    check(61, has_pairs=True)  # 2 of the prompt, and the end
    with pytest.raises(
        ValueError, match=r"may reach 65 tokens, but .* has positions for 64.*; 1 of 100 "
    ) as said:
        check(62, has_pairs=True)
    assert str(said.value).endswith("a.jsonl:100 (65 tokens)")
    if side == "rejected":
        check(62, has_pairs=False)


def test_answers_that_a_function_cannot_use_are_named_with_their_rows(write):
    data = rows(100)
    data[80]["answer"] = "two"
    task = JsonlTask(write(*data))
    with pytest.raises(ValueError, match=r"a\.jsonl:81: the answer must be one number, got 'two'"):
        check_answers(task, {"correct": Numeric()}, 0)
    check_answers(ChainSum(), {"correct": Numeric()}, 0)


def test_tools_that_a_template_describes_are_counted(write):
    def add(a: int) -> int:
        """Add.

        Args:
            a: one.
        """
        return a

    template = (
        "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}{% for m in messages %}{{ m.content }}"
        "{% endfor %}"
    )
    tokenizer = words("a", "add", template=template)
    task = JsonlTask(write(*({"prompt": "a " * n, "answer": "a"} for n in range(1, 30))))
    plain, told = (measure(task, tokenizer, 0, needs_eval_split=False, tools=tools) for tools in ((), [add]))
    assert told.prompts == [n + 1 for n in plain.prompts]
    assert told.solutions == plain.solutions


def test_solutions_with_turns_are_measured_as_sft_reads_them():
    task = Products(n_terms=2)
    tokenizer = trl_tokenizer("qwen2_5")
    tools = Tools([calculator])
    sizes = measure(task, tokenizer, 0, needs_eval_split=False, observe=tools.worked_observation)
    problems = PromptSource(task, split="train", seed=0).take(len(sizes.solutions))
    read = [
        encode_completions(tokenizer, ["2"], [one.solution], [one.turns], (), tools.worked_observation)
        for one in problems
    ]
    alone = encode_completions(tokenizer, ["2"], [""]).is_target.logical_not().sum()
    assert sizes.solutions == [batch.n_tokens - int(alone) for batch in read]
    row = encode_completions(tokenizer, ["2*3?"], ["6"], [("2*3", "6")], (), tools.worked_observation)
    assert "<tool_response>\n6\n</tool_response><|im_end|>" in tokenizer.decode(row.input_ids[0])
