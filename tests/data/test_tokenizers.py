"""Text to token ids and back."""

import json

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from lit_rlkv.data.chat import encode_prompts
from lit_rlkv.data.tokenizers import (
    TASK_CHARACTERS,
    build_task_tokenizer,
    check_encodable,
    check_vocabulary,
    decode_completions,
    encode,
    end_token_ids,
    is_end,
    load_tokenizer,
)
from tests.chat_templates import word_tokenizer


def test_ids_are_fixed_one_per_character():
    tokenizer = build_task_tokenizer()
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)
    # Digits start at 2, letters at 12, "+" at 38.
    assert encode(tokenizer, "09az+") == [2, 11, 12, 37, 38]
    assert len(tokenizer) == 2 + len(TASK_CHARACTERS) == 51


def test_every_character_survives_a_round_trip():
    tokenizer = build_task_tokenizer()
    for text in (TASK_CHARACTERS, TASK_CHARACTERS[::-1], "  a  \n\n b,c ?\n"):
        assert tokenizer.decode(encode(tokenizer, text)) == text


@pytest.mark.parametrize(
    ("text", "named"), [("1+A", "'A'"), ("é5", "'é'"), ("1<eos>", "'<'"), ("B\tA", "'\\\\t', 'A', 'B'")]
)
def test_a_character_without_a_token_is_named(text, named):
    with pytest.raises(ValueError, match=f"no token for {named}"):
        encode(build_task_tokenizer(), text)


def test_a_character_without_a_token_is_not_swallowed_by_the_tokenizer_itself():
    with pytest.raises(Exception, match="UNK"):
        build_task_tokenizer()("1+A")


def test_a_text_that_another_tokenizer_knows_only_as_unknown_is_refused():
    check_encodable(word_tokenizer(), "one two")
    with pytest.raises(ValueError, match="no token for 'three' in 'one three'"):
        check_encodable(word_tokenizer(), "one three")


def test_only_actions_are_decoded_and_the_eos_is_left_out():
    # Columns: prompt "7=", then actions "26<eos>", "5" and "<eos>"; what follows an eos is padding.
    input_ids = torch.tensor([[9, 40, 4, 8, 1], [9, 40, 7, 0, 0], [9, 40, 1, 0, 0]])
    response_mask = torch.tensor([[0, 0, 1, 1, 1], [0, 0, 1, 0, 0], [0, 0, 1, 0, 0]]).bool()
    assert decode_completions(build_task_tokenizer(), input_ids, response_mask) == ["26", "5", ""]


def test_of_several_turns_the_last_is_decoded():
    # "2<eos>", an answer "5" that was given, then "6<eos>".
    input_ids = torch.tensor([[9, 40, 4, 1, 7, 8, 1]])
    response_mask = torch.tensor([[0, 0, 1, 1, 0, 1, 1]]).bool()
    assert decode_completions(build_task_tokenizer(), input_ids, response_mask) == ["6"]


def test_a_sampled_pad_token_is_seen_rather_than_dropped():
    input_ids, response_mask = torch.tensor([[4, 0, 8, 1]]), torch.ones(1, 4, dtype=torch.bool)
    assert decode_completions(build_task_tokenizer(), input_ids, response_mask) == ["2<pad>6"]


def test_an_id_without_a_token_is_seen_rather_than_dropped():
    # A vocabulary padded from 51 to 64: without its mark, 2<|60|>6 would pass for 26.
    input_ids, response_mask = torch.tensor([[4, 60, 8, 1]]), torch.ones(1, 4, dtype=torch.bool)
    assert decode_completions(build_task_tokenizer(), input_ids, response_mask) == ["2<|60|>6"]
    assert build_task_tokenizer().decode([4, 60, 8]) == "26"
    input_ids = torch.tensor([[4, 5, 8, 1], [60, 61, 8, 62], [60, 4, 60, 8]])
    response_mask = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 1], [0, 1, 1, 1]]).bool()
    assert decode_completions(build_task_tokenizer(), input_ids, response_mask) == [
        "236", "<|60|><|61|>6<|62|>", "2<|60|>6",
    ]  # fmt: skip
    assert decode_completions(build_task_tokenizer(), input_ids, torch.zeros_like(response_mask)) == [""] * 3


def test_a_response_is_decoded_as_it_was_sampled(tmp_path):
    # Words are joined by spaces, and the tokenizer's own setting would then close up `a !`.
    backend = Tokenizer(
        models.WordLevel({"<eos>": 0, "<pad>": 1, "a": 2, "!": 3, "n't": 4, "<unk>": 5}, "<unk>")
    )
    special = {"eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(
        tokenizer_object=backend, clean_up_tokenization_spaces=True, **special
    ).save_pretrained(tmp_path)
    tokenizer, input_ids = load_tokenizer(str(tmp_path)), torch.tensor([[2, 3, 2, 4, 0], [2, 60, 2, 3, 0]])
    assert tokenizer.decode(input_ids[0]) == "a! an't <eos>"
    everything = torch.ones_like(input_ids, dtype=torch.bool)
    assert decode_completions(tokenizer, input_ids, everything) == ["a ! a n't", "a<|60|>a !"]


