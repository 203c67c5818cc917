"""Follows the convolutions of a run: which of them find a plan in cuDNN's cache, and which make it look for one.

While benchmark is off nothing is followed, until it has been on once: from then on the plans that the heuristics choose
are remembered as well, for they are found again. What ran before benchmark was switched on for the first time is not
known: it is told as a warm-up when it runs again, though it is none.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from otel_dl.patches.cudnn import keys
from otel_dl.patches.cudnn.calls import Device, Flags, Operation, arguments_of, of_general, operand_of, read
from otel_dl.patches.cudnn.keys import FORWARD, Call, Key, Operand, Plans
from otel_dl.patches.cudnn.spans import Convolution, Steps
from otel_dl.recording.failure import Failure
from otel_dl.recording.lane import is_failure
from otel_dl.recording.native import Ended
from otel_dl.recording.records import clock

if TYPE_CHECKING:
    from otel_dl.patches._patching import Patches
    from otel_dl.recording.run import Run

_KNOWN: Final = 10_000
"""Forms of calls that a thread remembers at most."""
_MODULES: Final = 4_096
"""Weights of which it is remembered what they were last used with."""
_TENSORS: Final = ("input", "weight", "bias")
_BACKWARD_ARGUMENTS: Final = 11
"""Of `aten::convolution_backward`."""
_NODE: Final = "ConvolutionBackward0"
_DIRECTIONS: Final = (keys.BACKWARD_INPUT, keys.BACKWARD_WEIGHT)
"""In the order in which torch gives their gradients."""


class Form:
    """All calls that are alike: they have the same keys. `call` is None where cuDNN does not run them."""

    __slots__ = ("_backward", "call", "device", "keys", "operation", "settled", "steady")

    def __init__(self, operation: Operation, call: Call | None, device: str) -> None:
        self.operation = operation
        self.call = call
        self.device = device
        self.keys: dict[str, Key] = dict(keys.keys(call)) if call is not None else {}
        """By direction, as far as they are known."""
        self.settled = False
        """Whether the backward of one was seen, so that the keys are all known."""
        self.steady: dict[tuple[str, bool], Convolution] = {}
        self._backward: tuple[Operand, Mapping[str, Key]] | None = None

    def backward(self, call: Call, grad: Operand) -> Mapping[str, Key]:
        """The keys of the backward, which take some time to work out."""
        last = self._backward
        if last is None or last[0] != grad:
            self._backward = last = grad, keys.keys(call, grad)
        return last[1]

    def span(self, direction: str, key: Key, shared: bool) -> Convolution:
        """One that found its plan: the same each time."""
        span = self.steady.get((direction, shared))
        if span is None or span.key != key:
            span = Convolution(f"cudnn::{self.operation.name}{direction}", key, self.device, False, shared=shared)
            self.steady[direction, shared] = span
        return span

    def warm_up(self, direction: str, key: Key, former: Form | None, shared: bool) -> Convolution:
        before = former.keys.get(direction) if former is not None and former.operation == self.operation else None
        # Another kernel is another convolution: the weight's place in memory was taken by it.
        changed = keys.changes(before, key) if before is not None and before.w == key.w else ""
        return Convolution(f"cudnn::{self.operation.name}{direction}", key, self.device, True, changed, shared)


class _Thread(threading.local):
    """What torch keeps for each thread, and what makes it quick to look up here."""

    def __init__(self, most: int) -> None:
        self.plans = Plans(most)
        self.forms: dict[Any, Form] = {}
        self.backward: Backward | None = None
        """The one that has begun."""
        self.inside = False
        """A convolution runs: what is called for it is a part of it."""


class Watch:
    """Of one run, in all its threads."""

    def __init__(self, run: Run, patches: Patches, device: Device) -> None:
        import torch

        self._patches = patches
        self._note = run.note
        self._device = device
        self._steps = Steps(run)
        self._thread = _Thread(keys.limit(os.environ))
        self._last: dict[int, Form] = {}
        """By id of the weight."""
        self.benchmark = device.benchmark
        self._parameter = torch.nn.Parameter
        self._dispatch: Any = getattr(torch.Tensor, "__torch_dispatch__", None)
        self._plain: dict[Any, bool] = {torch.Tensor: True, torch.nn.Parameter: True}
        c: Any = vars(torch)["_C"]
        self._overridden: Callable[[tuple[Any, ...]], bool] = torch.overrides.has_torch_function
        self._traced: Callable[[], object] = c._get_tracing_state
        self.followed: list[Any] = []
        """torch's functions, as `Follow` of `recording/c/follow.c`."""
        self._on = False
        """Whether benchmark was on at any convolution by cuDNN so far."""

    def begin(self, operation: Operation, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> Ended | None:
        """Before torch's function is called with these arguments, while benchmark is on, or has been: what is called
        once it has returned or raised, None where there is nothing to say about the call."""
        try:
            return self._begin(operation, args, kwargs or {})
        except BaseException as error:
            self._thread.inside = False
            self._patches.fault(error)
            return None

    def begin_general(self, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> Ended | None:
        """The same for `aten::convolution`, and `aten::_convolution`, which has more arguments behind."""
        try:
            if self._thread.inside:
                return None
            general = of_general(args, kwargs or {})
            return self._begin(*general, {}) if general is not None else None
        except BaseException as error:
            self._thread.inside = False
            self._patches.fault(error)
            return None

    def begin_backward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> Ended | None:
        """The same for `aten::convolution_backward`, which compiled code calls."""
        try:
            return self._begin_backward(args) if not kwargs else None
        except BaseException as error:
            self._thread.inside = False
            self._patches.fault(error)
            return None

    def _begin(self, operation: Operation, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Ended | None:
        thread = self._thread
        if thread.inside or self._is_overridden(args, kwargs):
            return None
        form = self._form(operation, args, kwargs)
        if form is None or form.call is None:
            return None
        self._follow_always()
        known = thread.plans.find(form.keys[FORWARD])
        former = self._used(args[1] if len(args) > 1 else kwargs["weight"], form)
        thread.inside = True
        return partial(self._end, form, former, self.benchmark(), known, clock())

    def _begin_backward(self, args: tuple[Any, ...]) -> Ended | None:
        if len(args) != _BACKWARD_ARGUMENTS or not isinstance(args[-1], (list, tuple)):
            return None  # torch refuses it
        grad, x, w, _, *others, wanted = args
        if self._thread.inside or self._thread.backward is not None or self._is_overridden(args[:3], {}):
            return None
        general = of_general((x, w, None, *others), {})
        form = self._form(*general, {}) if general is not None else None
        operand = self.operand(grad)
        if form is None or form.call is None or operand is None:
            return None
        self._follow_always()
        directions = [each for each, is_wanted in zip(_DIRECTIONS, wanted, strict=False) if is_wanted is True]
        self._thread.inside = True
        return partial(self._end_backward, form, self._used(w, form), operand, directions, clock())

    def _is_overridden(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Who overrides it makes the call that runs, or none; and the sizes of what is traced are traced as well."""
        if self._overridden(args) or (kwargs and self._overridden((*kwargs.values(),))):
            return True
        return self._traced() is not None

    def _follow_always(self) -> None:
        """From now on also while benchmark is off."""
        if not self._on:
            self._on = True
            for followed in self.followed:
                followed.always = True

    def _end_backward(
        self, form: Form, former: Form | None, grad: Operand, directions: Sequence[str], start: int, result: Any,
        error: BaseException | None,
    ) -> None:  # fmt: skip
        self._thread.inside = False
        if error is not None:
            return  # torch caches no plan that has not run
        try:
            self.ran(form, former, grad, directions, start, clock())
        except BaseException as fault:
            self._patches.fault(fault)

    def _end(
        self,
        form: Form,
        former: Form | None,
        benchmark: bool,
        known: bool,
        start: int,
        result: Any,
        error: BaseException | None,
    ) -> None:
        try:
            end = clock()
            self._thread.inside = False
            if error is None:
                self._done(form, former, benchmark, known, start, end, result)
            else:
                self._failed(form, former, benchmark and not known, start, end, error)
        except BaseException as fault:
            self._thread.inside = False
            self._patches.fault(fault)

    def _used(self, weight: Any, form: Form) -> Form | None:
        """`weight` is used in this form now; how it was the last time. Only of parameters, which stay what they are."""
        if not isinstance(weight, self._parameter):
            return None
        former = self._last.get(id(weight))
        if former is not form:
            if len(self._last) >= _MODULES:
                self._last.clear()
            self._last[id(weight)] = form
        return former

    def _done(
        self, form: Form, former: Form | None, benchmark: bool, known: bool, start: int, end: int, result: Any
    ) -> None:
        key = form.keys[FORWARD]
        thread = self._thread
        if thread.backward is not None:
            thread.backward.recomputed(end)
        if not known:
            thread.plans.add(key)
            if benchmark:
                self._note(form.warm_up(FORWARD, key, former, False), start, end)
        if known and self._steps.wanted:
            self._steps.add(form.span(FORWARD, key, False), start, end)
        if (self._steps.wanted or not form.settled) and result.requires_grad:
            node = _node(result.grad_fn)
            if node is not None:
                backward = Backward(self, form, former)
                node.register_prehook(backward.begin)
                node.register_hook(backward.end)

    def _failed(self, form: Form, former: Form | None, warm: bool, start: int, end: int, error: BaseException) -> None:
        """torch caches no plan that has not run."""
        if self._thread.backward is not None:
            self._thread.backward.recomputed(end)
        if warm and is_failure(error):
            self._note(form.warm_up(FORWARD, form.keys[FORWARD], former, False), start, end, Failure.of(error))

    def _form(self, operation: Operation, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Form | None:
        """None where there is nothing to say about the call."""
        if len(args) > 1:
            x, w = args[0], args[1]
        elif "weight" in kwargs and (args or "input" in kwargs):
            x, w = args[0] if args else kwargs["input"], kwargs["weight"]
        else:
            return None
        plain, device = self._plain, self._device
        of_x, of_w = x.__class__, w.__class__
        if not ((plain.get(of_x) or self._is_plain(of_x)) and device.has(x)):
            return None
        if not ((plain.get(of_w) or self._is_plain(of_w)) and device.has(w)):
            return None
        flags = device.flags()
        try:
            # Without the tensors, which would be kept.
            rest = (*args[3:], *((k, v) for k, v in kwargs.items() if k not in _TENSORS)) if kwargs else args[3:]
            like = (
                operation, x.shape, x.stride(), x.dtype, x.get_device(), x.data_ptr() & 31, x.requires_grad,
                w.shape, w.stride(), w.dtype, w.data_ptr() & 31, w.requires_grad,
                rest, flags,
            )  # fmt: skip
        except RuntimeError:
            return None  # functorch's: what runs has other sizes
        forms = self._thread.forms
        try:
            form = forms.get(like)
        except TypeError:
            return self._new(operation, args, kwargs, flags)  # with a list among its arguments
        if form is None:
            if len(forms) >= _KNOWN:
                forms.clear()
            form = forms[like] = self._new(operation, args, kwargs, flags)
        return form

    def _new(self, operation: Operation, args: Sequence[Any], kwargs: Mapping[str, Any], flags: Any) -> Form:
        arguments = arguments_of(operation, args, kwargs)
        if arguments is None:
            return Form(operation, None, "")
        try:
            call = read(operation, arguments, Flags(*flags))
            if call is not None and not self._device.uses_cudnn(operation, arguments, call):
                call = None
            return Form(operation, call, str(arguments["input"].device))
        except (TypeError, ValueError, LookupError, ArithmeticError, RuntimeError):
            return Form(operation, None, "")  # torch refuses it as well, and says why

    def _is_plain(self, kind: Any) -> bool:
        """Whether what is done with such a tensor is done by torch's own kernels: fake ones have no data, distributed
        ones another size."""
        plain = self._plain.get(kind)
        if plain is None:
            plain = getattr(kind, "__torch_dispatch__", None) == self._dispatch
            if len(self._plain) < 64:
                self._plain[kind] = plain
        return plain

    # Backward.

    def ran(
        self, form: Form, former: Form | None, grad: Operand, directions: Sequence[str], start: int, end: int
    ) -> None:
        """The backward of one, in the thread that now runs: its operations are one call of torch, so that how its time
        is divided between them is not known."""
        if form.call is None or not directions:
            return
        benchmark = self.benchmark()
        of_backward = form.backward(form.call, grad)
        form.settled = True
        plans = self._thread.plans
        shared = len(directions) > 1
        for direction in directions:
            key = of_backward[direction]
            if plans.find(key):
                self._steps.add(form.span(direction, key, shared), start, end)
            else:
                plans.add(key)
                if benchmark:
                    self._note(form.warm_up(direction, key, former, shared), start, end)
            form.keys[direction] = key

    def begun(self, backward: Backward | None) -> None:
        """Or ended: None."""
        self._thread.backward = backward

    def fault(self, error: BaseException) -> None:
        self._patches.fault(error)

    def operand(self, tensor: Any) -> Operand | None:
        """None of what has no memory of its own: functorch's, sparse ones, those of another class."""
        if tensor is None or not self._is_plain(tensor.__class__):
            return None
        try:
            return operand_of(tensor)
        except RuntimeError:
            return None


class Backward:
    """Two hooks of an autograd node, which change nothing and keep no tensor."""

    __slots__ = ("_form", "_former", "_grad", "_start", "_watch")

    def __init__(self, watch: Watch, form: Form, former: Form | None) -> None:
        self._watch = watch
        self._form = form
        self._former = former
        self._grad: Operand | None = None
        self._start = 0

    def begin(self, grad_outputs: Sequence[Any]) -> None:
        try:
            self._grad = self._watch.operand(grad_outputs[0])
            if self._grad is not None:
                self._watch.begun(self)
        except BaseException as error:
            self._watch.fault(error)
        self._start = clock()

    def recomputed(self, end: int) -> None:
        """Checkpointing recomputes the forward when the node asks for what it saved: not before that is it at work."""
        self._start = end

    def end(self, grad_inputs: Sequence[Any], grad_outputs: Sequence[Any]) -> None:
        end = clock()
        if self._grad is None:
            return
        try:
            self._watch.begun(None)
            directions = [
                direction for direction, grad in zip(_DIRECTIONS, grad_inputs, strict=False) if grad is not None
            ]
            self._watch.ran(self._form, self._former, self._grad, directions, self._start, end)
        except BaseException as error:
            self._watch.fault(error)


def _node(node: Any) -> Any:
    """The convolution's in the graph of its result; a squeeze is around it where the input had no batch."""
    if node is not None and node.name() != _NODE and node.next_functions:
        node = node.next_functions[0][0]
    return node if node is not None and node.name() == _NODE else None
