"""Calls of aten's operators with generated arguments: for each overload and tensor position, one call that runs.

The operators are enumerated, not listed, so that one which a later torch adds is tried without anybody thinking of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch._ops import OpOverload

METADATA = frozenset(
    {
        "_debug_has_internal_overlap",
        "sym_is_contiguous",
        "stride",
        "sym_stride",
        "is_contiguous",
        "is_non_overlapping_and_dense",
    }
)
"""Operators that tell a tensor's strides, which are 0 for a tag."""
UNDEFINED = frozenset(
    {
        "empty",
        "_embedding_bag",
        "embedding_bag",
        "empty_like",
        "new_empty",
        "new_empty_strided",
        "empty_strided",
        "empty_permuted",
    }
)
"""Operators whose result has no defined values; only its metadata can be compared."""
UNTRIED = METADATA | frozenset({
    "set_",  # borrows storage
    "lift", "lift_fresh_copy",  # for functorch; with out= they ignore that a parameter needs a gradient
    "_reshape_alias",  # its strides are only ever computed by reshape, which is tried
    "_nested_tensor_from_tensor_list",  # has no shape to compare
    "_dyn_quant_matmul_4bit", "_embedding_bag_forward_only", "_native_batch_norm_legit", "_weight_norm_interface",
    "_fused_adagrad", "_fused_adagrad_", "_fused_sgd", "_fused_sgd_", "_nnpack_spatial_convolution",
    "_transform_bias_rescale_qkv", "_add_batch_dim", "_remove_batch_dim",
    "_unpack_dual",  # forward-mode gradients, which inference mode forbids
})  # fmt: skip
"""The last names trust their arguments, and end the process (torch 2.13) where those do not belong together."""
SUBJECTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "whole": lambda weight: weight,
    "grouped": lambda weight: weight.view(2, -1, weight.shape[-1]),
    "vector": lambda weight: weight[3],
    "element": lambda weight: weight[2, 5],
    "images": lambda weight: weight.view(2, 2, -1, weight.shape[-1]),
}


@dataclass(frozen=True)
class Call:
    """One call of an operator that runs on plain tensors."""

    func: OpOverload
    position: int
    """Which argument is the weight."""
    subject: str
    choice: int
    in_list: bool

    @property
    def name(self) -> str:
        """For messages."""
        return f"{self.func} argument {self.position} ({self.subject}, choice {self.choice})"

    @property
    def writes(self) -> bool:
        """Whether the schema says that the weight is written."""
        alias = self.func._schema.arguments[self.position].alias_info
        return alias is not None and alias.is_write

    @property
    def is_defined(self) -> bool:
        """Whether the result's values are defined."""
        return self.func._schema.name.removeprefix("aten::") not in UNDEFINED

    def run(self, weight: torch.Tensor) -> Any:
        """Run it with ``weight``, the same arguments each time."""
        torch.manual_seed(0)
        args, kwargs = _arguments(self, SUBJECTS[self.subject](weight))
        return self.func(*args, **kwargs)


def overloads() -> Iterator[OpOverload]:
    """Every overload of every aten operator that takes a tensor, as the dispatcher knows them."""
    for full_name in sorted(torch._C._dispatch_get_all_op_names()):
        name, _, overload = full_name.removeprefix("aten::").partition(".")
        # Backward operators trust their arguments too; autograd calls them in the tests of gradients.
        if not full_name.startswith("aten::") or name in UNTRIED or "backward" in name:
            continue
        func = getattr(getattr(torch.ops.aten, name), overload or "default", None)
        if func is not None and any(_is_tensor(argument) for argument in func._schema.arguments):
            yield func


def runnable(weight: torch.Tensor) -> Iterator[Call]:
    """For each overload and tensor argument the first call that runs on a plain copy of ``weight``, where one does."""
    for func in overloads():
        arguments = func._schema.arguments
        has_out = any(argument.is_out for argument in arguments)
        tries = _TRIES
        for position, argument in enumerate(arguments):
            if not _is_tensor(argument):
                continue
            # An ``out=`` overload reads like its functional sibling, which is tried in full.
            some = tries if argument.is_out or not has_out else tries[:2]
            call = _first_that_runs(func, position, some, weight)
            if call is None:
                # What does not run with the weight in one place seldom runs with it in another.
                tries = tries[:2]
            else:
                yield call


