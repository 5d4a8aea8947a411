"""Lion, SOAP and the Newton-Schulz iteration of emerging-optimizers (0.3). Private are its sets of coefficients, which
the float64 lane of the proofs needs because the library's own loop takes FP32 alone, and how SOAP's state begins."""

from __future__ import annotations

import importlib.util
from typing import Any, cast

import torch

from megaaccum.platform import cpu


def is_installed() -> bool:
    """Whether the package can be imported."""
    return importlib.util.find_spec("emerging_optimizers") is not None


def newton_schulz(matrix: torch.Tensor, *, steps: int, coefficients: str, precision: str) -> torch.Tensor:
    """The matrix orthogonalised: singular values near 1, in the matrix' precision (FP32 or float64).

    coefficients: the name of a set. precision: of FP32 products, `medium` (BF16), `high` (TF32) or `highest`.
    """
    from emerging_optimizers import utils
    from emerging_optimizers.orthogonalized_optimizers import muon_utils

    if matrix.dtype is not torch.float64:
        with utils.fp32_matmul_precision(precision):
            found: torch.Tensor = muon_utils.newton_schulz(matrix, steps, coefficients)
        return found
    turned = matrix.mT if matrix.shape[0] > matrix.shape[1] else matrix
    found = torch.nn.functional.normalize(turned, p=2.0, dim=(0, 1), eps=1e-7)  # type: ignore[arg-type]
    mode = "repeat_last" if coefficients in ("polar_express", "cans", "deepseekv4") else "cycle"
    for a, b, c in muon_utils.get_coefficient_iterator(steps, muon_utils._COEFFICIENT_SETS[coefficients], mode):
        found = muon_utils.newton_schulz_step(found, a, b, c)
    return found.mT if turned is not matrix else found


def scale_factor(rows: int, columns: int, mode: str) -> float:
    """The scale of a matrix' update, by the library's name of the rule."""
    from emerging_optimizers.orthogonalized_optimizers import get_muon_scale_factor

    return float(get_muon_scale_factor(rows, columns, mode))


def lion(groups: list[dict[str, Any]], *, lr: float, betas: tuple[float, float]) -> torch.optim.Optimizer:
    """The library's Lion, whose update it compiles where there is a GPU."""
    with cpu.without_compiler():
        from emerging_optimizers.scalar_optimizers import Lion
    optimizer: torch.optim.Optimizer = Lion(groups, lr=lr, betas=betas)
    return optimizer


def soap(matrix: torch.nn.Parameter, keys: Any) -> torch.optim.Optimizer:
    """The library's SOAP of a matrix, with its first state (zeros, identities), a learning rate of 1 and no decay.
    keys: the OptimizerConfig."""
    with cpu.without_compiler():
        from emerging_optimizers.soap import SOAP
    own = {"shampoo_beta": keys.soap_shampoo_beta, "use_kl_shampoo": keys.soap_use_kl_shampoo, "eps": keys.adam_eps}
    optimizer: Any = SOAP([matrix], lr=1.0, weight_decay=0.0, betas=(keys.adam_beta1, keys.adam_beta2), **own)
    optimizer._init_group(optimizer.param_groups[0], skip_non_grad_params=False)
    return cast("torch.optim.Optimizer", optimizer)


def is_lion(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer is one that `lion` made."""
    return type(optimizer).__name__ == "Lion"
