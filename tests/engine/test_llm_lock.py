"""The lock behind LLM goes round."""

import threading
import time

import pytest

from jaxserve.fair_lock import FairLock


def test_a_thread_that_takes_it_again_and_again_lets_others_in():
    lock, stop, turns = FairLock(), threading.Event(), 0

    def hold() -> None:
        while not stop.is_set():
            with lock:
                time.sleep(0.001)

    holder = threading.Thread(target=hold)
    holder.start()
    start = time.monotonic()
    for _ in range(20):
        with lock:
            turns += 1
    stop.set()
    holder.join()
    assert turns == 20
    assert time.monotonic() - start < 5


def test_one_holder_at_a_time_in_the_order_of_asking():
    lock, inside, order = FairLock(), 0, []
    threads = []

    def work(number: int) -> None:
        nonlocal inside
        with lock:
            inside += 1
            assert inside == 1
            order.append(number)
            inside -= 1

    with lock:
        for number in range(8):
            threads.append(threading.Thread(target=work, args=(number,)))
            threads[-1].start()
            while len(lock._gates) <= number:
                time.sleep(0.0001)
    for thread in threads:
        thread.join()
    assert order == list(range(8))


def test_an_exception_gives_it_back():
    lock = FairLock()
    with pytest.raises(ValueError, match="x"), lock:
        raise ValueError("x")
    with lock:
        pass
