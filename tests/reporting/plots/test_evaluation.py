from lit_rlkv.reporting import plots
from tests.reporting.plots.drawn import eval_row, labels, line


def test_accuracy_is_drawn_in_the_order_of_budgets_and_dense_as_a_level():
    before = [eval_row("dense", None, 0.99), eval_row("random 16", 16, 0.46), eval_row("random 12", 12, 0.2)]
    after = [eval_row("dense", None, 0.98), eval_row("random 16", 16, 0.81)]
    figure = plots.accuracy_against_budget(before, after)
    assert list(line(figure, "before").get_xdata()) == [12, 16]
    assert list(line(figure, "before").get_ydata()) == [0.2, 0.46]
    assert list(line(figure, "after").get_ydata()) == [0.81]
    assert line(figure, "dense, before").get_ydata()[0] == 0.99
    assert line(figure, "dense, after").get_ydata()[0] == 0.98


def test_a_single_evaluation_has_no_before_and_after():
    figure = plots.accuracy_against_budget([], [eval_row("dense", None, 0.9), eval_row("h2o 8", 8, 0.5)])
    assert labels(figure) == ["under the budget", "dense"]
