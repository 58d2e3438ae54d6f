from lit_rlkv.runs.parts import build_reward_functions
from tests.config.asking import asked


def test_a_reward_function_may_be_added_and_another_left_out():
    short = "{_target_: lit_rlkv.rewards.Regex, pattern: '^.{0,200}$', weight: 0.1}"
    cfg = asked("task=word_problems", "reward=numeric", f"+reward.functions.short={short}")
    assert [*cfg.reward.functions] == ["correct", "format", "short"]
    assert build_reward_functions(cfg.reward)["short"].pattern == "^.{0,200}$"
    cfg = asked("task=word_problems", "reward=numeric", "~reward.functions.format", "reward.verifier=0.5")
    assert [*build_reward_functions(cfg.reward)] == ["correct"]
