"""Conversations to token ids, in rollouts and in SFT, against what chat templates write for the whole."""

# ruff: noqa: E501, RUF001, as templates are long and have such characters

import json
import resource
from functools import partial

import pytest
from tokenizers import processors

from lit_rlkv.config.schema import RolloutConfig
from lit_rlkv.data.chat import (
    encode_observation,
    encode_prompt,
    encode_prompts,
    format_prompt,
)
from lit_rlkv.data.chat_template import LIMITS, choose_template, turn_ends
from lit_rlkv.data.demonstrations import encode_completions
from lit_rlkv.data.tokenizers import build_task_tokenizer, decode_turn, encode, end_token_ids, load_tokenizer
from lit_rlkv.environments import Environment
from lit_rlkv.environments.conversations import EnvironmentPool
from lit_rlkv.types import Message, Problem, prompt_text
from tests.chat_templates import byte_tokenizer, folder, trl_tokenizer, word_tokenizer

CHAT = (Message("user", "one"), Message("assistant", "two"), Message("user", "one two"))
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_prompts_are_padded_on_the_left():
    prompts = encode_prompts(build_task_tokenizer(), ["1+2", "9"])
    assert prompts.input_ids.tolist() == [[3, 38, 4], [0, 0, 11]]
    assert prompts.attention_mask.tolist() == [[True, True, True], [False, False, True]]


def test_prompts_of_other_models_begin_with_their_opening_token():
    prompts = encode_prompts(word_tokenizer(pad_token="<pad>", eos_token="<eos>"), ["one two", "two"])
    assert prompts.input_ids.tolist() == [[1, 4, 5], [3, 1, 5]]


@pytest.mark.parametrize("closing", ["<eos>", "<eos> <eos>", "<turn>"])
def test_a_prompt_does_not_end_with_an_end_token(closing):
    tokenizer = word_tokenizer(eos_token="<eos>", pad_token="<pad>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<turn>"]})
    tokenizer.end_ids = (tokenizer.convert_tokens_to_ids("<turn>"),)  # of a generation config
    plain = encode_prompt(tokenizer, "one two")
    special = [(name, tokenizer.convert_tokens_to_ids(name)) for name in ("<bos>", *{*closing.split()})]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"<bos> $A {closing}", special_tokens=special
    )
    assert tokenizer.encode("one two")[-1] in end_token_ids(tokenizer)  # negative control
    assert encode_prompt(tokenizer, "one two") == plain
    assert encode_prompts(tokenizer, ["one two", "two"]).input_ids[0].tolist() == plain
    assert encode(tokenizer, "two") == [5]


def test_a_chat_template_wraps_the_prompt_once_and_adds_no_opening_token():
    tokenizer = word_tokenizer(pad_token="<pad>", eos_token="<eos>")
    tokenizer.chat_template = "<bos>{{ messages[0].content }}{% if add_generation_prompt %} two{% endif %}"
    assert format_prompt(tokenizer, "one") == "<bos>one two"
    assert encode_prompts(tokenizer, ["one"]).input_ids.tolist() == [[1, 4, 5]]


def chat_tokenizer(template):
    tokenizer = word_tokenizer(pad_token="<pad>", eos_token="<eos>")
    tokenizer.chat_template = template
    return tokenizer


def test_a_chat_goes_through_the_template_message_by_message():
    assert format_prompt(chat_tokenizer(TEMPLATE), CHAT) == "<user>one<assistant>two<user>one two<assistant>"


def test_a_text_is_a_chat_of_one_user_message():
    tokenizer = chat_tokenizer(TEMPLATE)
    assert format_prompt(tokenizer, "one") == format_prompt(tokenizer, (Message("user", "one"),))
    assert format_prompt(tokenizer, "one") != format_prompt(tokenizer, (Message("system", "one"),))


def test_chats_and_texts_make_one_batch_without_opening_tokens():
    tokenizer = chat_tokenizer("<bos>{% for message in messages %} {{ message.content }}{% endfor %}")
    prompts = encode_prompts(tokenizer, [CHAT, "two"])
    assert prompts.input_ids.tolist() == [[1, 4, 5, 4, 5], [3, 3, 3, 1, 5]]


