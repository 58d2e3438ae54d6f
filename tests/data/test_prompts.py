"""The stream of problems."""

import hashlib
import json
import random
from collections import Counter

import pytest

from lit_rlkv.data.prompts import PromptSource, split_of
from lit_rlkv.tasks import ChainSum, JsonlTask, Sorting, read_preferences
from lit_rlkv.tasks.problems import Problems, RowFormat
from lit_rlkv.tasks.rows import read_lines
from lit_rlkv.types import Message, Problem

TASK = ChainSum(n_terms=4)


class Questions:
    """A finite task of numbered questions."""

    is_verifiable = True

    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def at(self, index):
        return Problem(f"question {index}", str(index), str(index))

    def sample(self, rng):
        raise AssertionError("a finite task is listed, not sampled")

    def score(self, problem, completion):
        return float(completion == problem.answer)

    def corrupt(self, problem, rng):
        return problem.answer + "0"


def source(task=TASK, split="train", seed=0, **ranks):
    return PromptSource(task, split=split, seed=seed, **ranks)


def prompts(problems):
    return [problem.prompt for problem in problems]


def test_a_problem_is_a_function_of_seed_split_and_index():
    fresh, used = source(), source()
    used.take(13)
    random.seed(99)
    assert [used.problem(index) for index in (5, 2)] == [fresh.problem(index) for index in (5, 2)]


@pytest.mark.parametrize("other", [source(seed=1), source(split="eval")])
def test_another_seed_or_split_gives_other_problems(other):
    assert prompts(source().take(20)) != prompts(other.take(20))


@pytest.mark.parametrize("task", [TASK, Questions(300)])
def test_train_and_eval_share_no_prompt_even_under_different_seeds(task):
    train = set(prompts(source(task, "train", seed=0).take(500)))
    evaluation = set(prompts(source(task, "eval", seed=1).take(100)))
    assert train
    assert evaluation
    assert not train & evaluation


def test_about_one_prompt_in_ten_is_for_eval():
    # 10,000 prompts at one in ten: 1000 expected, standard deviation 30.
    counts = Counter(split_of(f"prompt {index}") for index in range(10_000))
    assert 850 < counts["eval"] < 1150


def test_the_split_of_a_text_stays_what_it_always_was():
    # Of these twenty the three whose BLAKE2b digest of 8 bytes, big-endian, is divisible by 10.
    digests = {f"question {n}": hashlib.blake2b(f"question {n}".encode(), digest_size=8) for n in range(20)}
    held_out = {text for text, digest in digests.items() if int(digest.hexdigest(), 16) % 10 == 0}
    assert {text for text in digests if split_of(text) == "eval"} == held_out


def test_a_chat_is_split_by_all_of_its_messages():
    def is_held_out(role, first, last):
        return split_of((Message(role, f"{first}"), Message("user", f"{last}"))) == "eval"

    splits = [is_held_out("system", first, last) for first in range(40) for last in range(40)]
    # 1600 chats at one in ten: 160 expected, standard deviation 12.
    assert 100 < sum(splits) < 220
    # No single message, and no role, decides: among 40 chats that share the rest there are both splits.
    assert len(set(splits[:40])) == len(set(splits[::40])) == 2
    assert splits != [is_held_out("assistant", first, last) for first in range(40) for last in range(40)]


@pytest.mark.parametrize("task", [TASK, Questions(50)])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_ranks_together_see_what_one_process_sees(task, world_size):
    ranks, alone = [source(task) for _ in range(world_size)], source(task)
    sizes = 2 * world_size, 3 * world_size
    shares = [
        [rank.take_places(n, range(number, n, world_size)) for n in sizes]
        for number, rank in enumerate(ranks)
    ]
    for step, n in enumerate(sizes):
        together = [
            problem for turn in zip(*(share[step] for share in shares), strict=True) for problem in turn
        ]
        assert together == alone.take(n)


