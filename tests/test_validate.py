"""Real spans are what the vocabulary promises; and each kind of error, planted in them, is found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.inprocess import recording
from support.loops import FORMS, LONG, Points, network, seed, sgd, train, update
from support.validate import from_sdk, validate
from torch.utils.data import DataLoader

from otel_dl.viewing.reading import Span


@pytest.mark.parametrize("name", [name for name in FORMS if name not in LONG])
def test_every_form_is_valid(name: str) -> None:
    with recording() as recorded:
        diary, _ = train(FORMS[name])
    spans = [from_sdk(span) for span in recorded.spans]
    assert len(spans) > len(diary.steps)
    assert validate(spans, loader_in_a_thread=name == "loader_in_a_thread") == []


@pytest.fixture(scope="module")
def spans() -> list[Span]:
    """Of a run with evaluation, a step that failed, a worker's batches and spans of the user's own names."""
    with recording() as recorded:
        train(FORMS["evaluation_between_epochs"])
        train(FORMS["forward_that_raises_and_is_caught"])
        train(FORMS["spans_of_ones_own"])
        seed()
        model = network()
        optimizer = sgd(model)
        for x, y in DataLoader(Points(8), batch_size=2, num_workers=1, multiprocessing_context="fork"):
            update(model, optimizer, x, y)
    return [from_sdk(span) for span in recorded.spans]


def test_they_are_valid_as_they_are(spans: list[Span]) -> None:
    assert validate(spans) == []
    assert {"train.startup", "train.step", "train.eval", "dataloader.fetch", "augment"} <= {s.name for s in spans}
    assert any(span.name == "dataloader.fetch" and not span.parent_id for span in spans)


def attribute(name: str, value: Any = None) -> Callable[[Span], Span]:
    def change(span: Span) -> Span:
        attributes = {key: old for key, old in span.attributes.items() if key != name}
        return span._replace(attributes=attributes if value is None else {**attributes, name: value})

    return change


def resource(name: str, value: Any) -> Callable[[Span], Span]:
    return lambda span: span._replace(resource={**span.resource, name: value})


def shifted(span: Span) -> Span:
    return span._replace(start_ns=span.start_ns - 10**12)


ERRORS: list[tuple[str, Callable[[Span], Span], str]] = [
    ("forward", lambda span: span._replace(name="forwards"), "the name is not in the vocabulary"),
    ("train.step", attribute("dl.colour", "red"), "dl.colour is not in the vocabulary"),
    ("forward", attribute("dl.step", 3), "dl.step does not belong here"),
    ("forward", attribute("dl.rank", 0), "dl.rank does not belong here"),
    ("train.step", attribute("dl.step", "3"), "dl.step is '3', not of type int"),
    ("train.step", attribute("dl.rank", False), "dl.rank is False, not of type int"),
    ("train.step", attribute("dl.epoch", 1.0), "dl.epoch is 1.0, not of type int"),
    ("train.step", attribute("is_warmup"), "is_warmup is missing"),
    ("forward", attribute("is_warmup"), "is_warmup is missing"),
    ("train.eval", attribute("dl.run.id"), "dl.run.id is missing"),
    ("train.step", attribute("dl.keep.reason", "mood"), "dl.keep.reason is 'mood'"),
    (
        "train.step",
        lambda s: attribute("dl.keep", not s.attributes["dl.keep"])(s),
        "dl.keep and dl.keep.reason disagree",
    ),
    ("train.step", attribute("dl.trace.kind", "run"), "dl.trace.kind is 'run'"),
    ("train.step", lambda span: span._replace(failed=not span.failed), "error.type and the status disagree"),
    ("train.step", attribute("dl.world_size", 9), "dl.world_size is not that of the resource"),
    ("forward", lambda span: span._replace(end_ns=span.start_ns - 1), "it ends before it begins"),
    ("forward", resource("process.pid", "7"), "process.pid of the resource is '7'"),
    ("augment", resource("service.name", None), "service.name of the resource is None"),
    ("backward", resource("dl.worker.id", 0), "the resource names a worker"),
    ("forward", resource("service.instance.id", "x"), "service.instance.id of the resource is 'x'"),
    ("worker", resource("process.pid", 1), "process.pid of the resource is not the worker's"),
    ("worker", resource("dl.worker.id", 5), "dl.worker.id of the resource is 5"),
    ("train.step", lambda span: span._replace(trace_id="0" * 32), "its trace id is not"),
    ("train.step", lambda span: span._replace(span_id="0" * 16), "its span id is not"),
    ("train.step", lambda span: span._replace(parent_id="1" * 16), "it has a parent"),
    ("train.step", lambda s: attribute("dl.step", s.attributes["dl.step"] + 1)(s), "its trace id is not"),
    ("train.eval", lambda span: span._replace(trace_id="0" * 32), "its trace id is not"),
    ("train.startup", lambda span: span._replace(span_id="0" * 16), "its span id is not"),
    ("forward", lambda span: span._replace(span_id="0" * 16), "its span id is not derived"),
    ("augment", lambda span: span._replace(span_id="0" * 16), "its span id is not derived"),
    ("forward", lambda span: span._replace(parent_id="0" * 16), "its parent is not there"),
    ("forward", shifted, "it is not within its parent"),
    ("dataloader.next", shifted, "it is not within its parent"),
    ("train.step", lambda span: span._replace(links=span.links[1:]), "it has no link to its run"),
    ("train.step", lambda span: span._replace(links=span.links[:1]), "it has no link to the former kept step"),
    ("train.step", lambda span: span._replace(start_ns=0), "its number is not higher than that of the step before"),
    ("next of a worker's", lambda span: span._replace(links=()), "it has no link to its fetch"),
    ("worker", lambda span: span._replace(links=()), "does not link back"),
    ("worker", lambda span: span._replace(links=(("0" * 32, "0" * 16),)), "what it links to is not there"),
    ("worker", attribute("dl.batch.index", 77), "dl.batch.index is not that of"),
    ("next of a worker's", attribute("dl.fetch.duration_ms", 1e6), "dl.fetch.duration_ms is not how long"),
]


def find(spans: list[Span], which: str) -> Span:
    """The last one, so that there are former ones."""

    def fits(span: Span) -> bool:
        if which == "worker":
            return span.name == "dataloader.fetch" and not span.parent_id
        if which == "next of a worker's":
            return span.name == "dataloader.next" and "dl.fetch.duration_ms" in span.attributes
        return span.name == which

    return [span for span in spans if fits(span)][-1]


@pytest.mark.parametrize(("which", "change", "problem"), ERRORS, ids=[f"{e[0]}: {e[2]}" for e in ERRORS])
def test_a_planted_error_is_found(which: str, change: Callable[[Span], Span], problem: str, spans: list[Span]) -> None:
    wrong = find(spans, which)
    problems = validate([change(span) if span is wrong else span for span in spans])
    assert any(problem in found for found in problems), problems


def test_a_span_that_came_twice_is_found(spans: list[Span]) -> None:
    assert any("another one with its ids" in found for found in validate([*spans, find(spans, "forward")]))


def test_what_is_missing_matters_only_where_all_should_be_there(spans: list[Span]) -> None:
    some = [span for span in spans if span.attributes.get("dl.step") != 3 and span.name != "dataloader.fetch"]
    some = [
        span for span in some if span.trace_id in {s.trace_id for s in some if s.name != "forward" and not s.parent_id}
    ]
    assert validate(some) != []
    assert validate(some, whole=False) == []


def test_spans_of_the_users_own_scopes_are_theirs(spans: list[Span]) -> None:
    step = find(spans, "train.step")
    own = step._replace(scope="my.pipeline", name="whatever", span_id="1" * 16, parent_id="2" * 16, attributes={"a": 1})
    assert validate([*spans, own._replace(resource={})]) == []