def _first_that_runs(
    func: OpOverload, position: int, tries: tuple[tuple[str, int], ...], weight: torch.Tensor
) -> Call | None:
    in_list = "List" in str(func._schema.arguments[position].type)
    for subject, choice in tries:
        call = Call(func, position, subject, choice, in_list)
        try:
            with torch.no_grad():
                call.run(weight.clone())
        except NotImplementedError:
            return None
        except (RuntimeError, ValueError, TypeError, IndexError):
            continue
        else:
            return call
    return None


def _is_tensor(argument: Any) -> bool:
    return "Tensor" in str(argument.type)


def _same(subject: torch.Tensor) -> torch.Tensor:
    return torch.rand(subject.shape).add(0.5).to(torch.bfloat16)


_OTHERS: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    _same,
    lambda subject: torch.rand(subject.shape[:-2] + subject.shape[-2:][::-1]).to(torch.bfloat16),
    lambda _: torch.tensor([0, 2, 1]),
    lambda subject: torch.rand(subject.shape) > 0.5,
    lambda subject: torch.rand(subject.shape[-1:]).to(torch.bfloat16),
    lambda subject: torch.zeros(subject.shape, dtype=torch.int64),
    lambda _: torch.tensor(0.5, dtype=torch.bfloat16),
    lambda subject: torch.rand(subject.shape),
    lambda _: torch.tensor(1),
    lambda subject: torch.rand(subject.shape[:1]).to(torch.bfloat16),
)
"""What the other tensor arguments are, in the order in which they are tried."""


_TRIES = (
    *(("whole", choice) for choice in (0, 2, 7, 1, 4, 3, 6, 8, 5)),
    *(("element", choice) for choice in (0, 2, 3, 1)),
    *(("vector", choice) for choice in (0, 1, 2)),
    *(("images", choice) for choice in (0, 1)),
    *(("grouped", choice) for choice in (0, 1)),
)
"""Which shape of the weight goes with which other arguments: the pairs that made an operator of torch 2.13 run."""


def _arguments(call: Call, subject: torch.Tensor) -> tuple[list[Any], dict[str, Any]]:
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for position, argument in enumerate(call.func._schema.arguments):
        if position == call.position:
            value: Any = [subject, subject] if call.in_list else subject
        elif argument.has_default_value() and not (argument.alias_info and argument.alias_info.is_write):
            continue
        else:
            value = _value(str(argument.type), argument.name, subject, call.choice)
        if argument.kwarg_only or len(args) < position:
            kwargs[argument.name] = value
        else:
            args.append(value)
    return args, kwargs


_BY_NAME: dict[str, Any] = {
    "reduce": "sum", "mode": "constant", "padding": [1, 1], "kernel_size": [2, 2], "output_size": [2, 2], "eps": 1e-5,
    "dtype": torch.float32, "size": [1], "shape": [-1], "dims": [0], "repeats": [1, 1, 1, 1], "equation": "ij,ij->ij",
    "momentum": 0.1, "reduction": 1, "approximate": "none", "ord": 2, "upper": True, "training": False, "train": False,
    "step": 1, "end": 2, "split_size": 16, "split_sizes": [32, 32], "sections": 2, "chunks": 2, "diagonal": 0,
}  # fmt: skip
_BY_TYPE: dict[str, Any] = {
    "int": 0, "SymInt": 1, "float": 0.5, "bool": False, "number": 2, "Scalar": 2, "str": "sum", "Layout": torch.strided,
    "ScalarType": torch.float32, "Device": torch.device("cpu"), "complex": 1.0, "List[int]": [0], "List[SymInt]": [1],
    "List[bool]": [True], "List[float]": [1.0], "List[number]": [2], "Generator": None,
}  # fmt: skip


def _value(kind: str, name: str, subject: torch.Tensor, choice: int) -> Any:
    if "Tensor" in kind:
        other = _OTHERS[choice](subject)
        return [other, other] if "List" in kind else other
    if kind.startswith("Optional"):
        return None
    if name in _BY_NAME and choice % 2 == 0:
        return _BY_NAME[name]
    if kind in ("List[int]", "List[SymInt]") and choice % 3 == 1:
        return list(subject.shape)
    return _BY_TYPE.get(kind)
