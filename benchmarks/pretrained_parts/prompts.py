"""Prompts of the pretrained benchmark, made from a seed: documents, few-shot questions, chats."""

import random
from dataclasses import dataclass
from itertools import cycle, islice

SEED = 20_261_124

FACTS = (
    ("name of the gardener", ("Oscar", "Martin", "Daniel", "Victor", "Samuel", "Peter")),
    ("password of the library", ("banana", "thunder", "velvet", "copper", "cactus", "marble")),
    ("color of the front door", ("red", "green", "yellow", "purple", "orange", "blue")),
    ("pet of the director", ("parrot", "rabbit", "turtle", "hamster", "cat", "lizard")),
    ("day of the cleaning", ("Monday", "Tuesday", "Wednesday", "Thursday", "Saturday", "Sunday")),
    ("city of the head office", ("Madrid", "Boston", "Vienna", "Denver", "Dublin", "Chicago")),
    ("instrument of the cook", ("violin", "piano", "guitar", "trumpet", "flute", "drum")),
)
"""Facts that a document may tell, each with its possible values."""
FILLERS = (
    "Staff meetings take place every week, and everyone is welcome to bring a question.",
    "The building was renovated a few years ago and now has large windows on every floor.",
    "Visitors are asked to sign the book at the entrance before they go upstairs.",
    "In winter the heating is switched on early in the morning.",
    "Lunch is served in the garden when the weather is good.",
    "A small library on the second floor is open to all members of the team.",
    "The parking area behind the house is shared with the neighbors.",
    "Most of the furniture was donated by a local company.",
    "The printer near the stairs is often out of paper, so please plan ahead.",
    "On Fridays the doors are closed a little earlier than on other days.",
    "New employees receive a short tour on their first day.",
    "The old elevator makes some noise, but it is checked every year.",
)
N_FACTS, N_SENTENCES, N_ANSWERED = 5, 20, 3

ANTONYMS = (
    ("hot", "cold"), ("big", "small"), ("fast", "slow"), ("happy", "sad"), ("early", "late"),
    ("open", "closed"), ("light", "dark"), ("strong", "weak"), ("rich", "poor"), ("hard", "soft"),
    ("young", "old"), ("high", "low"), ("full", "empty"), ("wet", "dry"), ("long", "short"),
    ("thick", "thin"), ("loud", "quiet"), ("clean", "dirty"), ("good", "bad"), ("right", "wrong"),
)  # fmt: skip
CAPITALS = (
    ("France", "Paris"), ("Germany", "Berlin"), ("Italy", "Rome"), ("Spain", "Madrid"), ("Japan", "Tokyo"),
    ("England", "London"), ("Russia", "Moscow"), ("China", "Beijing"), ("Egypt", "Cairo"),
    ("Greece", "Athens"),
    ("Austria", "Vienna"), ("Ireland", "Dublin"), ("Norway", "Oslo"), ("Sweden", "Stockholm"),
    ("Portugal", "Lisbon"), ("Poland", "Warsaw"), ("Canada", "Ottawa"), ("Cuba", "Havana"),
    ("Peru", "Lima"), ("Hungary", "Budapest"),
)  # fmt: skip
N_SHOTS = 12

CHATS = (
    ("planning a trip to the mountains", "what to pack", "the weather"),
    ("growing vegetables in a small garden", "which plants are easy", "insects"),
    ("learning to play the guitar", "how to practice every day", "good songs for beginners"),
    ("cooking for a large family", "how to plan the meals of a week", "saving money"),
    ("sleeping better at night", "what to avoid in the evening", "keeping a regular rhythm"),
    ("starting to run", "how far to go in the first weeks", "avoiding injuries"),
    ("writing a short story", "how to invent a good character", "finding an ending"),
    ("taking care of a dog", "how often to walk with it", "teaching it commands"),
    ("moving to a new city", "how to find an apartment", "meeting people"),
    ("preparing for a job interview", "which questions to expect", "being nervous"),
    ("repairing a bicycle", "which tools are needed", "a flat tire"),
    ("reading more books", "how to choose a book", "remembering what was read"),
    ("painting a room", "which colors to choose", "cleaning up afterwards"),
    ("organizing a birthday party", "whom to invite", "games for children"),
    ("learning a foreign language", "how to learn new words", "speaking without fear"),
    ("keeping a house clean", "how to plan the work", "getting help from the family"),
)
"""Topic, and what is asked about it in the second and the third turn."""
N_TURNS = 3


