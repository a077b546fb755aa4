"""When is a long run not as good at its end as at its beginning, and the picture of it."""

from __future__ import annotations

from xml.etree import ElementTree

import msgspec
import pytest

from kvconn.chaos.flat import drift, ends, rates
from kvconn.chaos.picture import svg
from kvconn.chaos.samples import Sample, Sampler

N = 100


def samples(**ramps: tuple[float, float]) -> list[Sample]:
    """A run of ``N`` samples, a second apart; a ramp goes from its first value to its second."""
    out, done = [], 0.0
    for n in range(N):
        at = {"rate": 50.0, "rss": 2**30, "fds": 300, "handles": 12} | {
            name: low + (high - low) * n / (N - 1) for name, (low, high) in ramps.items()
        }
        done += at.pop("rate")
        out.append(Sample(at=float(n), done=int(done), kv=5, **{name: int(value) for name, value in at.items()}))
    return out


def test_a_run_that_stays_as_it_was_is_flat() -> None:
    both = ends(samples())
    assert both is not None and both.rate == (50.0, 50.0) and both.rss == (2**30, 2**30)
    assert drift(samples()) == [] == drift(samples(rate=(50, 45), rss=(2**30, 2**30 * 1.05), fds=(300, 305)))


@pytest.mark.parametrize(
    ("ramp", "said"),
    [
        ({"rate": (60, 30)}, "throughput fell from 58.0 to 31.5 requests/s"),
        ({"rss": (2**30, 2**31)}, "memory grew from "),
        ({"fds": (300, 400)}, "open files grew from 314 to 394"),
        ({"handles": (0, 100)}, "posted reads grew from "),
    ],
)
def test_what_is_not_flat_is_named_with_both_values(ramp: dict[str, tuple[float, float]], said: str) -> None:
    (line,) = drift(samples(**ramp))
    assert line.startswith(said)


def test_one_stutter_is_no_drift_and_few_samples_say_nothing() -> None:
    flat = samples()
    flat[95] = msgspec.structs.replace(flat[95], done=flat[94].done)
    assert drift(flat) == []
    assert ends(flat[:19]) is None and drift(flat[:19]) == []
    assert rates(flat[:1]) == []


def test_the_picture_is_svg_with_a_panel_and_a_largest_value_per_curve() -> None:
    text = svg("a <b>", [("rate", [(0.0, 1.0), (2.0, 4.0)]), ("none", [])])
    root = ElementTree.fromstring(text)
    names = [one.text for one in root if one.tag.endswith("text")]
    assert {"a <b>", "rate", "4", "none", "2"} <= set(names)
    lines = [one.get("points") for one in root if one.tag.endswith("polyline")]
    assert lines == ["150.0,114.5 870.0,32.0", ""]


def test_a_sampler_looks_at_its_times_and_counts_handles_in_what_halves_say_of_themselves() -> None:
    sampler = Sampler(lambda: (), lambda: 7, lambda: ["Reads(open=1 handles=3)", "Reads(open=2 handles=4)"], 10.0, 2.0)
    for now in (10.0, 11.9, 12.0, 13.0):
        sampler.look(5, now)
    assert [(s.at, s.handles, s.kv, s.done) for s in sampler.samples] == [(0.0, 7, 7, 5), (2.0, 7, 7, 5)]
