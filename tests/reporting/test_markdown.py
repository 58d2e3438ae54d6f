from lit_rlkv.reporting.markdown import markdown_table


def test_cells_cannot_end_their_table():
    text = markdown_table(["a", "b"], [["x|y", "a\nb"], [0.123456, None]])
    assert text.splitlines() == ["| a | b |", "| --- | --- |", "| x&#124;y | a<br>b |", "| 0.1235 | – |"]
