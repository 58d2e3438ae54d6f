"""Reward functions that look at the final answer or the form of a completion."""

import re
import time

import pytest

from lit_rlkv.rewards import ExactMatch, MathVerify, Numeric, Regex
from lit_rlkv.types import Problem
from tests.rewards.helpers import opened, score


@pytest.mark.parametrize(
    ("options", "completion", "expected"),
    [
        ({}, " Paris\n", 1.0),
        ({}, "paris", 0.0),
        ({}, "It is Paris", 0.0),
        ({"ignore_case": True}, "PARIS", 1.0),
        ({"answer_after": "####"}, "Rome #### Paris", 1.0),
        ({"answer_after": "####"}, "#### Paris #### Rome", 0.0),
        ({"answer_after": "####"}, "Paris", 0.0),
    ],
)
def test_the_final_answer_must_be_the_reference(options, completion, expected):
    assert score(ExactMatch(**options), completion, "Paris") == expected


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        ("10 - 3 = 7", "7", 1.0),
        (r"2\times3 is 6", "6", 1.0),
        (r"10 - \frac{1}{2}", "1/2", 0.0),
        ("1/3", "0.333", 0.0),
        ("50%", "50", 1.0),
        ("50%", "0.5", 1.0),
        ("0.5", "50%", 1.0),
        ("50%", "0.5%", 0.0),
        ("5 or 6", "5", 0.0),  # the last number counts
        ("5 or 6", "6", 1.0),
        ("5, so 10^6", "5", 0.0),
        ("x2 is 3cm", "3", 1.0),
        ("x2", "2", 0.0),
        ("no number", "2", 0.0),
        ("", "2", 0.0),
        ("9" * 5000, "9", 0.0),
        (r"\boxed{\frac{3}{4}}", "0.75", 1.0),
        (r"\boxed{\frac{3}{4}}", "4", 0.0),
        ("3 1/2", "0.5", 0.0),
        ("答案是18。", "18", 1.0),
        ("it is...18", "0.18", 0.0),
    ],
)
def test_the_last_number_is_the_answer(completion, answer, expected):
    assert score(Numeric(), completion, answer) == expected


