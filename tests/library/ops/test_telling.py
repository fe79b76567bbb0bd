"""Who waits for the compiler is told: once that it begins, and what each loop took."""

import logging
import re

from numba import njit
from numba.core import event

from mixnorm.ops.numba.telling import _Teller


@njit
def _double(x):
    return 2 * x


@njit
def four_times(x):
    return _double(_double(x))


@njit
def next_number(x):
    return x + 1


def test_each_loop_that_is_compiled_is_told_with_those_that_it_calls(caplog):
    with event.install_listener("numba:compile", _Teller(__name__)):
        assert four_times(1) == 4
        assert four_times(2) == 8  # compiled already
        assert next_number(1) == 2
    begin, first, second = (record.getMessage() for record in caplog.records)
    assert "compiles its loops for this CPU" in begin
    assert re.fullmatch(r"mixnorm compiled four_times in \d+ s", first)
    assert re.fullmatch(r"mixnorm compiled next_number in \d+ s", second)
    assert {record.levelno for record in caplog.records} == {logging.WARNING}  # seen without any set-up


def test_the_functions_of_others_are_not_told(caplog):
    with event.install_listener("numba:compile", _Teller("somebody.else")):
        four_times(1.5)
    assert not caplog.records
