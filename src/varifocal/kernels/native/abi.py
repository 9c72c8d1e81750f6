"""The C structs of `varifocal.h`, each exactly once. The library is checked against them when it is opened."""

import ctypes
import struct
from typing import Any

VERSION = 5
"""`VF_ABI_VERSION`: of the header that these structs were written for."""
MAX_WIDTH = 4096
"""`VF_MAX_WIDTH`."""
MAX_UNITS = 1024
"""`VF_MAX_UNITS`."""
MAX_BRANCHES = 4
"""`VF_MAX_BRANCHES`."""
MOST_FEW = 16
"""`VF_MOST_FEW`."""
NO_MEMORY = 6
"""`VF_NO_MEMORY`: the one status that is not the caller's mistake."""

Field = tuple[str, type]


def _fields(kind: type, names: str) -> list[Field]:
    """Several fields of one type, as a declaration in C lists them."""
    return [(name, kind) for name in names.split()]


def _sizes(names: str) -> list[Field]:
    return _fields(ctypes.c_int64, names)


def _numbers(names: str) -> list[Field]:
    return _fields(ctypes.c_int32, names)


def _pointers(names: str) -> list[Field]:
    return _fields(ctypes.c_void_p, names)


Strides = ctypes.c_int64 * 3
"""Of batch, head and row; made once, since making an array type costs more than filling one."""


class Tensor(ctypes.Structure):
    """`vf_tensor`: a pointer and the strides of all dimensions but the last, which is contiguous."""

    _fields_ = [*_pointers("data"), ("stride", Strides)]


class Branch(ctypes.Structure):
    """`vf_branch`."""

    _fields_ = [*_pointers("window prefix width"), *_numbers("limit"), ("edge", ctypes.c_float)]


# Filling a struct inside another one field by field costs more than a short kernel: these write it at once.
_TENSOR, _BRANCH = struct.Struct("Pqqq"), struct.Struct("PPPif")
assert (_TENSOR.size, _BRANCH.size) == (ctypes.sizeof(Tensor), ctypes.sizeof(Branch))


def put_tensor(call: ctypes.Structure, field: Any, data: int, strides: tuple[int, ...]) -> None:
    """Write a `vf_tensor` to a field of a call, such as `Mixture.q`; strides of batch, head and row."""
    _TENSOR.pack_into(call, field.offset, data, *strides)


def put_branch(call: "Mixture", m: int, *, window: int, prefix: int, width: int, limit: int, edge: float) -> None:
    """Write branch m of a mixture: addresses (0 is null), a limit and an edge."""
    _BRANCH.pack_into(call, Mixture.branch.offset + m * _BRANCH.size, window, prefix, width, limit, edge)


class PairGate(ctypes.Structure):
    """`vf_pair_gate`."""

    _fields_ = [*_sizes("units"), *_fields(Tensor, "a b"), *_pointers("output bias"), ("threshold", ctypes.c_float)]


class DistanceBias(ctypes.Structure):
    """`vf_distance_bias`."""

    _fields_ = [*_sizes("distances"), *_pointers("table"), ("stride", ctypes.c_int64 * 3)]


class Mixture(ctypes.Structure):
    """`vf_mixture`."""

    _fields_ = [
        *_sizes("batch heads kv_heads queries keys head_width"),
        *_numbers("branch_count dtype threads skip_closed score"),
        *_fields(Tensor, "q k v"),
        *_pointers("scale position start weights"),
        ("branch", Branch * MAX_BRANCHES),
        ("pair", PairGate),
        ("bias", DistanceBias),
        ("out", Tensor),
        *_pointers("logsumexp norm"),
        ("branch_out", Tensor * MAX_BRANCHES),
    ]


class MixtureGrad(ctypes.Structure):
    """`vf_mixture_grad`."""

    _fields_ = [
        ("forward", Mixture),
        ("grad_out", Tensor),
        *_pointers("delta grad_logsumexp"),
        *_fields(Tensor, "grad_q grad_k grad_v"),
        *_numbers("accumulate"),
        *_pointers("grad_weights"),
        ("grad_width", ctypes.c_void_p * MAX_BRANCHES),
        *_fields(Tensor, "grad_pair_a grad_pair_b"),
        *_pointers("grad_pair_output grad_pair_bias grad_scale grad_bias_table"),
    ]


class Delta(ctypes.Structure):
    """`vf_delta`."""

    _fields_ = [
        *_sizes("batch heads queries head_width"),
        *_numbers("dtype threads"),
        *_fields(Tensor, "grad_out out"),
        *_pointers("position start delta"),
    ]


class Select(ctypes.Structure):
    """`vf_select`."""

    _fields_ = [
        *_sizes("batch heads kv_heads queries keys head_width capacity"),
        *_numbers("dtype threads block"),
        *_fields(Tensor, "q k pooled"),
        *_pointers("position start budget selected"),
    ]


class Pool(ctypes.Structure):
    """`vf_pool`."""

    _fields_ = [
        *_sizes("batch kv_heads new_keys keys head_width"),
        *_numbers("block dtype threads"),
        *_fields(Tensor, "k"),
        *_pointers("position start"),
        ("pooled", Tensor),
    ]


class Selected(ctypes.Structure):
    """`vf_selected`."""

    _fields_ = [
        *_sizes("batch heads kv_heads index_heads queries keys head_width capacity"),
        *_numbers("dtype threads block include_self"),
        *_fields(Tensor, "q k v"),
        *_pointers("scale position start selected weights"),
        ("out", Tensor),
        *_pointers("logsumexp norm"),
    ]