@dataclass(frozen=True)
class Example:
    """A prompt, and the text that a right answer holds; None if there is none."""

    prompt: str
    answer: str | None

    def is_right(self, response: str) -> bool:
        """True if the first line of the response ends with the answer."""
        words = response.strip().split("\n")[0].rstrip(". ").split()
        return self.answer is not None and bool(words) and words[-1].strip(".,") == self.answer


def recall(n: int) -> list[Example]:
    """Return documents with facts among fillers, some questions answered, and one more question."""
    return [_document(random.Random(SEED + number)) for number in range(n)]


def _document(draw: random.Random) -> Example:
    facts = [(name, draw.choice(values)) for name, values in draw.sample(FACTS, N_FACTS)]
    sentences = list(islice(cycle(draw.sample(FILLERS, len(FILLERS))), N_SENTENCES))
    for spot, (name, value) in zip(draw.sample(range(N_SENTENCES), N_FACTS), facts, strict=True):
        sentences[spot] = _statement(name, value)
    *answered, (asked, answer) = draw.sample(facts, N_ANSWERED + 1)
    parts = ["Read the document and answer the questions.", " ".join(sentences), ""]
    text = "\n\n".join(parts) + "".join(
        f"{_ask(name)} {_statement(name, value)}\n" for name, value in answered
    )
    # The first response token is sampled with all keys, so the prompt itself begins the answer.
    return Example(text + _ask(asked) + " The", answer)


def _statement(name: str, value: str) -> str:
    return f"The {name} is {value}."


def _ask(name: str) -> str:
    return f"Question: What is the {name}?\nAnswer:"


def few_shot(n: int) -> list[Example]:
    """Return questions of three kinds in turn, each after worked examples of its kind."""
    makers = (_antonym, _capital, _pattern)
    return [makers[number % 3](random.Random(SEED + number)) for number in range(n)]


def _antonym(draw: random.Random) -> Example:
    return _shots(draw, ANTONYMS, "What is the opposite of {}?", "The opposite of {} is {}.")


def _capital(draw: random.Random) -> Example:
    return _shots(draw, CAPITALS, "What is the capital of {}?", "The capital of {} is {}.")


def _pattern(draw: random.Random) -> Example:
    words = [first for pair in ANTONYMS for first in pair]
    chosen = draw.sample(words, N_SHOTS + 1)
    pairs = [(f"{word} {other}", word) for word, other in zip(chosen, reversed(chosen), strict=True)]
    return _shots(draw, pairs, "What is the first word of {}?", "The first word of {} is {}.")


def _shots(draw: random.Random, pairs: object, question: str, answer: str) -> Example:
    chosen = draw.sample(list(pairs), N_SHOTS + 1)
    lines = [f"Question: {question.format(x)}\nAnswer: {answer.format(x, y)}\n" for x, y in chosen[:-1]]
    asked, expected = chosen[-1]
    return Example("".join(lines) + f"Question: {question.format(asked)}\nAnswer:", expected)


def chat_turns(number: int) -> list[str]:
    """Return the three messages of the user in a chat."""
    topic, second, third = CHATS[number % len(CHATS)]
    return [
        f"I would like some advice about {topic}. Can you explain in detail how to begin?",
        f"Thank you. Please tell me more about {second}, with some examples.",
        f"That helps. I am also thinking about {third}. What should I know about it?",
    ]
