"""Functions and methods that wait for a device, one of its streams or an event, and do nothing else.

A plain `torch.Stream` or `torch.Event` is of a class that can't be patched (2.4-2.15); those of CUDA and XPU are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from otel_dl.patches.synchronization.waiting import Call, Does

if TYPE_CHECKING:
    from otel_dl.patches.synchronization.waiting import Args, Keywords, Waiting


def install(waiting: Waiting) -> None:
    import torch

    originals: dict[Any, Any] = {}
    for name in ("cuda", "xpu", "mps", "accelerator"):
        module: Any = getattr(torch, name, None)  # torch.accelerator: from 2.6 on
        original: Any = getattr(module, "synchronize", None)
        if original is not None:
            _patch(waiting, module, f"torch.{name}.synchronize", _current(module, name))
            originals[module.synchronize] = original
        for kind in ("Stream", "Event"):
            owner: Any = getattr(module, kind, None)
            if isinstance(owner, type) and "synchronize" in vars(owner):
                _patch(waiting, owner, f"torch.{name}.{kind}.synchronize", _of_stream)

    def dynamo_imported(device_interface: Any) -> None:
        # Its classes keep what the functions are when it is imported: torch's own, as without us.
        values: list[Any] = [getattr(device_interface, name) for name in dir(device_interface)]
        for owner in values:
            kept: Any = getattr(owner, "__dict__", {}).get("synchronize")
            original = originals.get(getattr(kept, "__func__", None))
            if original is not None:
                owner.synchronize = staticmethod(original)

    waiting.patches.when_imported("torch._dynamo.device_interface", dynamo_imported)


def _patch(waiting: Waiting, owner: Any, operation: str, device: Any) -> None:
    original: Any = getattr(owner, "synchronize")  # noqa: B009
    waiting.patches.replace(owner, "synchronize", waiting.around(Call(operation, Does.WAITS, device), original))


def _of_stream(args: Args, kwargs: Keywords, result: Any) -> Any:
    return getattr(args[0], "device", None) or ""


def _current(module: Any, name: str) -> Any:
    """The device that `synchronize(device=None)` was called for."""

    def device(args: Args, kwargs: Keywords, result: Any) -> Any:
        import torch

        given = args[0] if args else kwargs.get("device")
        try:
            kind = name
            if name == "accelerator":
                kind = getattr(torch.accelerator.current_accelerator(), "type", "")
            if isinstance(given, int):
                return f"{kind}:{given}"
            if given is not None and getattr(torch.device(given), "index", None) is not None:
                return str(given)
            current = getattr(module, "current_device_index" if name == "accelerator" else "current_device", None)
            return f"{kind}:{current()}" if current is not None else kind
        except Exception:
            return ""  # there is none, as the call will have said

    return device
