import pytest

from megatron_ext.utils.registration import add_entry


def test_add_entry() -> None:
    registry: dict[str, type] = {}
    add_entry(registry, "a", int, "loggers")
    add_entry(registry, "b", str, "loggers")
    assert registry == {"a": int, "b": str}


def test_duplicate_name_is_an_error_and_keeps_the_first_entry() -> None:
    registry: dict[str, type] = {"a": int}
    with pytest.raises(ValueError, match=r"^two loggers are called 'a': <class 'int'> and <class 'str'>$"):
        add_entry(registry, "a", str, "loggers")
    assert registry == {"a": int}
