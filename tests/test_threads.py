"""Jobs in threads: where they are made, what comes of errors, and that they keep no process alive."""

import subprocess
import sys
import threading
import time

import pytest

from fastgen_jax import threads
from fastgen_jax.threads import in_threads


def test_jobs_are_made_by_the_caller_run_beside_one_another_and_come_as_they_end():
    made_by, later = set(), threading.Event()

    def jobs():
        for i in range(6):
            made_by.add(threading.get_ident())
            # The first ends last.
            yield i, (lambda i=i: later.wait(60) and i * 10) if i == 0 else (lambda i=i: i * 10)

    found = []
    for key, result in in_threads(jobs(), 2):
        found.append((key, result))
        if len(found) == 5:
            later.set()
    assert sorted(found) == [(i, i * 10) for i in range(6)]
    assert found[-1] == (0, 0)
    assert made_by == {threading.get_ident()}


def test_an_error_comes_out_and_ends_the_rest():
    ran = []

    def job(i):
        ran.append(i)
        if i == 1:
            raise OSError("no")
        time.sleep(0.02)

    before = set(threading.enumerate())
    with pytest.raises(OSError, match="no"):
        list(in_threads(((i, lambda i=i: job(i)) for i in range(50)), 1))
    assert len(ran) < 50
    deadline = time.monotonic() + 30
    while (left := set(threading.enumerate()) - before) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not left


def test_a_job_that_a_thread_takes_while_the_rest_is_dropped_is_not_waited_for(monkeypatch):
    """Between seeing that the queue has a job and taking it, a thread may have taken it."""

    class Raced(threads.SimpleQueue):
        def empty(self):
            return False

    monkeypatch.setattr(threads, "SimpleQueue", Raced)
    found = []
    caller = threading.Thread(target=lambda: found.append(next(in_threads([(1, lambda: 2)], 1))), daemon=True)
    caller.start()  # the generator is left, and so closed, after its first result
    caller.join(timeout=60)
    assert found == [(1, 2)]
    assert not caller.is_alive()


ENDS = """
import threading, time
from fastgen_jax.threads import in_threads

begun = threading.Event()
jobs = ((i, lambda: begun.set() or time.sleep(600)) for i in range(9))
threading.Thread(target=lambda: list(in_threads(jobs, 2)), daemon=True).start()
begun.wait()
print("ends")
"""


def test_jobs_that_run_keep_no_process_from_ending():
    """As a replica that is told to end while its engine compiles."""
    run = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, timeout=120)
    assert (run.stdout, run.returncode) == ("ends\n", 0)