def test_a_chat_without_a_template_to_write_it_with_is_refused():
    says = (
        "no chat template to write the chat 'user: one.* with; use a model that has one, or prompts .* text"
    )
    for tokenizer in (build_task_tokenizer(), word_tokenizer(pad_token="<pad>", eos_token="<eos>")):
        with pytest.raises(ValueError, match=says):
            encode_prompt(tokenizer, CHAT)


def test_a_chat_that_the_template_refuses_is_shown_with_the_reason():
    tokenizer = chat_tokenizer("{{ raise_exception('no system messages here') }}")
    with pytest.raises(
        ValueError, match="refuses 'system: one': no system messages here; change the messages"
    ):
        encode_prompt(tokenizer, (Message("system", "one"),))


def test_an_unknown_word_is_named_wherever_in_a_chat_it_stands():
    with pytest.raises(ValueError, match="no token for 'three' in 'two three'"):
        encode_prompt(chat_tokenizer(TEMPLATE), (Message("system", "two three"), Message("user", "one")))


def test_prompt_text_shows_the_roles_of_a_chat():
    assert prompt_text(CHAT) == "user: one\nassistant: two\nuser: one two"
    assert prompt_text("1+2=") == "1+2="


def test_without_a_chat_template_the_prompt_stays_as_it_is():
    assert format_prompt(build_task_tokenizer(), "1+2=") == "1+2="


@pytest.mark.parametrize("prompts", [[], [""], ["1", ""]])
def test_empty_prompts_are_refused(prompts):
    with pytest.raises(ValueError, match=r"empty list|no tokens"):
        encode_prompts(build_task_tokenizer(), prompts)


CHATML = (
    "{% if tools %}tools: {% for t in tools %}{{ t.function.name }} {% endfor %};{% endif %}"
    "{% for m in messages %}{% if m.role != 'tool' or true %}"
    "={{ m.role }}\n{{ m.content }}<eos>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}=assistant\n{% endif %}"
)


def chatml_tokenizer(template=CHATML):
    tokenizer = build_task_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def test_an_observation_is_what_the_template_writes_after_a_turn():
    tokenizer = chatml_tokenizer()
    ids = encode_observation(tokenizer, [Message("tool", "84")])
    assert tokenizer.decode(ids) == "\n=tool\n84<eos>\n=assistant\n"
    assert tokenizer.decode(encode_observation(tokenizer, "84")) == "\n=user\n84<eos>\n=assistant\n"
    # So a conversation that goes on has the tokens of the whole in the template.
    prompt = encode_prompt(tokenizer, "12*7?")
    turn = [*encode(tokenizer, "12*7"), tokenizer.eos_token_id]
    whole = (Message("user", "12*7?"), Message("assistant", "12*7"), Message("tool", "84"))
    assert encode_prompt(tokenizer, whole) == [*prompt, *turn, *ids]


def test_an_observation_without_a_template_is_its_text():
    tokenizer = build_task_tokenizer()
    assert encode_observation(tokenizer, "84\n") == encode(tokenizer, "84\n")
    for observation in ([Message("tool", "84")], ""):
        with pytest.raises(ValueError, match=r"template|no token"):
            encode_observation(tokenizer, observation)


@pytest.mark.parametrize(("text", "read"), [("Bad!", "?ad?"), ("1<eos>", "1?eos>"), ("\ud8006", "?6")])
def test_characters_of_an_observation_that_the_tokenizer_lacks_are_replaced(text: str, read: str):
    tokenizer = build_task_tokenizer()
    assert tokenizer.decode(encode_observation(tokenizer, text)) == read
    with pytest.raises(ValueError, match="no token"):
        encode_completions(tokenizer, ["1"], [text])  # of a solution they are an error


def test_a_template_that_leaves_a_message_out_is_refused():
    dropping = CHATML.replace("or true", "or false")
    with pytest.raises(ValueError, match="tool"):
        encode_observation(chatml_tokenizer(dropping), [Message("tool", "84")])


def test_a_template_describes_the_tools():
    def add(a: int) -> int:
        """Add.

        Args:
            a: one.
        """
        return a

    text = format_prompt(chatml_tokenizer(), "1", [add])
    assert text == "tools: add ;=user\n1<eos>\n=assistant\n"


