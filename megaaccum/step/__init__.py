"""One optimizer step: micro-batches in, one divisor, one verdict on all ranks, one commit.

| module | holds |
| --- | --- |
| `train_step` | the step, downwards: begin at `TrainStep.train` |
| `call_agreement`, `microbatches`, `short_batch` | what ranks agree on before they begin; the micro-batches |
| `loss`, `world_sums` | the divisor, and what loss functions returned; N, losses and reports over all ranks |
| `forward_step`, `flush` | the user's forward under a schedule, and who observes it |
| `seeds` | random states of each forward, by sample |
| `side_losses` | scales of balancing, z and multi-token-prediction losses |
| `grad_norm` | the norm, and clipping |
| `recovery`, `retry` | the verdict; the micro-batches once more, to find a bad one |
| `transaction`, `result` | what commits with the step, and what it returns |
| `speculation` | the step that updates before its verdict |
| `evaluation` | forwards alone |
| `chunk_config` | flags of the user's Megatron chunks that a step relies on |
"""
