from lit_rlkv.reporting import plots


def test_stages_are_bars_of_their_seconds():
    axes = plots.time_per_stage({"sft": 95.0, "rl": 12.5}).axes[0]
    assert [bar.get_width() for bar in axes.patches] == [95.0, 12.5]
    assert [text.get_text() for text in axes.get_yticklabels()] == ["sft", "rl"]