def write_ends(folder, ends):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))


def test_the_ends_of_a_response_are_those_of_tokenizer_and_generation_config(tmp_path):
    tokenizer = word_tokenizer(eos_token="<eos>", pad_token="<pad>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<turn>"]})
    tokenizer.save_pretrained(tmp_path)
    assert end_token_ids(load_tokenizer(str(tmp_path))) == [2]
    write_ends(tmp_path, [6, 2])
    loaded = load_tokenizer(str(tmp_path))
    assert end_token_ids(loaded) == [2, 6]
    input_ids = torch.tensor([[4, 5, 6], [4, 2, 3], [4, 5, 4]])
    assert is_end(loaded, input_ids).tolist() == [
        [False, False, True],
        [False, True, False],
        [False, False, False],
    ]
    everything = torch.ones_like(input_ids, dtype=torch.bool)
    everything[1, 2] = False
    assert decode_completions(loaded, input_ids, everything) == ["one two", "one", "one two one"]
    write_ends(tmp_path, 6)
    assert end_token_ids(load_tokenizer(str(tmp_path))) == [2, 6]


def test_an_ordinary_word_is_never_an_end_token(tmp_path):
    word_tokenizer(eos_token="<eos>", pad_token="<pad>").save_pretrained(tmp_path)
    write_ends(tmp_path, [2, 5])
    assert end_token_ids(load_tokenizer(str(tmp_path))) == [2]


def test_a_model_without_an_embedding_for_padding_or_an_end_is_refused():
    tokenizer = word_tokenizer(eos_token="<eos>", pad_token="<pad>")
    check_vocabulary(tokenizer, 6)
    with pytest.raises(ValueError, match=r"<pad> \(3\), one \(4\), two \(5\) are beyond the 3 tokens"):
        check_vocabulary(tokenizer, 3)


def test_a_tokenizer_whose_words_the_model_does_not_embed_is_refused():
    tokenizer = word_tokenizer(eos_token="<eos>", pad_token="<pad>")
    with pytest.raises(ValueError, match=r"the tokenizer's two \(5\) are beyond the 5 tokens"):
        check_vocabulary(tokenizer, 5)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})  # which no text has
    check_vocabulary(tokenizer, 6)
    tokenizer.add_tokens(["three"])
    with pytest.raises(ValueError, match=r"three \(7\)"):
        check_vocabulary(tokenizer, 7)


def test_no_path_means_the_task_tokenizer():
    assert load_tokenizer(None).get_vocab() == build_task_tokenizer().get_vocab()


@pytest.mark.parametrize("name", ["tokenizer.json", "generation_config.json"])
def test_a_damaged_file_of_a_tokenizer_is_told_with_its_folder(tmp_path, name):
    word_tokenizer(eos_token="<eos>", pad_token="<pad>").save_pretrained(tmp_path)
    (tmp_path / name).write_text('[{"a": 1}]')
    with pytest.raises(ValueError, match=f"{tmp_path} has a file that is damaged or not whole"):
        load_tokenizer(str(tmp_path))


def test_a_saved_task_tokenizer_comes_back_with_its_checks(tmp_path):
    build_task_tokenizer().save_pretrained(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    assert encode_prompts(tokenizer, ["1+2", "9"]).input_ids.tolist() == [[3, 38, 4], [0, 0, 11]]
    assert tokenizer.decode(encode(tokenizer, "a , b\n?")) == "a , b\n?"
    with pytest.raises(ValueError, match="no token for 'A'"):
        encode(tokenizer, "A")


def test_a_loaded_tokenizer_pads_on_the_left_with_its_eos_if_it_has_no_pad_token(tmp_path):
    word_tokenizer(eos_token="<eos>", padding_side="right").save_pretrained(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 2
    assert tokenizer.padding_side == "left"


def test_a_loaded_tokenizer_keeps_its_own_pad_token(tmp_path):
    word_tokenizer(eos_token="<eos>", pad_token="<pad>").save_pretrained(tmp_path)
    assert load_tokenizer(str(tmp_path)).pad_token_id == 3


def test_a_tokenizer_that_cannot_end_a_completion_is_refused(tmp_path):
    word_tokenizer(pad_token="<pad>").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="has no eos token"):
        load_tokenizer(str(tmp_path))
