"""Pretrain Megatron's GPT on an indexed dataset, with evaluation and checkpoints; started again, it resumes.

megaaccum data build --input book.txt --output-prefix book --train-tokenizer --vocab-size 512
torchrun --nproc-per-node 4 examples/megatron_gpt.py book checkpoints
"""

import sys

import torch
from megaaccum import Plan, initialize  # before Megatron: without a GPU it installs CPU stand-ins for CUDA calls
from megatron.core import parallel_state as mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.tokenizers import MegatronTokenizer
from megatron.core.transformer import TransformerConfig

prefix, folder = sys.argv[1:] if len(sys.argv) == 3 else sys.exit(__doc__)
batch = dict(micro_batch_size=2, seq_length=64, global_batch_size=16)
learning = dict(lr=1e-2, min_lr=1e-3, clip_grad=1.0)
plan = Plan.of(layout=dict(pp=2), batch=batch, sharding=dict(zero_stage=3), optimizer=learning, train_iters=20)


def forward_step(data_iterator, model):
    batch = {name: tensor.cuda() for name, tensor in next(data_iterator).items()}

    def loss_func(losses):
        return (losses * batch["loss_mask"]).sum(), batch["loss_mask"].sum(), {}

    return model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"]), loss_func


def microbatches(dataset, step):  # this data-parallel rank's, of the 16 samples of a step
    dp = engine.groups.dp
    starts = range(16 * step + 2 * dp.rank(), 16 * (step + 1), 2 * dp.size())
    return [torch.utils.data.default_collate([dataset[start], dataset[start + 1]]) for start in starts]


torch.distributed.init_process_group()
mpu.initialize_model_parallel(pipeline_model_parallel_size=2)
model_parallel_cuda_manual_seed(1234)
size = dict(num_layers=4, hidden_size=64, num_attention_heads=4)
config = TransformerConfig(**size, pipeline_model_parallel_size=2, pipeline_dtype=torch.float32)
ends = dict(pre_process=mpu.is_pipeline_first_stage(), post_process=mpu.is_pipeline_last_stage())
model = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=512, max_sequence_length=64, **ends)
engine = initialize(plan, [model], forward_step_func=forward_step)

tokenizer = MegatronTokenizer.from_pretrained(metadata_path={"library": "null-text"}, vocab_size=512)
masks = dict(reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False, create_attention_mask=False)
data = GPTDatasetConfig(1234, 64, blend=([prefix], None), split="90,10,0", tokenizer=tokenizer, **masks)
train, valid, _ = BlendedMegatronDatasetBuilder(GPTDataset, [20 * 16, 16, 0], lambda: True, data).build()

engine.load(folder)  # False, and nothing changes, if the folder has no checkpoint
while engine.step < 20:
    result = engine.train_step(microbatches(train, engine.step))
    engine.print(f"step {result.step}: loss {result.loss:.6f}, gradient norm {result.grad_norm:.6f}")
    if engine.step % 10 == 0:
        engine.print(f"validation loss {engine.evaluate(microbatches(valid, 0))[0]:.6f}, saved {engine.save(folder)}")
