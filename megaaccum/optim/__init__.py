"""The optimizer and what moves with it.

| module | holds |
| --- | --- |
| `chosen` | the engine's optimizer |
| `adamw` | AdamW |
| `muon`, `soap`, `owners` | Muon and SOAP: their matrices, and who owns which |
| `by_pattern` | frozen parameters and factors by name |
| `lr_schedule` | learning rate, weight decay, parameter groups |
| `loss_scaler` | the loss scale of FP16 |
"""
