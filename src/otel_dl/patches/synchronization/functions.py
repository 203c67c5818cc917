"""Functions of torch that need to know the values of a tensor, as its methods of these names do, or copy to a device.

torch finds them by identity (torch.jit.script, `__torch_function__`, torch.compile), so nothing is put in their place:
what is called when these very objects are called is changed, which takes C (`recording/c/follow.c`). There it is
decided as well whether a call has to do with another place than the CPU.

That they wait is written in torch's sources, in aten/src/ATen/native where nothing else is said, and was looked up in
the compiled 2.4.1 and 2.15:

- `nonzero`, `masked_select`, `unique`, `unique_consecutive`, `bincount`, and `repeat_interleave` with a tensor of
  repeats and no `output_size` (Repeat.h): what comes out has a size that the device knows, as native_functions.yaml
  says of them (`dynamic_output_shape`). `where(condition)` and `argwhere` are `nonzero`. The `unique`s are Python
  functions: what they call is followed;
- `equal` (cuda/Equal.cpp), `allclose` (TensorCompare.cpp), `is_nonzero`, and `one_hot` without `num_classes`
  (Onehot.cpp) ask for a value: `item`;
- functions of torch.linalg that raise where it can't be done, and those that are made of them: BatchLinearAlgebra.cpp,
  `_linalg_check_errors`; the `_ex` forms with `check_errors=True`;
- `tensor`, `as_tensor`, `asarray` of what is not on the `device` they are given: torch/csrc/utils/tensor_new.cpp makes
  it on the CPU, and copies it; and of a list with a tensor that is on a device: each is read.

Left to the deep mode: those of which it depends on sizes, drivers, or the version (`isin`, `histc`, `multinomial`,
`normal`, `combinations`, `ctc_loss`, `linalg.lstsq`, `linalg.cond`, `matrix_power`, `matrix_norm`), `index_put` with a
mask, sparse tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import BuiltinFunctionType
from typing import TYPE_CHECKING, Any, Final

from otel_dl.patches.synchronization.devices import crossed, device_named, device_of, on_device
from otel_dl.patches.synchronization.waiting import Call, Does, always
from otel_dl.recording import native

if TYPE_CHECKING:
    from otel_dl.patches.synchronization.waiting import Args, Condition, Keywords, Waiting

COMPUTED: Final = (
    "allclose", "argwhere", "bincount", "equal", "inverse", "masked_select", "nonzero", "pinverse",
    "repeat_interleave", "svd", "where",
)  # fmt: skip
MADE: Final = ("as_tensor", "asarray", "tensor")
CALLED: Final = {"_unique2": "unique", "unique_dim": "unique", "unique_consecutive": "unique_consecutive"}
"""What is called by functions of these names."""
LINALG: Final = (
    "cholesky", "eig", "eigh", "eigvals", "eigvalsh", "inv", "ldl_factor", "lu_factor", "matrix_rank", "pinv", "solve",
    "svd", "svdvals", "tensorinv", "tensorsolve",
)  # fmt: skip
CHECKED: Final = ("cholesky_ex", "inv_ex", "ldl_factor_ex", "lu_factor_ex", "solve_ex")


def install(waiting: Waiting) -> None:
    import torch

    follow = native.hook("Follow", waiting.run.settings.native)
    if follow is None:
        return
    c: Any = torch._C  # pyright: ignore[reportPrivateUsage]
    gate = c._has_torch_function_unary, c.TensorBase.__dict__["is_cpu"], torch.device("cpu")
    alone = *gate, 1  # `where` of three arguments, which is called often, waits for nothing
    followed: list[Any] = []

    def restored(after_fault: bool) -> None:
        for each in followed:
            each.restore()

    waiting.patches.when_restored(restored)
    for owner, name, call in calls(c):
        function: Any = getattr(owner, name, None)
        if isinstance(function, BuiltinFunctionType):
            followed.append(follow(function, alone if name == "where" else gate, waiting.follow(call)))


def calls(c: Any) -> Iterator[tuple[Any, str, Call]]:
    """Each function: its module in `torch._C`, its name there, and what it is recorded as."""
    functions = c._VariableFunctions
    yield functions, "is_nonzero", Call("torch.is_nonzero", Does.COPIES, _first, _first)
    for name in COMPUTED:
        yield functions, name, Call(f"torch.{name}", Does.COMPUTES, _first, waits=CONDITIONS.get(name, always))
    for name, function in CALLED.items():
        yield functions, name, Call(f"torch.{function}", Does.COMPUTES, _first)
    for name in MADE:
        yield functions, name, Call(f"torch.{name}", Does.COPIES, made, made_queue)
    for name in LINALG:
        yield c._linalg, f"linalg_{name}", Call(f"torch.linalg.{name}", Does.COMPUTES, _first)
    for name in CHECKED:
        yield c._linalg, f"linalg_{name}", Call(f"torch.linalg.{name}", Does.COMPUTES, _first, waits=_checks_errors)
    one_hot = Call("torch.nn.functional.one_hot", Does.COMPUTES, _first, waits=_asks_for_the_largest)
    yield c._nn, "one_hot", one_hot


def _first(args: Args, kwargs: Keywords, result: Any = None) -> Any:
    """Where the first tensor is: a function refuses those that are not all in one place."""
    return device_of(_tensor((*args, *kwargs.values())))


def _tensor(given: Iterable[Any]) -> Any:
    """The first among these, or in a list among them; as in `recording/c/follow.c`."""
    import torch

    for each in given:
        for _ in range(8):
            if not (type(each) in (list, tuple) and each):
                break
            each = each[0]
        if isinstance(each, torch.Tensor):
            return each
    return None


# What depends on the arguments.


def _repeats_are_a_tensor(args: Args, kwargs: Keywords) -> bool:
    import torch

    repeats = kwargs.get("repeats", args[min(1, len(args) - 1)] if args else None)
    return isinstance(repeats, torch.Tensor) and kwargs.get("output_size") is None


def _checks_errors(args: Args, kwargs: Keywords) -> bool:
    return kwargs.get("check_errors") is True


def _asks_for_the_largest(args: Args, kwargs: Keywords) -> bool:
    classes = kwargs.get("num_classes", args[1] if len(args) > 1 else -1)
    return isinstance(classes, int) and classes == -1  # comparing a tensor would wait itself


CONDITIONS: Final[Mapping[str, Condition]] = {"repeat_interleave": _repeats_are_a_tensor}
"""When a function, or a method, of this name waits."""


# What makes a tensor of data.


def made(args: Args, kwargs: Keywords, result: Any) -> Any:
    import torch

    data = _data(args, kwargs)
    source, target = device_of(_tensor([data])), device_of(result)
    if isinstance(data, torch.Tensor):
        return crossed(source, target) if result is not None else None
    return source if source is not None else target


def made_queue(args: Args, kwargs: Keywords, default: Any = None) -> Any:
    """`default` is the device that it is made on where none is named."""
    import torch

    data, named = _data(args, kwargs), kwargs.get("device")
    source = device_of(_tensor([data]))
    target = device_named(named) if named is not None else default
    target = target if on_device(target) else None
    if isinstance(data, torch.Tensor):
        return crossed(source, target) if named is not None else None
    return source if source is not None else target


def _data(args: Args, kwargs: Keywords) -> Any:
    return args[0] if args else kwargs.get("data", kwargs.get("obj"))