# fmt: off
NUMBERS = [  # a number, and forms that are read as it
    # sign
    ("5", ["5", "+5", "5.", "5,", "5!", "5...", "005", "= +5", "x = 5", "the answer – 5", "a list:\n- 5"]),
    ("-5", ["-5", "−5", "–5", "- 5", "− 5", "– 5", "is - 5", "= − 5", "x: - 5", "-(5)", "(-5)", "-{5}",
            "**-5**", "minus 5", "negative 5", "it is minus 5", r"\boxed{-5}", "$-5$", "so\n-5", "答案是-5"]),
    # currency
    ("5", ["$5", r"\$5", "$ 5", "€5", "5€", "5 €", "5$", "US$5", "£5.00", "¥5", "5 dollars", "$5$"]),
    ("-5", [r"-\$5", "-$5", "$-5", "- $5", "−€5", "-US$5", r"$-\$5$"]),
    # thousands
    ("1000", ["1,000", "1000", "1{,}000", r"1\,000", r"1\, 000", r"1\;000", r"1\ 000", "1 000", "1\u00a0000",
              "1\u202f000", "1'000", "1’000", "1_000", "1,000.00", "$1,000", "1 thousand", "1\u200b000"]),
    ("12500", ["12,500", "12{,}500", r"12\,500", "12 500", "12.5 thousand"]),
    ("12345678", ["12,345,678", "12 345 678", r"12\,345\,678", "12{,}345{,}678", "12_345_678", "12'345'678"]),
    # fractions
    ("0.75", ["3/4", "3 / 4", r"\frac{3}{4}", r"\frac34", r"\frac{3}4", r"\dfrac{3}{4}", r"\tfrac{ 3 }{ 4 }",
              "¾", "3\u20444", ".75", "0.750", r"\frac{1.5}{2}"]),
    ("-3/4", ["-3/4", "-¾", r"-\frac{3}{4}", r"\frac{-3}{4}", r"\frac{–3}{4}", "-.75", "- 3/4"]),
    ("3.5", ["3½", "3 ½", "3 1/2", r"3\frac{1}{2}", r"3\frac12", r"3 \tfrac{1}{2}", "7/2"]),
    ("-3.5", ["-3½", "-3 1/2", r"-3\frac{1}{2}"]),
    ("250", ["1,000/4"]),
    # percent
    ("50%", ["50%", "50 %", r"50\%", r"50\,\%", r"$50\%$", r"{50}\%", "(50)%", "50 percent", "50 per cent",
             "50 pct", "\uff15\uff10\uff05"]),
    ("-0.5%", ["-0.5%", "−½%", r"-\frac{1}{2}\%"]),
    # units
    ("5", ["5 cm", "5cm", "5 cm^2", "5cm^2", "5 cm²", r"5 \text{ cm}^2", r"5\,\mathrm{m}", r"5~\text{kg}",
           "5 m/s", "5 km/h", "5°", r"5^\circ", r"5^{\circ}", "5 °C", "5th", "5 apples", "5个", "5 (five)",
           "5 m", "5 g", "5 L", "5 o'clock", "5 T-shirts", "5 a day", "5-year-old"]),
    ("5000000", ["5 million", "5,000,000", "0.005 billion"]),
    ("60", ["5 dozen"]),
    # scientific
    ("1200", ["1.2e3", "1.2E+03", "1.2E3", "1.2 × 10^3", r"1.2\times10^{3}", r"1.2 \cdot 10^3", "1.2 x 10^3",
              "1.2*10**3", "1.2·10³", r"$1.2 \times 10^{ 3 }$"]),
    ("0.005", ["5e-3", "5E−3", "5 × 10⁻³", r"5 \times 10^{-3}"]),
    ("1" + "0" * 100, ["1e100", r"1\times10^{100}"]),
    # digits of other scripts
    ("5", ["\uff15", "\u0665", "५", "5\ufe0f\u20e3"]),
    ("-5", ["\uff0d\uff15", "-\u0665"]),
    ("1000.5", ["\uff11\uff0c\uff10\uff10\uff10\uff0e\uff15", "\u0661\u066c\u0660\u0660\u0660\u066b\u0665"]),
    # around a number
    ("5", [r"\(5\)", r"\[5\]", "$$5$$", r"\boxed{5}", r"\text{5}", r"\mathbf{5}", "<answer>5</answer>", "[5]",
           "(5)", "“5”", "`5`", "_5_", "*5*", "**Answer:**5", "**Answer** 5", "it is...5", "Step one: 5",
           "5 - that is all"]),
]
NO_NUMBERS = [
    # sign
    "--5", "- -5", "±5", "+/-5", r"\pm 5", "10 - 5", "10-5", "10–5", "10 minus 5", "10 - $5", "$10$ - $5$",
    "(10)-5", "x - 5", "x-5", "x -5", "$x$-5", "GPT-5", "the sum − 5", "5 - x", "5-6", "5 ± 1", "5+6i",
    "5 + 6",
    # thousands and parts
    "1,0000", "1,00", "12,5", "0,005", "1, 000", "1_00", "1'00", "10 0000", "1.000.000", "1.000,50", "5.5.5",
    "12.05.2024", "2024-05-12", "12/05/2024", "12:30", "5:6", "5 : 6", "5~6", "v1.2", "0x10", "127.0.0.1",
    # factors and arguments
    "5x", "5x^2", "5k", "$5M", "5bn", "5万", "5i", "2e", "x_5", "x_{12}", "5_8", "5(3)", "f(5)", r"5\pi",
    "5π", r"\sqrt{5}", "√5", r"\sqrt[3]{8}", r"5\sqrt{2}", r"\log_{2} 5", r"\sin 5", r"\binom{5}{2}", "x/5",
    "5/x", "x*5", "2/3*5", r"2\times5", "3 times 5", "5 % 3", "5‰", "5 hundredths",
    "5 x", "5 x 3", "5 k", "1.5 M", "5 mod 3", r"5 \bmod 3", r"\lfloor 5.5 \rfloor", "|x - 5|",
    # powers
    "5²", "12²", "10⁶", "10⁻⁶", "10^6", "10^{6}", "10^{-6}", "10**6", "5^2", "5^n", "{5}^2", "(5)^2",
    "5 squared", "cm^2", "x²", r"2 \times 10^{n}", "3*2*10^3", r"2\times10^{3.5}",
    # fractions
    "1/2/3", "1/0", r"\frac{1}{0}", r"\frac{x}{5}", r"\frac{5}{x}", r"\frac{\sqrt{3}}{2}", r"-\frac{-3}{4}",
    r"\frac{1}{2}\frac{1}{3}", r"\frac{1}{2}3",
    # scientific and endless
    "1e400", "1e3.5", "1e", "1e99999", "0.3...", "0.333…", r"0.\overline{3}", "0.(3)", "0.3\u0305",
    r"3.14\ldots",
]
# fmt: on


