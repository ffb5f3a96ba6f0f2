"""Real values of small tensors that a model computes without reading a parameter, such as ``log(arange(n))``.

On the meta device nothing has values. What is made out of nothing (``arange``, ``rand``) is therefore made a second
time on the CPU, and what is computed from such tensors alone is computed there too.

Runs only in the helper process of ``fresh_model``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeGuard

if TYPE_CHECKING:
    import torch

MOST_NUMEL = 1 << 20
# Every parameter begins as empty memory; those that are computed in place are small.
MOST_EMPTY_NUMEL = 1 << 14
FACTORIES = frozenset(
    ("arange", "rand", "randn", "linspace", "ones", "zeros", "full", "eye", "tril_indices", "triu_indices")
)
# Made in the image of a tensor whose values don't matter.
LIKE = frozenset(("zeros_like", "ones_like", "full_like", "rand_like", "randn_like"))


class Shadows:
    """CPU twins of tensors on the meta device."""

    def __init__(self) -> None:
        from torch.utils.weak import WeakIdKeyDictionary

        self._twins: Any = WeakIdKeyDictionary()
        self._parameters: dict[int, torch.Tensor] = {}
        self._stale: set[int] = set()

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The tensor's values, if they are known."""
        if not tensor.is_meta:
            return tensor
        if tensor.untyped_storage()._cdata in self._stale:
            return None
        twin: torch.Tensor | None = self._twins.get(tensor)
        if twin is None:  # wrapped as a parameter
            twin = self._parameters.get(tensor.untyped_storage()._cdata)
            twin = twin if twin is not None and twin.shape == tensor.shape and tensor.is_contiguous() else None
        return twin

    def know(self, tensor: torch.Tensor, twin: torch.Tensor) -> None:
        """Say what the values of a tensor are."""
        self._twins[tensor] = twin

    def forget(self, tensor: torch.Tensor) -> None:
        """The values of a tensor, and of all that share its memory, are not to be used."""
        self._stale.add(tensor.untyped_storage()._cdata)

    def made(self, func: Any, name: str, result: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Follow an operator that gives new tensors or views."""
        results = list(result) if isinstance(result, list | tuple) else [result]
        metas = [made for made in results if is_tensor(made) and made.is_meta]
        if not metas or max(made.numel() for made in metas) > MOST_NUMEL:
            return
        if name in ("empty", "empty_like"):
            if metas[0].numel() <= MOST_EMPTY_NUMEL and metas[0].is_floating_point():
                twin = self._parameters[metas[0].untyped_storage()._cdata] = _unwritten(metas[0])
                self._twins[metas[0]] = twin
            return
        if name in LIKE:
            args = (_unwritten(metas[0]), *args[1:])
        elif not list(_tensors((args, kwargs))) and name not in FACTORIES:
            return
        twin = self._run(func, args, kwargs)
        twins = list(twin) if isinstance(twin, list | tuple) else [twin]
        for made, real in zip(results, twins, strict=False):
            if is_tensor(made) and is_tensor(real):
                self._twins[made] = real

    def mutated(self, func: Any, target: torch.Tensor, args: Any, kwargs: dict[str, Any]) -> None:
        """Follow an operator that writes to ``target``; all that share its memory see it, or are forgotten."""
        if self.of(target) is None or self._run(func, args, kwargs) is None:
            self.forget(target)

    def _run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        try:
            real_args, real_kwargs = self._real(args), self._real(kwargs)
        except LookupError:
            return None
        if "device" in real_kwargs:
            real_kwargs["device"] = "cpu"
        try:
            return func(*real_args, **real_kwargs)
        except (RuntimeError, TypeError, NotImplementedError):
            return None

    def _real(self, value: Any) -> Any:
        if is_tensor(value):
            twin = self.of(value)
            if twin is None:
                raise LookupError
            return twin
        if isinstance(value, list | tuple):
            return type(value)(self._real(each) for each in value)
        if isinstance(value, dict):
            return {key: self._real(each) for key, each in value.items()}
        return value


def _unwritten(tensor: torch.Tensor) -> torch.Tensor:
    """NaN, so that memory that nobody wrote to is not taken for values."""
    import torch

    return torch.full(tensor.shape, torch.nan, dtype=torch.float32).to(tensor.dtype)


def is_tensor(value: object) -> TypeGuard[torch.Tensor]:
    """Whether it is a tensor, without asking torch."""
    return hasattr(value, "untyped_storage")


def _tensors(value: Any) -> Any:
    if is_tensor(value):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)
