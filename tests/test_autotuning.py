"""Autotuning and graph capture, without a GPU.

Triton's `Autotuner` is its own, with a kernel that is none and a benchmark that measures nothing. Of inductor's
autotuner, and of CUDA graphs, the methods that are called here stand in for torch's: those need a device. Whether
torch calls them as it is said here, `tests/gpu/compilation.py` shows.
"""

from __future__ import annotations

import importlib
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.inprocess import Recorded, recording
from support.loops import network, sgd
from support.phases import lines
from support.validate import from_sdk, validate

from otel_dl.recording.records import clock, to_epoch_ns

triton_heuristics: Any = pytest.importorskip("torch._inductor.runtime.triton_heuristics")


def train(within: dict[int, Any]) -> None:
    """Three steps, whose forward calls what `within` has for them."""
    model = network()
    optimizer = sgd(model)
    steps = iter(range(3))

    def forward(module: Any, inputs: Any) -> None:
        call = within.get(next(steps))
        if call is not None:
            call()

    model[0].register_forward_pre_hook(forward)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(4, 6)).sum().backward()
        optimizer.step()


def only(recorded: Recorded, name: str) -> Any:
    assert validate([from_sdk(span) for span in recorded.spans], whole=False) == []
    (span,) = recorded.named(name)
    return span