@pytest.mark.parametrize(("form", "number"), [(form, number) for number, forms in NUMBERS for form in forms])
def test_a_number_is_read_whole_in_a_completion_and_in_a_reference(form, number):
    asked = Numeric(answer_after="####")
    assert score(Numeric(), f"so it is\n{form}" if form[0] not in "-−–" else form, number) == 1.0
    assert score(asked, f"2 + 3\n#### {form}", number) == 1.0
    assert score(asked, f"#### {number}", form) == 1.0
    for part in parts_of(form, number):
        assert score(asked, f"#### {form}", part) == 0.0, part


@pytest.mark.parametrize("form", NO_NUMBERS)
def test_a_number_that_goes_on_is_no_answer_and_no_reference(form):
    for part in parts_of(form, ""):
        assert score(Numeric(), form, part) == 0.0, part
        assert score(Numeric(answer_after="####"), f"#### {form}", part) == 0.0, part
    with pytest.raises(ValueError, match="the answer must be one number"):
        Numeric().check(Problem("?", "", form))


def parts_of(form, number):
    """Return the runs of digits in a form, with either sign, that are not its number."""
    parts = {sign + digits for digits in re.findall(r"[0-9]+", form) for sign in ("", "-")}
    return [part for part in parts if not score(Numeric(), part, number or "0.123")]


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("5\n#### 72 apples, 3 each", 1.0),
        ("#### 72\n- 3 each", 1.0),
        ("#### 72\n#### 5", 0.0),
        ("72", 0.0),
        ("#### none", 0.0),
        ("#### 72 -3", 0.0),
        ("#### 72 - 3", 0.0),
        (r"#### 72 \times 3", 0.0),
        ("#### –72", 0.0),
        ("#### 72–3", 0.0),
        ("#### – 72", 0.0),  # as - 72
        ("#### the answer – 72", 1.0),  # a dash
        ("####\n- 72", 0.0),
        ("#### a list:\n- 72", 1.0),
        ("#### 72^2", 0.0),
        ("#### 72,0000", 0.0),
    ],
)
def test_the_first_number_after_the_marker_counts(completion, expected):
    assert score(Numeric(answer_after="####"), completion, "72") == expected