class SelectedGrad(ctypes.Structure):
    """`vf_selected_grad`."""

    _fields_ = [
        ("forward", Selected),
        ("grad_out", Tensor),
        *_pointers("delta grad_logsumexp"),
        *_fields(Tensor, "grad_q grad_k grad_v"),
        *_pointers("grad_weights"),
    ]


class Norm(ctypes.Structure):
    """`vf_norm`."""

    _fields_ = [
        *_sizes("tokens heads width angles"),
        *_numbers("threads"),
        ("epsilon", ctypes.c_float),
        *_pointers("x weight cosines sines out inverse"),
    ]


class NormGrad(ctypes.Structure):
    """`vf_norm_grad`."""

    _fields_ = [("forward", Norm), *_sizes("parts"), *_pointers("grad_out grad_x grad_weight")]


class Swiglu(ctypes.Structure):
    """`vf_swiglu`."""

    _fields_ = [*_sizes("elements"), *_numbers("threads"), *_pointers("gate up out")]


class SwigluGrad(ctypes.Structure):
    """`vf_swiglu_grad`."""

    _fields_ = [("forward", Swiglu), *_pointers("grad_out grad_gate grad_up")]


class CrossEntropy(ctypes.Structure):
    """`vf_cross_entropy`."""

    _fields_ = [*_sizes("rows classes"), *_numbers("threads"), *_pointers("logits labels losses shares")]


class Matrix(ctypes.Structure):
    """`vf_matrix`."""

    _fields_ = [*_pointers("data scales bias"), *_sizes("rows columns"), *_numbers("kind group")]


class Linear(ctypes.Structure):
    """`vf_linear`."""

    _fields_ = [("matrix", Matrix), *_sizes("vectors"), *_numbers("threads"), *_pointers("x out")]


class Layer(ctypes.Structure):
    """`vf_layer`."""

    _fields_ = [
        *_sizes("tokens width heads kv_heads head_width angles"),
        *_numbers("threads"),
        ("epsilon", ctypes.c_float),
        *_fields(Matrix, "q k v o gate up down"),
        *_pointers("input_norm output_norm q_norm k_norm cosines sines"),
        *_pointers("x normed queries keys values attended inner"),
    ]


class Kept(ctypes.Structure):
    """`vf_kept`."""

    _fields_ = [*_fields(Tensor, "k v"), *_sizes("keys")]


class Step(ctypes.Structure):
    """`vf_step`."""

    _fields_ = [
        ("layer", Layer),
        ("attention", Mixture),
        ("mix", Matrix),
        *_pointers("mix_warmth"),
        *_fields(ctypes.c_float, "mix_start mix_cap"),
        *_pointers("kept sink"),
    ]


STRUCTS: dict[str, type[ctypes.Structure]] = {
    "vf_tensor": Tensor,
    "vf_branch": Branch,
    "vf_pair_gate": PairGate,
    "vf_distance_bias": DistanceBias,
    "vf_mixture": Mixture,
    "vf_mixture_grad": MixtureGrad,
    "vf_delta": Delta,
    "vf_select": Select,
    "vf_pool": Pool,
    "vf_selected": Selected,
    "vf_selected_grad": SelectedGrad,
    "vf_norm": Norm,
    "vf_norm_grad": NormGrad,
    "vf_swiglu": Swiglu,
    "vf_swiglu_grad": SwigluGrad,
    "vf_cross_entropy": CrossEntropy,
    "vf_matrix": Matrix,
    "vf_linear": Linear,
    "vf_layer": Layer,
    "vf_kept": Kept,
    "vf_step": Step,
}
FUNCTIONS: dict[str, type[ctypes.Structure]] = {
    "vf_find_delta": Delta,
    "vf_mixture_forward": Mixture,
    "vf_mixture_backward": MixtureGrad,
    "vf_select_best": Select,
    "vf_pool_keys": Pool,
    "vf_attend_selected": Selected,
    "vf_attend_selected_backward": SelectedGrad,
    "vf_norm_forward": Norm,
    "vf_norm_backward": NormGrad,
    "vf_swiglu_forward": Swiglu,
    "vf_swiglu_backward": SwigluGrad,
    "vf_cross_entropy_of_rows": CrossEntropy,
    "vf_linear_of_few": Linear,
    "vf_layer_project": Layer,
    "vf_layer_finish": Layer,
    "vf_layer_step": Step,
}
"""Functions of a target and one struct: their names and what they take."""


def mismatch(library: ctypes.CDLL) -> str | None:
    """What about a library does not fit these structs, as the end of a sentence; None if all of it does."""
    try:
        found = library.vf_abi_version()
        library.vf_struct_size.restype = ctypes.c_int64
        library.vf_struct_size.argtypes = [ctypes.c_char_p]
        library.vf_target_name.restype = ctypes.c_char_p
        library.vf_status_text.restype = ctypes.c_char_p
        for name in ("vf_target_count", "vf_target_runs"):
            getattr(library, name).restype = ctypes.c_int32
        library.vf_norm_restorable.argtypes = [ctypes.POINTER(Norm)]
        for name, taken in FUNCTIONS.items():
            getattr(library, name).argtypes = [ctypes.c_int32, ctypes.POINTER(taken)]
    except AttributeError as error:
        return f"lacks a function of varifocal's C interface ({error})"
    if found != VERSION:
        return f"has version {found} of the C interface, this package needs {VERSION}"
    for name, taken in STRUCTS.items():
        size = library.vf_struct_size(name.encode())
        if size != ctypes.sizeof(taken):
            return f"has {size} bytes in {name}, this package has {ctypes.sizeof(taken)}"
    return None
