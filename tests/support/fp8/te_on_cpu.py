"""Transformer Engine without a GPU: its own Python code, and torch in place of the few kernels that it calls.

The wheel `transformer_engine` is Python alone: modules, recipes, quantizers, the state manager of delayed scaling. What
it lacks is the extension `transformer_engine_torch`, the kernels. `install()` imports it from the folder that
`make test` fills, with a stand-in for the extension: quantization to FP8 and matrix products, in torch. What is tested
so is when scales are made, kept and used, and by whom; not speed, and not the last bit of a kernel.

For processes of their own: Megatron then sees Transformer Engine, and torch seems to have a GPU, which the CPU lane
of other tests could not bear.
"""

from __future__ import annotations

import enum
import os
import sys
import types
import warnings
from pathlib import Path

FOLDER = Path(__file__).parents[3] / ".te"
"""The folder into which `make te` puts the wheel."""


def is_there() -> bool:
    return (FOLDER / "transformer_engine").is_dir()


class _Names(type):
    """An enumeration whose members are numbered as they are asked for: TE mirrors those of the extension by name."""

    def __getattr__(cls, name: str):
        if name == "__members__":
            return {name: value for name, value in vars(cls).items() if not name.startswith("_")}
        if name.startswith("__"):
            raise AttributeError(name)
        value = len(cls.__members__)
        setattr(cls, name, value)
        return value


class _Extension(types.ModuleType):
    """A compiled module of which nothing is there: every name can be imported, and none be called."""

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)

        def refuse(*_args, **_kwargs):
            raise NotImplementedError(f"{self.__name__}.{name} has no stand-in on a CPU")

        found = _Names(name, (), {"__init__": refuse})
        setattr(self, name, found)
        return found


class FP8FwdTensors(enum.IntEnum):
    GEMM1_INPUT, GEMM1_WEIGHT, GEMM1_OUTPUT, GEMM2_INPUT, GEMM2_WEIGHT, GEMM2_OUTPUT = range(6)
    GEMM3_OUTPUT = 8


class FP8BwdTensors(enum.IntEnum):
    GRAD_OUTPUT1, GRAD_INPUT1, GRAD_OUTPUT2, GRAD_INPUT2, GRAD_OUTPUT3, GRAD_INPUT3 = range(6)


def install() -> None:
    """Make `transformer_engine.pytorch` importable and its linear layers computable, in this process. Call it before
    Megatron is imported."""
    # TE's own switches: no core library is looked for; updates of scales by its Python function; nothing compiled.
    os.environ |= {"NVTE_PROJECT_BUILDING": "1", "NVTE_UNFUSED_FP8_UPDATE": "1", "NVTE_TORCH_COMPILE": "0"}
    sys.path.insert(0, str(FOLDER))
    extension = _Extension("transformer_engine_torch")
    extension.FP8FwdTensors, extension.FP8BwdTensors = FP8FwdTensors, FP8BwdTensors  # type: ignore[attr-defined]
    for kernel in (quantize, fp8_transpose, bgrad_quantize, generic_gemm, layernorm_fwd, layernorm_bwd):
        setattr(extension, kernel.__name__, kernel)
    for name in ("rmsnorm_fwd", "rmsnorm_bwd", "rmsnorm_bwd_add"):
        getattr(extension, name)
    onnx = "transformer_engine.pytorch.onnx_extensions"
    sys.modules |= {extension.__name__: extension, onnx: _Extension(onnx)}
    _play_hopper()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the extension's file is missing
        import transformer_engine.common
    transformer_engine.common.load_framework_extension = lambda framework: None
    import transformer_engine.pytorch

    _track_random_states_of_the_cpu()


def _play_hopper() -> None:
    """Let torch answer as with an H100, where TE asks before it computes."""
    import torch

    from megaaccum.platform import cpu

    cpu._redirect_factories()
    cpu._redirect_cuda_module()
    torch.Tensor.is_cuda = property(lambda self: True)  # type: ignore[assignment, method-assign]
    torch.cuda.is_available = lambda: True
    torch.optim.Optimizer._accelerator_graph_capture_health_check = lambda self: None  # type: ignore[method-assign]
    torch.cuda.is_current_stream_capturing = lambda: False
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    torch.cuda.get_device_properties = lambda device=None: types.SimpleNamespace(  # type: ignore[assignment]
        major=9, minor=0, multi_processor_count=132
    )


def _track_random_states_of_the_cpu() -> None:
    """Have TE keep the CPU's random states for layers that it recomputes."""
    import torch
    from transformer_engine.pytorch import distributed

    distributed._get_cuda_rng_state = lambda *args, **keys: torch.default_generator.get_state()
    distributed._set_cuda_rng_state = lambda state, *args, **keys: torch.default_generator.set_state(state)


# --- kernels, as the extension's C++ describes them ------------------------------------------------------------------


