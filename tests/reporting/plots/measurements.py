"""Lines of diagnostics.jsonl for the tests of pictures."""

POSITIONS = {
    "iteration": 7,
    "name": "mismatch",
    "position": [0, 1, 2, 3],
    "n_response_tokens": [100, 100, 40, 2],
    "k1": [0.0, -0.1, 0.3, 1.0],
    "k3": [0.0, 0.01, 0.2, 1.5],
    "abs_log_ratio_p95": [0.0, 0.2, 1.0, 3.0],
    "abs_log_ratio_p99": [2e-7, 0.5, 8.0, 30.0],
    "prefix_abs_log_ratio": [0.0, 0.1, 0.5, 0.9],
    "prefix_abs_log_ratio_p95": [0.0, 0.3, 2.0, 4.0],
    "prefix_ess": [1.0, 0.9, 0.05, 0.002],
    "overlap_mean": [1.0, 0.9, 0.8, None],
    "overlap_p05": [1.0, 0.4, 0.05, None],
}


def layers(iteration, *kls):
    return {"iteration": iteration, "name": "layers", "layer_kl": list(kls), "all_layers_kl": 0.5}


def arm_history(*sizes):
    """A history in which tis was measured at every other iteration."""
    return [
        {"iteration": index + 1} | ({} if size is None else {"kv/arms/tis/ess": size})
        for index, size in enumerate(sizes)
    ]
