from lit_rlkv.reporting import plots


def test_an_iteration_without_the_metric_is_left_out():
    history = [{"iteration": 1, "reward": 0.1}, {"iteration": 2}, {"iteration": 3, "reward": float("nan")}]
    iteration, value = plots.series([*history, {"iteration": 4, "reward": 0.4}], "reward")
    assert list(iteration) == [1, 4]
    assert list(value) == [0.1, 0.4]