@pytest.mark.parametrize("task", [TASK, Questions(7)])
def test_a_loaded_cursor_continues_where_it_was_saved(task):
    whole = source(task).take(20)
    saved = source(task)
    saved.take(8)
    resumed = source(task)
    resumed.load_state_dict(saved.state_dict())
    assert resumed.take(12) == whole[8:]
    assert source(task).take(12) != whole[8:]


def test_a_cursor_saved_by_one_rank_continues_on_two():
    saved = source()
    saved.take(6)
    resumed = [source() for _ in range(2)]
    for rank in resumed:
        rank.load_state_dict(saved.state_dict())
    first, second = (rank.take_places(4, range(number, 4, 2)) for number, rank in enumerate(resumed))
    assert [first[0], second[0], first[1], second[1]] == source().take(10)[6:]


@pytest.fixture
def listed(tmp_path):
    """From rows to the stream of a file that holds them."""

    def stream(rows, **options):
        path = tmp_path / "a.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return source(JsonlTask(path), **options)

    return stream


ROWS = [{"prompt": f"question {n}", "answer": f"{n}"} for n in range(30)]
MENDED = [*ROWS[:-1], ROWS[-1] | {"answer": "0"}]


@pytest.mark.parametrize("rows", [MENDED, [*ROWS, {"prompt": "?", "answer": "!"}], ROWS[::-1], ROWS[1:]])
def test_a_cursor_into_other_rows_is_refused(listed, rows):
    saved = json.loads(json.dumps(listed(ROWS).state_dict()))
    with pytest.raises(
        ValueError, match=r"rows of .*a\.jsonl.* have changed .* restore them, or start a new run"
    ):
        listed(rows).load_state_dict(saved)


def test_unused_columns_may_change(listed):
    saved = listed(ROWS)
    saved.take(8)
    resumed = listed([row | {"note": "mended"} for row in ROWS])
    resumed.load_state_dict(saved.state_dict())
    assert resumed.take(4) == saved.take(4)


def test_the_digest_covers_rejected_sides(tmp_path):
    def state(rejected):
        rows = [{"prompt": f"{n}?", "chosen": "a", "rejected": rejected} for n in range(9)]
        (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return source(read_preferences(tmp_path / "a.jsonl")).state_dict()

    assert state("b") == state("b") != state("c")


def test_the_digest_covers_held_out_rows(tmp_path):
    def state(held_out):
        for name, rows in (("train", ROWS), ("test", held_out)):
            (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        table, other = (read_lines(tmp_path / f"{name}.jsonl", RowFormat()) for name in ("train", "test"))
        return source(Problems(table, other, answer_after=None)).state_dict()

    other = [{"prompt": "else", "answer": "1"}]
    assert state(other) == state(other) != state([*other, {"prompt": "more", "answer": "1"}])


@pytest.mark.parametrize("task", [TASK, Questions(7)])
def test_generated_problems_have_no_digest_of_rows(task):
    assert source(task).state_dict() == {"cursor": 0, "rows": None}


def test_a_finite_task_gives_every_problem_of_its_split_once_per_epoch():
    members = {f"question {index}" for index in range(40) if split_of(f"question {index}") == "train"}
    stream = source(Questions(40))
    epochs = [prompts(stream.take(len(members))) for _ in range(3)]
    for epoch in epochs:
        assert len(epoch) == len(members)
        assert set(epoch) == members
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


def test_a_task_too_small_for_a_split_is_refused():
    # Only two prompts exist, "0,1>" and "1,0>", and neither is for eval.
    tiny = Sorting(n_items=2, max_value=1)
    assert split_of("0,1>") == split_of("1,0>") == "train"
    assert len(source(tiny, "train").take(5)) == 5
    with pytest.raises(ValueError, match="no prompt of the eval split: it has too few"):
        source(tiny, "eval").take(1)


def test_a_file_too_small_for_a_split_is_refused_when_the_source_is_built():
    assert split_of("question 0") == "train"
    with pytest.raises(ValueError, match=r"none of the 1 problems .* falls into the eval split"):
        source(Questions(1), "eval")
