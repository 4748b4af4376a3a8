"""CUDA's autocast rules for tensors on the CPU, to estimate a script's memory on a GPU (step_estimate.py).

PyTorch has a list of operations for each type of device. The CPU's list leaves layer_norm and softmax in half precision,
CUDA's list casts them to float32, and their results are activations that the backward needs. Inside `rules_of_cuda` the CPU's
dispatch key follows CUDA's lists; operations that CUDA does not list are not cast.

Source: ATen/autocast_mode.h; tests/worker/probe/test_step_estimate.py compares the lists with those of the
PyTorch that is installed.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree

KEY = "AutocastCPU"
HALF = (torch.float16, torch.bfloat16)

LOWER_PRECISION = (
    "_convolution.deprecated", "_convolution", "conv1d", "conv2d", "conv3d", "conv_tbc", "conv_transpose1d",
    "conv_transpose2d.input", "conv_transpose3d.input", "convolution", "prelu", "addmm", "addmv", "addr", "matmul", "einsum",
    "mm", "mv", "linalg_vecdot", "linear", "addbmm", "baddbmm", "bmm", "chain_matmul", "linalg_multi_dot",
    "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell",
    "_scaled_dot_product_flash_attention", "scaled_dot_product_attention",
)  # fmt: skip
FLOAT32 = (
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "sinh", "tan",
    "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus", "layer_norm", "native_layer_norm", "rms_norm",
    "group_norm", "frobenius_norm.dim", "nuclear_norm", "nuclear_norm.dim", "cosine_similarity", "poisson_nll_loss",
    "cosine_embedding_loss", "nll_loss", "nll_loss2d", "hinge_embedding_loss", "kl_div", "l1_loss", "smooth_l1_loss",
    "huber_loss", "mse_loss", "margin_ranking_loss", "multilabel_margin_loss", "soft_margin_loss", "triplet_margin_loss",
    "multi_margin_loss", "binary_cross_entropy_with_logits", "dist", "pdist", "cdist", "renorm", "logsumexp",
    "upsample_nearest1d", "_upsample_nearest_exact1d", "upsample_nearest2d", "_upsample_nearest_exact2d",
    "upsample_nearest3d", "_upsample_nearest_exact3d", "upsample_linear1d", "upsample_bilinear2d",
    "_upsample_bilinear2d_aa", "upsample_trilinear3d", "upsample_bicubic2d", "_upsample_bicubic2d_aa",
)  # fmt: skip
FLOAT32_BY_DTYPE = (
    "prod", "prod.dim_int", "softmax.int", "log_softmax.int", "cumprod", "cumsum", "linalg_vector_norm",
    "linalg_matrix_norm", "linalg_matrix_norm.str_ord", "sum", "sum.dim_IntList",
)  # fmt: skip
PROMOTE = (
    "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler", "index_put", "tensordot", "scatter_add",
)  # fmt: skip

Kernel = Callable[..., Any]


@contextlib.contextmanager
def rules_of_cuda() -> Iterator[None]:
    """A context in which torch.autocast("cpu") chooses types as torch.autocast("cuda") does."""
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns that kernels are overridden, which is intended
        for name, kernel in _kernels():
            library.impl(name, kernel, KEY)  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        library._destroy()  # type: ignore[no-untyped-call]


def _kernels() -> Iterator[tuple[str, Kernel]]:
    """Kernels by operation, where the CPU's rule differs from CUDA's."""
    casts = dict.fromkeys(LOWER_PRECISION, _to_lower) | dict.fromkeys(FLOAT32, _to_float32)
    casts |= dict.fromkeys(FLOAT32_BY_DTYPE, _by_dtype) | dict.fromkeys(PROMOTE, _to_widest)
    kernels = set(torch._C._dispatch_get_registrations_for_dispatch_key(KEY))
    for full in kernels:
        name = full.removeprefix("aten::")
        if full.startswith("aten::") and name not in casts:
            yield name, torch.library.fallthrough_kernel
    for name, make in casts.items():
        if make is _to_lower and f"aten::{name}" in kernels:
            continue  # the same rule, and PyTorch's own kernel caches the casts of weights
        if (operation := _operation(name)) is not None:
            yield name, make(operation)


def _operation(name: str) -> Any:
    """The operation of that name; None where this PyTorch does not have it."""
    packet, _, overload = name.partition(".")
    overloads = getattr(torch.ops.aten, packet, None)
    return getattr(overloads, overload or "default", None) if overloads is not None else None


def _without_autocast(operation: Any, args: Iterable[Any], kwargs: dict[str, Any]) -> Any:
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)):
        return operation(*args, **kwargs)


def _cast(values: Any, dtype: torch.dtype, which: Callable[[torch.Tensor], bool]) -> Any:
    return pytree.tree_map(
        lambda value: value.to(dtype) if isinstance(value, torch.Tensor) and which(value) else value, values
    )


def _to_lower(operation: Any) -> Kernel:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        dtype = torch.get_autocast_dtype("cpu")
        args, kwargs = _cast((args, kwargs), dtype, lambda value: value.dtype in (torch.float32, *HALF))
        return _without_autocast(operation, args, kwargs)

    return kernel


def _to_float32(operation: Any) -> Kernel:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = _cast((args, kwargs), torch.float32, lambda value: value.dtype in HALF)
        return _without_autocast(operation, args, kwargs)

    return kernel


def _by_dtype(operation: Any) -> Kernel:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        names = [argument.name for argument in operation._schema.arguments]
        asked = kwargs.get("dtype") or dict(zip(names, args, strict=False)).get("dtype")
        if asked is None and args[0].dtype in HALF:
            kwargs["dtype"] = torch.float32
            args = args[: names.index("dtype")]
        return _without_autocast(operation, args, kwargs)

    return kernel


def _to_widest(operation: Any) -> Kernel:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if any(tensor.dtype == torch.float32 for tensor in tensors):
            args, kwargs = _cast((args, kwargs), torch.float32, lambda value: value.dtype in HALF)
        return _without_autocast(operation, args, kwargs)

    return kernel
