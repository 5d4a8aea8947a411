"""Effects of a split backward on a Megatron GPT on one rank: gradients, floating-point operations, memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.support.parity import named, one_process, stack

MODEL = "--num_layers 2 --hidden_size 128 --swiglu --normalization RMSNorm --position_embedding_type rope"


@dataclass
class Flops:
    """Operations of one micro-batch through the transformer layers."""

    forward: int
    backward: int
    input_grad: int
    weight_grad: int


def _layers(batch: int):
    """(decoder without embedding and head, an input that wants its gradient)."""
    chunk, _ = one_process(MODEL, "fp32")
    x = torch.randn(16, batch, 128, generator=torch.Generator().manual_seed(0))
    return chunk.decoder, x.requires_grad_()


def _count(run) -> tuple[int, object]:
    counter = FlopCounterMode(display=False)
    with counter:
        result = run()
    return counter.get_total_flops(), result


def count_flops() -> Flops:
    """F and Megatron's own backward, then F, I and W of the split."""
    from megaaccum.executor.wgrad import WeightGrads, install, put_aside

    decoder, x = _layers(batch=4)
    forward, y = _count(lambda: decoder(x, None, rotary_pos_emb=None))
    backward, _ = _count(lambda: y.sum().backward())
    install(decoder)
    again, y = _count(lambda: decoder(x, None, rotary_pos_emb=None))
    assert again == forward
    owed = WeightGrads()
    with put_aside(owed):
        input_grad, _ = _count(lambda: y.sum().backward())
    weight_grad, _ = _count(owed.compute)
    return Flops(forward, backward, input_grad, weight_grad)


def gradients(split: bool, recompute: bool, dtype: str) -> dict[str, torch.Tensor]:
    """Gradients of a whole GPT over two micro-batches, whose weight gradients come after both input gradients."""
    from megaaccum.executor.wgrad import WeightGrads, install, put_aside

    # Untied: embedding and head would add to one gradient in another order.
    flags = MODEL.replace("128", "32") + " --untie_embeddings_and_output_weights"
    flags += " --recompute_granularity full" if recompute else ""
    chunk, _ = one_process(flags, dtype)
    if split:
        install(chunk)
        install(chunk)
    owed = []
    for microbatch in range(2):
        batch = stack(range(2 * microbatch, 2 * microbatch + 2))
        loss = chunk(batch["tokens"], batch["position_ids"], None, labels=batch["labels"]).sum()
        if not split:
            loss.backward()
            continue
        owed.append(WeightGrads())
        with put_aside(owed[-1]):
            loss.backward()
    waiting = [name for name, param in named(chunk) if param.grad is None]
    if split:
        assert any("linear_fc1.weight" in name for name in waiting)
        assert not any("norm" in name for name in waiting)
    for each in owed:
        each.compute()
        assert len(each) == 0
    return {name: param.grad for name, param in named(chunk)}


def evaluation_and_frozen() -> tuple[bool, bool]:
    """Whether installed layers give the same without gradients, and leave frozen weights alone."""
    from megaaccum.executor.wgrad import install

    decoder, x = _layers(batch=1)
    with torch.no_grad():
        before = decoder(x, None, rotary_pos_emb=None)
        install(decoder)
        same = torch.equal(before, decoder(x, None, rotary_pos_emb=None))
    frozen = decoder.layers[0].mlp.linear_fc1.weight.requires_grad_(False)
    decoder(x, None, rotary_pos_emb=None).sum().backward()
    return same, frozen.grad is None and decoder.layers[0].mlp.linear_fc2.weight.grad is not None


def live_after_each_pass() -> list[int]:
    """Bytes that autograd saved of one micro-batch and that are still alive after F, after I, after W."""
    from torch.multiprocessing.reductions import StorageWeakRef

    from megaaccum.executor.wgrad import WeightGrads, install, put_aside

    decoder, x = _layers(batch=4)
    install(decoder)
    saved: dict[int, tuple[StorageWeakRef, int]] = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if not isinstance(tensor, torch.nn.Parameter) and storage.data_ptr() != x.untyped_storage().data_ptr():
            reference = StorageWeakRef(storage)
            saved[reference.cdata] = (reference, storage.nbytes())
        return tensor

    def alive() -> int:
        return sum(size for reference, size in saved.values() if not reference.expired())

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = decoder(x, None, rotary_pos_emb=None)
    sizes = [alive()]
    owed = WeightGrads()
    with put_aside(owed):
        y.sum().backward()
    del y
    sizes.append(alive())
    owed.compute()
    return [*sizes, alive()]


def refused() -> str:
    """The message where layers add their weight gradients themselves."""
    from megaaccum.errors import ConfigError
    from megaaccum.executor.wgrad import install

    decoder, _ = _layers(batch=1)
    decoder.config.gradient_accumulation_fusion = True
    try:
        install(decoder)
    except ConfigError as error:
        return str(error)
    return "nothing was refused"
