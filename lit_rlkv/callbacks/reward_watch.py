"""Warn if the rewards of the first iterations are all equal, because then nothing is learned from them."""

import logging

from lit_rlkv.callbacks.hooks import RLCallback
from lit_rlkv.experience.batch import Experience

log = logging.getLogger(__name__)
N_ITERATIONS = 3
"""First iterations that are watched."""


class RewardWatch(RLCallback):
    """Warns once, after the first `N_ITERATIONS` iterations, if all their responses had the same reward.

    Args:
        reads_all_forms: True if a reward is `MathVerify`, so that no other one reads more forms of an answer.
    """

    def __init__(self, *, reads_all_forms: bool = False) -> None:
        self._reads_all_forms = reads_all_forms
        self.n_equal = 0
        """Iterations with equal rewards; -1 once any reward has differed."""

    def on_rollout_end(self, experience: Experience) -> None:
        if self.n_equal in (-1, N_ITERATIONS):
            return
        whole = experience.all_gather()
        rewards = whole.rewards.total
        if rewards.min() < rewards.max():
            self.n_equal = -1
            return
        self.n_equal += 1
        if self.n_equal == N_ITERATIONS and experience.ranks.rank == 0:
            n_cut = 1 - float(whole.has_eos.float().mean())
            # Normalised rewards that are equal are 0, whatever they were before.
            log.warning(advice(float(whole.rewards.scores[0]), n_cut, self._reads_all_forms))


def advice(reward: float, share_cut: float, reads_all_forms: bool) -> str:
    """Return the warning for a reward that every response had, and the share of responses without an end."""
    equal = (
        f"all responses of the first {N_ITERATIONS} iterations have the reward {reward:g}, so the policy "
        "learns nothing from it"
    )
    if reward > 0:
        return f"{equal}; if that is the highest one, choose a harder task or another reward"
    cut = f"; {share_cut:.0%} of them were cut at rollout.max_new_tokens" if share_cut else ""
    other_forms = "" if reads_all_forms else " a reward that reads other forms (reward=math);"
    return (
        f"{equal}{cut}. Read samples.jsonl in the run's folder, and try: a prompt that names the form of the "
        f"answer that the reward reads (task.system_prompt);{other_forms} SFT on worked solutions first "
        "(stages=[sft,rl,eval]); an easier task; a larger algorithm.group_size"
    )
