"""Jobs of a whole engine, seen from the thread that answers ``kvconn explain``."""

from __future__ import annotations

import sys
import threading

from kvconn.base import Fact
from kvconn.offload.book import JobBook


def test_a_look_from_another_thread_finds_no_table_that_changes_under_it() -> None:
    """As ``kvconn explain`` looks while the engine opens, answers and closes jobs."""
    book, stop, seen = JobBook(range(4)), threading.Event(), 0
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)

    def churn() -> None:
        serial = 0
        while not stop.is_set():
            jobs = [book.open("store", (b"%d" % (serial + k),), 0.0, (None,)) for k in range(50)]
            serial += 50
            for rank in range(4):
                book.report([Fact(job.name, "send", job.n, rank, "done") for job in jobs])

    churning = threading.Thread(target=churn)
    churning.start()
    try:
        while seen < 20_000:
            seen += len(book.overdue(100.0, 30.0))
    finally:
        stop.set()
        churning.join()
        sys.setswitchinterval(interval)
    assert len(book) == 0