class TestTriton:
    @pytest.fixture
    def triton(self) -> Any:
        try:
            return importlib.import_module("triton.runtime.autotuner")
        except ImportError:
            pytest.skip("Triton is not installed")

    @pytest.fixture
    def benchmarked(self) -> list[int]:
        """One entry for each configuration that was tried."""
        return []

    @pytest.fixture
    def tuner(self, triton: Any, benchmarked: list[int], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
        """Makes one of Triton's, of three configurations; the benchmark of number `fails_at` raises."""

        def make(prune: Any = None, fails_at: int = 0) -> Any:
            def kernel(x: Any, size: int) -> None: ...

            def benchmark(call: Any, *args: Any, **kwargs: Any) -> list[float]:
                benchmarked.append(1)
                if len(benchmarked) == fails_at:
                    raise RuntimeError("the kernel does not run")
                call()
                return [1.0, 1.0, 1.0]

            if hasattr(triton, "do_bench"):  # Triton 3.0
                monkeypatch.setattr(triton, "do_bench", benchmark)
            function = types.SimpleNamespace(fn=kernel, run=lambda *args, **kwargs: None)
            configs = [triton.Config({"BLOCK": 2**n}) for n in range(3)]
            made = triton.Autotuner(function, ["x", "size"], configs, ["size"], None, None)
            made._do_bench = benchmark
            made.early_config_prune = prune
            return made

        return make

    def test_it_is_a_span_each_time_a_kernel_is_tuned(self, tuner: Callable[..., Any], benchmarked: list[int]) -> None:
        with recording() as recorded:
            tuned = tuner()
            train({1: lambda: tuned.run(1, size=4), 2: lambda: tuned.run(1, size=4)})
        assert len(benchmarked) == 3
        assert lines(recorded.spans, "train.step")[1:] == [
            "zero_grad forward(triton.autotune) backward optimizer",
            "zero_grad forward backward optimizer",
        ]
        span = only(recorded, "triton.autotune")
        assert span.attributes["code.function.name"] == "kernel"
        assert span.attributes["code.file.path"] == __file__
        assert span.attributes["dl.autotune.configurations"] == 3
        assert span.attributes["is_warmup"] is True

    def test_another_key_is_tuned_anew(self, tuner: Callable[..., Any]) -> None:
        with recording() as recorded:
            tuned = tuner()
            train({1: lambda: tuned.run(1, size=4), 2: lambda: tuned.run(1, size=8)})
        assert len(recorded.named("triton.autotune")) == 2

    def test_those_that_are_pruned_are_not_counted(self, tuner: Callable[..., Any]) -> None:
        with recording() as recorded:
            tuned = tuner(prune=lambda configs, *args, **kwargs: configs[:2])
            train({1: lambda: tuned.run(1, size=4)})
        assert only(recorded, "triton.autotune").attributes["dl.autotune.configurations"] == 2

    def test_where_one_configuration_is_left_it_is_as_triton_does(
        self, tuner: Callable[..., Any], benchmarked: list[int]
    ) -> None:
        """3.0 tries that one, 3.9 takes it."""
        with recording() as recorded:
            tuned = tuner(prune=lambda configs, *args, **kwargs: configs[:1])
            train({1: lambda: tuned.run(1, size=4)})
        assert len(recorded.named("triton.autotune")) == len(benchmarked) <= 1

    def test_an_exception_of_the_kernels(self, tuner: Callable[..., Any]) -> None:
        with recording() as recorded:
            tuned = tuner(fails_at=2)

            def run() -> None:
                with pytest.raises(RuntimeError, match="does not run"):
                    tuned.run(1, size=4)

            train({1: run})
        span = only(recorded, "triton.autotune")
        assert span.attributes["error.type"] == "RuntimeError"
        assert span.attributes["dl.autotune.configurations"] == 2

    def test_within_a_compilation_it_is_part_of_that(self, tuner: Callable[..., Any]) -> None:
        torch.compiler.reset()
        with recording() as recorded:
            tuned = tuner()

            def backend(graph: Any, inputs: Any) -> Any:
                tuned.run(1, size=4)
                return graph.forward

            compiled = torch.compile(lambda x: x + 1, backend=backend)
            train({1: lambda: compiled(torch.ones(2))})
        assert len(recorded.named("torch.compile")) == 1
        assert recorded.named("triton.autotune") == []


class TestInductor:
    def test_it_is_a_span(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def triton_poi_fused_add_0() -> None: ...

        def autotune_to_one_config(self: Any, *args: Any, **kwargs: Any) -> None:
            self.launchers = self.launchers[:1]

        monkeypatch.setattr(triton_heuristics.CachingAutotuner, "autotune_to_one_config", autotune_to_one_config)
        tuner = object.__new__(triton_heuristics.CachingAutotuner)
        tuner.fn = types.SimpleNamespace(fn=triton_poi_fused_add_0)
        tuner.launchers = [1, 2, 3, 4]
        with recording() as recorded:
            train({1: lambda: tuner.autotune_to_one_config(stream=0)})
        span = only(recorded, "triton.autotune")
        assert span.attributes["code.function.name"] == "triton_poi_fused_add_0"
        assert span.attributes["dl.autotune.configurations"] == 4
        assert tuner.launchers == [1]


class TestGraphs:
    @pytest.fixture
    def graph(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        """A graph that captures nothing."""
        monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", lambda self, *args, **kwargs: None)
        monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_end", lambda self: None)
        return torch.cuda.CUDAGraph.__new__(torch.cuda.CUDAGraph)

    def test_a_capture_is_a_span(self, graph: Any) -> None:
        def capture() -> None:
            graph.capture_begin()
            graph.capture_end()

        with recording() as recorded:
            train({1: capture})
        assert lines(recorded.spans, "train.step")[1] == "zero_grad forward(cuda.graph.capture) backward optimizer"
        assert only(recorded, "cuda.graph.capture").attributes["is_warmup"] is True

    def test_it_begins_with_the_context_around_it(self, graph: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """Which waits for the device and empties caches."""
        inside: list[int] = []

        def enter(self: Any) -> None:
            inside.append(clock())
            self.cuda_graph.capture_begin()

        monkeypatch.setattr(torch.cuda.graph, "__enter__", enter)
        context = object.__new__(torch.cuda.graph)
        context.cuda_graph = graph

        def capture() -> None:
            context.__enter__()
            graph.capture_end()

        with recording() as recorded:
            train({1: capture})
        assert only(recorded, "cuda.graph.capture").start_time <= to_epoch_ns(inside[0])

    def test_one_that_does_not_begin_is_none(self, graph: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(self: Any) -> None:
            raise RuntimeError("no capture")

        monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", fail)

        def capture() -> None:
            with pytest.raises(RuntimeError, match="no capture"):
                graph.capture_begin()
            graph.capture_end()

        with recording() as recorded:
            train({1: capture})
        assert recorded.named("cuda.graph.capture") == []

    def test_one_that_fails_says_so(self, graph: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(self: Any) -> None:
            raise RuntimeError("operation not permitted when stream is capturing")

        monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_end", fail)

        def capture() -> None:
            graph.capture_begin()
            with pytest.raises(RuntimeError, match="not permitted"):
                graph.capture_end()

        with recording() as recorded:
            train({1: capture})
        assert only(recorded, "cuda.graph.capture").attributes["error.type"] == "RuntimeError"
