"""The bytes of a record of evictions by token, against arithmetic by hand."""

import pytest
import record_memory
from record_memory import measure


def test_the_record_waits_on_the_host_and_is_copied_a_few_rows_at_a_time(monkeypatch: pytest.MonkeyPatch):
    found = measure(32, 48)
    # 8 layers of 4 KV heads: 2 bytes each where the record waits, 4 where it is replayed
    kept = 8 * 4 * 2
    expected = {"decoding": kept, "device_bytes": 0, "host_bytes": kept, "pass": 2 * kept}
    assert {name: found[name] for name in expected} == expected
    assert 0 < found["reading"] < 1.1 * kept
    monkeypatch.setattr(record_memory, "ROWS_AT_ONCE", 32)
    assert measure(32, 48)["reading"] > 2 * kept