def test_a_difference_up_to_the_tolerance_scores():
    function = Numeric(tolerance=0.25)
    assert [score(function, text, "2") for text in ("2.25", "1.75", "2.26", "1.74")] == [1.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize("answer", ["", "many", "3 or 4", "1,0000", "10^6"])
def test_an_answer_that_is_not_one_number_is_refused(answer):
    with pytest.raises(ValueError, match="the answer must be one number"):
        Numeric().check(Problem("?", "", answer))
    with pytest.raises(RuntimeError, match="the answer must be one number"):
        score(Numeric(), "3", answer)


def test_long_texts_of_digits_and_commas_are_read_fast():
    started_at = time.process_time()
    for part in ("1", "111,", "1,11", "-", "1/", "1 ", "1^"):
        score(Numeric(), part * (30_000 // len(part)), "1")
    assert time.process_time() - started_at < 5


def test_a_pattern_is_found_anywhere():
    with opened(Regex(pattern=r"(?s)\A<think>.*</think>\s*\S")) as ask:
        assert ask("<think>a\nb</think> 4") == 1.0
        assert ask("so <think>a</think> 4") == 0.0
        assert ask("<think>a</think>") == 0.0


def test_the_last_match_of_a_group_must_be_the_answer():
    with opened(Regex(pattern=r"answer: (?P<it>\w+ ?)", group="it")) as ask:
        assert ask("answer: 3, no, answer: 4 ", "4") == 1.0
        assert ask("answer: 4, no, answer: 3", "4") == 0.0
        assert ask("4", "4") == 0.0


def test_a_group_outside_the_match_scores_zero():
    with opened(Regex(pattern=r"a|(b)", group=1)) as ask:
        assert ask("a", "b") == 0.0


def test_blanks_around_the_answer_are_ignored():
    with opened(Regex(pattern=r"(\w+)", group=1)) as ask:
        assert ask("b", " b\n") == 1.0
        assert ask("b", "a") == 0.0


def test_an_endless_match_times_out():
    with opened(Regex(pattern=r"^(a|aa)+$")) as ask:
        with pytest.raises(RuntimeError, match="timed out"):
            ask("a" * 80 + "b")
        assert ask("aaa") == 1.0


# fmt: off
EQUAL = [  # an answer, and completions that state it
    ("0.5", [r"so it is $\boxed{\frac{1}{2}}$"]),
    # an answer without dollar signs is read whole
    (r"2\sqrt{3}", [r"\boxed{2\sqrt{3}}"]),
    ("5x^2+1", [r"\boxed{1+5x^2}"]),
    ("(3, 4)", [r"\boxed{(3, 4)}"]),
    ("[0, 5]", [r"\boxed{[0,5]}"]),
    (r"2 + \sqrt{5}", [r"\boxed{\sqrt5+2}"]),
    ("2^{10}", [r"\boxed{1024}"]),
    ("6 - 5i", [r"\boxed{6-5i}"]),
    (r"1 \pm \sqrt{2}", [r"\boxed{1\pm\sqrt2}"]),
    (r"10\%", [r"\boxed{10\%}"]),
    ("1,2", [r"\boxed{1,2}"]),
    ("3!", [r"\boxed{6}"]),
    ("1,000", [r"\boxed{1000}"]),
    ("1 000", [r"\boxed{1000}"]),
    ("1000", ["#### 1,000"]),
    (r"\frac{3}{4}", [r"\boxed{\frac34}"]),
    (r"\text{Evelyn}", [r"\boxed{Evelyn}"]),
    (r"$3\pi$", [r"\boxed{3\pi}"]),
    (r"so \(3\pi\)", [r"\boxed{3\pi}"]),
    # a text that is the answer
    ("(6,5)", ["(6,5)", "(6, 5)", "$(6,5)$", r"\left(6,5\right)", "<answer>(6, 5)</answer>", "#### (6,5)"]),
    ("[2,5)", ["[2,5)", "$[2,5)$", r"\boxed{[2,5)}"]),
    ("A", ["A", "A.", r"\boxed{A}", r"\text{A}", "<answer>A</answer>", "so\n#### A"]),
    ("yes", ["yes", "Yes.", r"\boxed{\text{yes}}", "<answer>yes</answer>"]),
    ("北京", ["北京", r"\boxed{北京}"]),
    (r"\sqrt{8}", [r"\sqrt{8}", r"2\sqrt{2}"]),
    # scientific notation
    ("1.2e3", ["1.2e3", "1200", "it is 1.2e3.", r"\boxed{1200}", r"\boxed{1.2\times10^3}", "$1.2E3$"]),
    ("0.0012", ["1.2e-3", r"\boxed{1.2e-3}"]),
    ("4.5e33", [r"\boxed{4.5\times10^{33}}", r"\boxed{4.5e33}", r"\boxed{45e32}"]),
    # percent
    ("0.5", [r"\boxed{50\%}", "it is 50%.", "it is 50 percent", r"it is $50\%$.", r"$\boxed{50\%}$",
             "####50%"]),
    ("50", [r"\boxed{50\%}", "it is 50%"]),
    (r"50\%", [r"\boxed{50\%}", r"\boxed{50}", r"\boxed{0.5}", r"\boxed{\frac{1}{2}}", "50 %", "it is 0.5"]),
    # marks
    ("5", ["<answer>5</answer>", r"<answer> \boxed{5} </answer>", "<answer>4</answer> no, <answer>5</answer>",
           "<answer>it costs $5.</answer>", "####5", "#### 5 apples", "The result:5", "Answer:**5**",
           "答案\uff1a5",
           "it is 5", "the final answer is $5$. I hope it is correct."]),
    ("-5", ["####-5", "Result:-5", r"\boxed{−5}", "it is −5"]),
    (r"3\pi", [r"#### 3\pi", r"<answer>3\pi</answer>", r"3\pi", "\\boxed{3\n\\pi}"]),
    # several boxes
    ("5", [r"first \boxed{3}, so the answer is \boxed{5}.", r"\boxed{3}. Now \boxed{5}"]),
    (r"\{3,5\}", [r"\boxed{3} and \boxed{5}", r"\boxed{\{5,3\}}", "5, 3"]),
    # raised digits
    ("25", [r"\boxed{5²}"]),
    ("2.5", [r"\boxed{2½}"]),
]
DIFFERENT = [
    ("0.5", [r"so it is $\boxed{\frac{1}{3}}$"]),
    (r"2\sqrt{3}", [r"\boxed{2}"]),
    (r"3\pi", [r"\boxed{3}"]),
    ("5x^2+1", [r"\boxed{5}"]),
    ("(3, 4)", [r"\boxed{4}"]),
    ("[0, 5]", [r"\boxed{5}"]),
    (r"2 + \sqrt{5}", [r"\boxed{2}"]),
    ("2^{10}", [r"\boxed{2}"]),
    ("6 - 5i", [r"\boxed{5}"]),
    (r"1 \pm \sqrt{2}", [r"\boxed{1}"]),
    (r"10\%", [r"\boxed{1}"]),
    ("1,2", [r"\boxed{1.2}"]),
    ("3!", [r"\boxed{3}"]),
    ("12", [r"\boxed{1}"]),
    ("1,000", [r"\boxed{1}"]),
    ("1 000", [r"\boxed{0}"]),
    ("1000", ["nothing"]),
    (r"\frac{3}{4}", [r"\boxed{3}"]),
    (r"\text{Evelyn}", [r"\boxed{Eve}"]),
    (r"$3\pi$", [r"\boxed{3}"]),
    (r"so \(3\pi\)", [r"\boxed{3}"]),
    ("(6,5)", ["(5,6)", r"\boxed{(5,6)}"]),
    ("[2,5)", ["[2,5]"]),
    ("A", ["B", "a b"]),
    ("yes", ["no", "sye", r"\boxed{sye}", "yes or no"]),
    ("北京", ["Beijing"]),
    ("4.5e33", [r"\boxed{148.5e}", "4.5", r"\boxed{4.5e3}"]),
    ("1.2e3", ["1.2", "it is 1.2e4"]),
    ("1.2", ["1.2e3"]),
    ("0.5%", [r"\boxed{50\%}", "it is 50%"]),
    ("0.5", ["50"]),
    ("50", ["0.5"]),
    ("5", [r"\boxed{50\%}", "<answer>4</answer>", "####6", "The result:6", "The ratio is 3:5", "", "####",
           "-5", r"\boxed{−5}", r"\boxed{5²}"]),
    ("3", [r"\boxed{3}. Now \boxed{5}", r"#### 3\pi"]),
    ("6", ["<answer>5</answer> 6"]),
    (r"\{3,5,7\}", [r"\boxed{3} and \boxed{5}"]),
]
# fmt: on


def test_expressions_texts_marks_percentages_and_scientific_notation_are_read():
    pytest.importorskip("math_verify")
    cases = [(*case, 1.0) for case in EQUAL] + [(*case, 0.0) for case in DIFFERENT]
    with opened(MathVerify(timeout_s=60)) as ask:
        wrong = [
            (answer, said)
            for answer, forms, expected in cases
            for said in forms
            if ask(said, answer) != expected
        ]
    assert wrong == []


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setattr("lit_rlkv.rewards.functions.answers.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r'pip install -e "\.\[math\]"'):
        MathVerify()


@pytest.mark.parametrize(
    ("function", "options"),
    [(ExactMatch, {}), (MathVerify, {}), (Regex, {"pattern": "(a*)", "group": 1})],
)
def test_a_function_that_compares_needs_an_answer(function, options):
    if function is MathVerify:
        pytest.importorskip("math_verify")
    function(**options).check(Problem("?", "", "x"))
    with pytest.raises(ValueError, match=r"the answer to compare with must not be empty; set task\.answer"):
        function(**options).check(Problem("?", "", " "))
    Regex(pattern="(a*)").check(Problem("?", "", ""))


@pytest.mark.parametrize(
    ("function", "options", "says"),
    [
        (ExactMatch, {"weight": float("nan")}, "weight must be a number"),
        (ExactMatch, {"weight": float("inf")}, "weight must be a number"),
        (Numeric, {"tolerance": -1}, "tolerance must be a number of at least 0, got -1"),
        (Regex, {"pattern": "("}, r"pattern must be a regular expression, got '\('"),
        (Regex, {"pattern": "(a)", "group": 2}, r"group must be one of \[0, 1\] of pattern='\(a\)'.* got 2"),
        (MathVerify, {"timeout_s": 0}, "timeout_s must be a number above 0"),
        (MathVerify, {"n_workers": 0}, "n_workers must be a whole number of at least 1"),
        (MathVerify, {"retries": -1}, "retries must be a whole number of at least 0"),
    ],
)
def test_options_that_cannot_work_are_refused(function, options, says):
    with pytest.raises(ValueError, match=says):
        function(**options)
