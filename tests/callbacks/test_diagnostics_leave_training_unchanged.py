import pytest

from lit_rlkv.callbacks.cache_statistics import CacheStatistics
from lit_rlkv.callbacks.gradient_sources import GradientSources
from lit_rlkv.callbacks.gradient_variance import GradientVariance
from lit_rlkv.callbacks.mismatch import DenseMismatch, LayerMismatch
from lit_rlkv.callbacks.performance import Performance
from tests.callbacks.measuring import ALGORITHMS, assert_same_training, trained


def all_diagnostics():
    return [
        DenseMismatch(),
        LayerMismatch(),
        GradientVariance(every=1, n_parts=3, sketch=64),
        GradientSources(every=1, n_parts=3, counterfactual="mis"),
        CacheStatistics(),
        Performance(),
    ]


@pytest.mark.parametrize(
    ("algorithm", "arm", "precision", "distills"),
    [
        ("grpo", "shadow", "32-true", True),
        ("ppo", "tis", "bf16-mixed", False),
        ("online_dpo", "shadow", "bf16-mixed", True),
    ],
)
def test_training_with_all_diagnostics_is_the_same_to_the_last_bit(algorithm, arm, precision, distills):
    options = {"arm": arm, "precision": precision, "distills": distills, "n_minibatches": 2}
    options |= ALGORITHMS[algorithm]
    measured = trained(all_diagnostics(), **options)
    assert_same_training(trained([], **options), measured)
    first, row = measured[0]
    assert first["loss"] != row["loss"]
    assert row["kv/overlap_mean"] < 1
    assert row["kv/layer_kl/all"] > 0
    assert row["kv/attention_kept"] < 1
    assert row["gradient/loss/variance"] > 0
    assert row["gradient/sources/total"] > 0
    assert row["perf/tflops/update"] > 0