QUESTION, OTHER = {"role": "user", "content": "2*3?"}, {"role": "user", "content": "Again."}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
RESULTS = ["6", 'say "hi"\nC:\\x', "Zürich", json.dumps({"city": "Zürich"}), "end", ""]
TEMPLATES = sorted(path.stem for path in folder().glob("*.jinja"))
NO_TEXT = {"idefics3", "llava_next", "smolvlm"}
"""Templates of images and text, which take no content that is a text."""
NO_TOOL = {"cohere", "cohere2", "gemma", "gemma3", "phi3", "phi3_5"}
SWALLOWS_CALLS = {"lfm2", "llama3", "qwen2_5_vl", "deepseek_r1_distill", "deepseekv3"}
"""Templates that leave out `tool_calls`, or fail on them: the call is the text of the turn."""
REWRITES_TOOL_TURNS = {"deepseek_r1_distill", "deepseekv3", "qwen3_5_nothink"}
"""Templates that drop from a turn what the generation prompt has opened, once a result follows."""
REWRITES_TURNS = REWRITES_TOOL_TURNS | {
    "nemotron_3_5_lightning", "nemotron_3_nano", "nemotron_3_super", "nemotron_3_ultra", "qwen3_5_think", "qwen3_6",
}  # fmt: skip
"""Templates that drop thoughts of a turn once the user has answered."""
ENDS = {
    "cohere": ("<|END_OF_TURN_TOKEN|>",), "cohere2": ("<|END_RESPONSE|>", "<|END_OF_TURN_TOKEN|>"),
    "deepseek": ("<｜end▁of▁sentence｜>",), "gemma4": ("<turn|>",), "diffusion": ("<turn|>",),
    "gemma": ("<end_of_turn>",), "lfm2": ("<|im_end|>",), "nemotron": ("<|im_end|>",), "qwen": ("<|im_end|>",),
    "llama3": ("<|eot_id|>",), "muse": ("<|eot|>",), "phi3": ("<|end|>",), "gptoss": ("<|return|>",), "glm4": ("<eos>",),
    "glm4moe_training": ("<|user|>",),
}  # fmt: skip
"""Tokens that end the last turn, by the beginning of the template's name."""
OTHER_ENDS = {
    "user": {"glm4moe": ("<|user|>",)},
    "tool": {"glm4moe": ("<|observation|>",), "gptoss": ("<|call|>",)}
    | dict.fromkeys(
        ["gemma4", "gemma4_v3", "gemma4_v4", "gemma4_v5", "diffusion_gemma"], ("<|tool_response>",)
    ),
}
"""Tokens that end a turn that the user answers, and one that calls a tool, where they differ."""


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: one.
        b: the other.
    """
    return a + b


class Told(Environment):
    """Gives one observation after each turn."""

    def __init__(self, role: str, text: str) -> None:
        self.tools = [add] if role == "tool" else []
        self.given = [Message(role, text, "add" if role == "tool" else None)] if role != "user" else text

    def step(self, response):
        return self.given, 0.0, False

    def worked_observation(self, response, text):
        return self.given


def tokenizer_of(name, kind):
    """Return the tokenizer of a template, and the ends of a turn of this kind and of the last turn."""
    last = ENDS[max(filter(name.startswith, ENDS), key=len)]
    end = OTHER_ENDS[kind].get(name.removesuffix("_training"), last)
    return trl_tokenizer(name, last[0] if len(last) == 1 else "<eos>", end), end, last


def plain(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False)


def conversations(tokenizer, tools, chat):
    """Return what the template writes of a prompt, up to the second turn, and of the whole."""
    write = partial(tokenizer.apply_chat_template, tools=tools or None, tokenize=False)
    return (
        write(chat[:1], add_generation_prompt=True),
        write(chat[:3], add_generation_prompt=True),
        write(chat, add_generation_prompt=False),
    )


def check(name, kind, result):
    """Compare rollout, SFT and template; return if it keeps the turn, and what was given after it."""
    family = name.removesuffix("_training")
    tokenizer, end, last = tokenizer_of(name, kind)
    end, last = "".join(end), "".join(last)
    turn = {"role": "assistant", "content": "5", "reasoning_content": "t"}
    if kind == "tool" and family in SWALLOWS_CALLS:
        turn = {"role": "assistant", "content": "<tool_call>add</tool_call>"}
    elif kind == "tool":
        turn = {"role": "assistant", "content": "", "reasoning_content": "t", "tool_calls": [CALL]}
    given = {"role": kind, "content": result} | ({"name": "add"} if kind == "tool" else {})
    environment = partial(Told, kind, result)
    pool = EnvironmentPool(environment, RolloutConfig(environment_timeout_s=None), tokenizer)
    pool.check()
    answer = {"role": "assistant", "content": "6", "reasoning_content": "t"}
    prompt, until, whole = conversations(tokenizer, pool.tools, [QUESTION, turn, given, answer])
    if family == "gptoss" and kind == "user":  # the end of a turn that it samples, it rewrites
        until, whole = (text.replace("5<|end|>", "5<|return|>") for text in (until, whole))
    said = until[len(prompt) :].partition(end)[0] if until.startswith(prompt) else "5"
    is_kept = until.startswith(prompt)
    # Rollout: prompt, sampled turn, observation.
    talk = pool.begin([Problem((Message("user", "2*3?"),), "", "")])
    ids = encode_prompt(tokenizer, talk.prompts(1)[0], pool.tools)
    sampled = plain(tokenizer, said + end)
    observed = talk.answer(0, talk.ask(0, sampled), 10_000)
    assert not talk.errors
    assert decode_turn(tokenizer, sampled) == said
    if is_kept:
        assert [*ids, *sampled, *observed] == plain(tokenizer, until)
    else:
        assert until.endswith(tokenizer.decode(plain(tokenizer, end) + observed))
    # SFT: the same, and the last turn.
    spoken = whole[len(until) :].partition(last)[0] if whole.startswith(until) else "6"
    batch = encode_completions(
        tokenizer,
        [(Message("user", "2*3?"),)],
        [spoken],
        [(said, result)],
        pool.tools,
        pool.worked_observation,
    )
    assert batch.input_ids[0].tolist() == [*ids, *sampled, *observed, *plain(tokenizer, spoken + last)]
    assert tokenizer.decode(batch.input_ids[0][batch.is_target[0]]) == said + end + spoken + last
    if is_kept and whole.startswith(until):
        read = tokenizer.decode(batch.input_ids[0])
        assert read.removesuffix("<eos>") == whole[: len(read.removesuffix("<eos>"))]
        assert whole[len(read) :].strip() in ("", "<|end|>", "<|endoftext|>", "<|user|>")
    return is_kept, observed


@pytest.mark.parametrize("name", [one for one in TEMPLATES if one.removesuffix("_training") not in NO_TEXT])
def test_rollout_and_sft_read_what_the_template_writes_for_a_user_who_answers(name: str):
    is_kept, _ = check(name, "user", "Again.")
    if not name.endswith("_training"):
        assert is_kept == (name not in REWRITES_TURNS)


@pytest.mark.parametrize(
    "name", [one for one in TEMPLATES if one.removesuffix("_training") not in NO_TEXT | NO_TOOL]
)
def test_rollout_and_sft_read_what_the_template_writes_for_a_tools_result(name: str):
    for result in RESULTS:
        is_kept, observed = check(name, "tool", result)
    family = name.removesuffix("_training")
    assert is_kept == (family not in REWRITES_TOOL_TURNS)
    tokenizer, _, _ = tokenizer_of(name, "tool")
    assert observed != encode_observation(tokenizer, "")  # negative control: the user's


@pytest.mark.parametrize(
    ("name", "ends", "turn", "observation", "written"),
    [
        ("glm4moe", ("<|user|>", "<|observation|>"), "<eos>", "tool", "<|observation|>\n<tool_response>\n6\n</tool_response><|assistant|>"),
        ("glm4moe", ("<|user|>", "<|observation|>"), "<|observation|>", "tool", "\n<tool_response>\n6\n</tool_response><|assistant|>"),
        ("cohere2", (), "<|END_RESPONSE|><|END_OF_TURN_TOKEN|>", "user", "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>6"),
        ("cohere2", (), "<|END_OF_TURN_TOKEN|>", "user", "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>6"),
        ("gptoss", ("<|return|>",), "<|return|>", "user", "<|start|>user<|message|>6"),
        ("qwen2_5", ("<|endoftext|>",), "<|endoftext|>", "user", "\n<|im_start|>user\n6"),
        ("qwen2_5", (), "cut", "user", "<|im_end|>\n<|im_start|>user\n6"),
        ("gemma4", (), "<turn|>", "tool", "<|tool_response>response:add{"),
    ],
)  # fmt: skip
def test_the_end_that_was_sampled_stands_once(name, ends, turn, observation, written):
    tokenizer = trl_tokenizer(name, ends=ends)
    ids = encode_observation(tokenizer, [Message(observation, "6", "add")], plain(tokenizer, f"5{turn}"))
    assert tokenizer.decode(ids).startswith(written)


@pytest.mark.parametrize(
    ("template", "ends"),
    [
        ("{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}<|assistant|>", [""]),
        ("{% for m in messages %}<|im_start|>{{ m.role }}<|x|>{{ m.content }}<|im_end|>{% endfor %}<|im_start|>assistant<|x|>", ["<|im_end|>"]),
        ("{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}{{ '\n<eos>' }}{% endif %}{% endfor %}", ["\n<eos>"]),
        ("{{ messages[0].content }}{{ messages[1].content }}<|im_end|>{{ raise_exception('no') if messages[2] }}", [""]),
        ("{{ 1 // 0 }}", [""]),
    ],
)  # fmt: skip
def test_the_end_of_a_turn_is_what_the_template_writes_there(template, ends):
    tokenizer = byte_tokenizer(template)
    assert tokenizer.decode([*turn_ends(tokenizer)[0]]) == "".join(ends)


LOOP = "{% for a in range(10000) %}{% for b in range(10000) %}{% endfor %}{% endfor %}" * 9
BOMBS = {
    "{{ 1 // 0 }}": "by zero",
    "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}": "recursion",
    "{% set x = 'a' * 40000000000 %}": "memory",
    "{% for i in range(10**12) %}{% endfor %}": "Range too big",
    "{% set n = range(10000) %}{% for i in n %}{% for j in n %}{% for k in n %}{% endfor %}{% endfor %}{% endfor %}": "more than 2 s",
    "{{ '%1000000000d' % 1 }}": "memory",
    "{% for i in range(30000) %}{{ messages[0].content * 100 }}{% endfor %}": "too long",
    "{{ 1 + messages[0].content }}": "unsupported operand",
    "{{ messages[0].content | replace('', 'a' * 10000000) }}": "memory|too long",
    "{{ 10 ** (10 ** 9) }}": "more than 2 s|memory",
    "{% if": "unexpected|Expected|expected",
    "{% if tools %}" + LOOP + "{% endif %}{{ messages[0].content }}": "more than 2 s",
    "{% for m in messages %}{% if m.role == 'tool' %}" + LOOP + "{% endif %}{{ m.content }}{% endfor %}": "more than 2 s",
    "{% if messages[1].content|length > 300 %}{% set x = 'a' * 40000000000 %}{% endif %}{{ messages[0].content }}": "memory",
}  # fmt: skip


@pytest.mark.parametrize("template", BOMBS)
def test_a_template_that_fails_or_never_ends_is_refused_in_one_line(tmp_path, monkeypatch, template: str):
    monkeypatch.setitem(LIMITS, "limit_s", 2)
    tokenizer = byte_tokenizer("")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(tmp_path)
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match=f"chat template refuses .*({BOMBS[template]})") as refused:
        encode_prompt(load_tokenizer(str(tmp_path)), "2*3?")
    assert "\n" not in str(refused.value)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - used < 100_000  # KiB


def test_a_template_of_a_folder_is_rendered_as_before(tmp_path):
    for name in ("qwen3", "gemma4_v5", "gptoss_training"):
        trl_tokenizer(name).save_pretrained(tmp_path / name)
        tokenizer = load_tokenizer(str(tmp_path / name))
        assert encode_prompt(tokenizer, "2*3?") == encode_prompt(trl_tokenizer(name), "2*3?")


def test_one_of_several_templates_writes_all_texts():
    tokenizer = trl_tokenizer("qwen3")
    qwen = tokenizer.chat_template
    tokenizer.chat_template = {"default": qwen.replace("im_end", "end"), "tool_use": qwen}
    choose_template(tokenizer, [add])
    assert encode_observation(tokenizer, [Message("tool", "6", "add")]) == encode_observation(
        trl_tokenizer("qwen3"), [Message("tool", "6", "add")]
    )
