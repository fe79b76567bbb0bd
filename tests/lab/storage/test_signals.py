"""Signals that come where they must wait."""

import signal
import threading

import pytest

from mixnorm_lab.storage.signals import stopped_by_sigterm, uninterrupted

pytestmark = pytest.mark.skipif(
    threading.current_thread() is not threading.main_thread(), reason="signals reach the main thread alone"
)


@pytest.fixture(autouse=True)
def ctrl_c():
    """As in a terminal, also where the tests run in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_a_signal_waits_until_it_is_done(number, error):
    done = []

    def write():
        with uninterrupted():
            signal.raise_signal(number)
            done.append("written")
        done.append("more")

    with stopped_by_sigterm(), pytest.raises(error):
        write()
    assert done == ["written"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_second_signal_does_not_wait():
    done = []

    def write():
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
            done.append("first")
            signal.raise_signal(signal.SIGINT)
            done.append("second")

    with pytest.raises(KeyboardInterrupt):
        write()
    assert done == ["first"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_error_inside_leaves_the_handlers_as_they_were():
    def write():
        with uninterrupted():
            raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"):
        write()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_signal_is_not_lost_where_something_else_goes_wrong():
    def write():
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
            raise OSError("the disk is full")

    with pytest.raises(KeyboardInterrupt) as caught:
        write()
    assert isinstance(caught.value.__context__, OSError)


def test_signals_that_nobody_handles_are_left_alone():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with uninterrupted():
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_another_thread_sets_no_handler():
    found = []

    def work():
        with uninterrupted():
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [signal.default_int_handler]
