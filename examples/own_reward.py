"""A reward function of your own, for the project's trainer. From the top of the clone:

python -m lit_rlkv.fit debug=fast reward=python reward.functions.custom.path=examples/own_reward.py:score

The function gets what it names of `completion`, `prompt`, `answer`, `solution` and the extra columns of your
data, and returns a number. It runs in processes of its own; where it raises or hangs, the response gets no
reward, and the run goes on. The columns `rewards/custom/mean` and `rewards/custom/std` of metrics.csv
show it.
"""


def score(completion, answer):
    """1 for a completion that ends in the answer, as 7,10,15; 0.1 if it has it; shorter is a bit better."""
    last = completion.rpartition(",")[2].strip()
    return float(last == answer) + 0.1 * (answer in completion) - 0.001 * len(completion)
