"""One optimizer step: micro-batches in, one divisor, one verdict on all ranks, one commit.

| module | holds |
| --- | --- |
| `train_step` | the step, downwards: begin at `TrainStep.train` |
| `loss` | the divisor, and what loss functions returned; `world_sums`: N, losses and reports over all ranks |
| `agreement` | what ranks agree on before they begin |
| `forward_step`, `flush` | the user's forward under a schedule, and who observes it; `seeds`: its random states |
| `side_losses` | scales of balancing, z and multi-token-prediction losses |
| `grad_norm` | the norm, clipping; `recovery`: the verdict, with `retry` to find a bad micro-batch |
| `transaction` | what commits with the step |
| `speculation` | the step that updates before its verdict |
"""
