import pytest

from lit_rlkv.units import human_bytes, human_seconds


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (10239, "10.0 KiB"),
        (655360, "640 KiB"),
        (1024**2 - 1, "1.00 MiB"),
        (5 * 1024**3, "5.00 GiB"),
        (3000 * 1024**4, "3000 TiB"),
    ],
)
def test_bytes_have_three_digits_and_a_unit(n_bytes, text):
    assert human_bytes(n_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (59.94, "59.9 s"), (59.96, "1:00"), (95, "1:35"), (7384, "2:03:04")],
)
def test_seconds_read_as_a_clock(seconds, text):
    assert human_seconds(seconds) == text