def quantize(tensor, quantizer, output=None, noop=None):
    """Cast to FP8 with the quantizer's scale, and note the largest absolute value."""
    import torch
    from transformer_engine.pytorch.constants import TE_DType_To_Torch
    from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer, Float8Tensor
    from transformer_engine.pytorch.tensor.storage.float8_tensor_storage import Float8TensorStorage

    dtype = TE_DType_To_Torch[quantizer.dtype]
    values, most = tensor.detach().float(), torch.finfo(TE_DType_To_Torch[quantizer.dtype]).max
    largest = values.nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf).abs().max()
    if isinstance(quantizer, Float8CurrentScalingQuantizer):
        scale = most / largest.clamp(min=1e-12)
    else:
        scale = quantizer.scale
        quantizer.amax.copy_(torch.maximum(quantizer.amax, largest.view(1)))
    data = (values * scale).clamp(-most, most).to(dtype).view(torch.uint8)
    inverse = (1 / scale).reshape(1).clone()
    transposed = fp8_transpose(data, quantizer.dtype) if quantizer.columnwise_usage else None
    if output is not None:
        output._data.copy_(data)
        output._scale_inv.copy_(inverse)
        output._transpose = transposed
        output._transpose_invalid = transposed is None
        return output
    parts = dict(data=data, fp8_scale_inv=inverse, fp8_dtype=quantizer.dtype, data_transpose=transposed)
    if quantizer.internal:
        return Float8TensorStorage(fake_dtype=tensor.dtype, quantizer=quantizer, **parts)
    return Float8Tensor(shape=data.shape, dtype=tensor.dtype, device=data.device, quantizer=quantizer, **parts)


def fp8_transpose(data, dtype, *, out=None):
    turned = data.reshape(-1, data.shape[-1]).t().contiguous()
    return turned if out is None else out.copy_(turned.view(out.shape))


def bgrad_quantize(grad, quantizer):
    """(gradient of the bias, the gradient in FP8)."""
    return grad.reshape(-1, grad.shape[-1]).float().sum(0).to(grad.dtype), quantizer(grad)


def generic_gemm(
    a, a_turned, b, b_turned, out, quantizer, out_dtype, bias, bias_dtype, gelu, gelu_in, grad, *rest, **unused
):
    """op(b) @ op(a) in FP32, where op turns; with `grad` the sum of b's rows is the bias' gradient."""
    from transformer_engine.pytorch.constants import TE_DType_To_Torch

    assert quantizer is None and not gelu, "the stand-in writes no FP8 and fuses nothing"
    left, right = _plain(b), _plain(a)
    rows, left, right = left.shape[:-1], left.reshape(-1, left.shape[-1]), right.reshape(-1, right.shape[-1])
    result = (left.t() if b_turned else left) @ (right.t() if a_turned else right)
    bias_grad = None
    if bias is not None and grad:
        bias_grad = left.sum(0).to(TE_DType_To_Torch[bias_dtype])
    elif bias is not None:
        result = result + bias.float()
    result = result.to(TE_DType_To_Torch[out_dtype])
    if not b_turned:
        result = result.reshape(*rows, result.shape[-1])
    if out is not None:
        accumulate = rest[2]
        out.copy_(out + result if accumulate else result)
        result = out
    return result, bias_grad, None, None


def _plain(operand):
    import torch

    return operand.float() if type(operand) in (torch.Tensor, torch.nn.Parameter) else operand.dequantize(
        dtype=torch.float32
    )  # fmt: skip


def layernorm_fwd(x, weight, bias, eps, out, quantizer, out_dtype, sm_margin, zero_centered):
    """(normalised [in FP8 where asked for], mean, 1 / deviation) per row of x [rows, width]."""
    from transformer_engine.pytorch.constants import TE_DType_To_Torch

    assert out is None and not zero_centered
    values = x.float()
    mean = values.mean(-1)
    rsigma = (values.var(-1, unbiased=False) + eps).rsqrt()
    result = (values - mean[:, None]) * rsigma[:, None] * weight.float()
    result = (result if bias is None else result + bias.float()).to(TE_DType_To_Torch[out_dtype])
    return (result if quantizer is None else quantizer(result)), mean, rsigma


def layernorm_bwd(dz, x, mu, rsigma, gamma, sm_margin, zero_centered):
    """(gradient of x, of weight, of bias)."""
    z, grad = (x.float() - mu[:, None]) * rsigma[:, None], dz.float()
    inner = grad * gamma.float()
    dx = (inner - inner.mean(-1, keepdim=True) - z * (inner * z).mean(-1, keepdim=True)) * rsigma[:, None]
    return dx.to(x.dtype), (grad * z).sum(0).to(gamma.dtype), grad.sum(0).to(gamma.dtype)


def use_megatrons_attention() -> None:
    """In layers of Transformer Engine: attention keeps no FP8 state here, and TE's needs kernels of its own. It takes
    packed documents, as TE's does."""
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

    from megaaccum.model.attention import LocalAttention

    TESpecProvider.core_attention = lambda self: LocalAttention  # type: ignore[method-assign]
