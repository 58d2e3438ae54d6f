from testbed import table

START = {"sparse_before": 0.2, "dense_before": 0.6, "dense_after": 0.6}


def test_the_table_says_what_each_arm_won_back():
    # From 20 to 40 and to 60 of the 40 points that the budget had cost: half and all of them
    rows = [START | {"arm": "smd", "sparse_after": after} for after in (0.4, 0.6)]
    headings, smd, naive = table([*rows, START | {"arm": "naive", "sparse_after": 0.2}]).splitlines()
    assert headings.split()[:2] == ["arm", "n"]
    assert " ".join(smd.split()) == "smd 2 20.0 ± 0.0 50.0 ± 14.1 60.0 ± 0.0 60.0 ± 0.0 75.0 ± 35.4"
    assert naive.split() == ["naive", "1", "20.0", "20.0", "60.0", "60.0", "0.0"]
