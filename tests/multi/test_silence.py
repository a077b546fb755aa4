"""Steps in which nobody says anything: whom they are shown to, and what may leave in them."""

from __future__ import annotations

from typing import Any

import pytest

from kvconn.base import Fact, FinishReason, KVConnectorOutput, WorkerFacts
from tests.multi.fakes import FakeChild, fake
from tests.multi.test_connector import _at_ten, find_fakes, kids, make, request
from tests.support import Side, multi


class Deaf(FakeChild):
    """What says nothing changes nothing here."""

    hears_silence = False


def test_an_output_in_which_nobody_says_anything_is_shown_to_whom_it_means_something(mocker: Any) -> None:
    connector = make(fake(), {**fake("Deaf"), "kv_connector_module_path": __name__})
    fond, deaf = (mocker.spy(child, "update_connector_output") for child in kids(connector))
    connector.update_connector_output(KVConnectorOutput())
    assert (connector.hears_silence, fond.call_count, deaf.call_count) == (True, 1, 0)
    connector.request_finished(request(), ((1,),), FinishReason.STOP)
    own = WorkerFacts((Fact("a", "send", 1, 0, "done", (-1, 1)),))
    connector.update_connector_output(KVConnectorOutput({"a"}, kv_connector_worker_meta=own))
    assert (fond.call_count, deaf.call_count) == (2, 1)
    alone = make({**fake("Deaf"), "kv_connector_module_path": __name__})
    assert not alone.hears_silence


@pytest.mark.parametrize("nested", [False, True])
def test_what_a_child_held_back_leaves_in_a_step_in_which_nobody_says_anything(nested: bool) -> None:
    first = multi(fake(), fake(claims=False), role="kv_both") if nested else fake()
    side = Side("p", multi(first, fake(), role="kv_both"), make=_at_ten)
    holder = find_fakes(side.scheduler)[0]
    holder.vetoes = True
    side.prefill("a", [1], 1)
    for child in find_fakes(side.workers[0]):
        if child.told.get("claims", True):
            child.say(sent="a")
    side.step()
    side.step()
    assert side.sent == []
    holder.vetoes = False
    side.step()
    side.step()
    assert side.sent == ["a"]
    side.close()
