"""Runs a schedule's table over Megatron chunks, in the calling convention of Megatron's schedules.

| module | holds |
| --- | --- |
| `entry` | `get_forward_backward_func`, the door |
| `executor` | one flush, action by action: begin at `Flush.run` |
| `passes` | one micro-batch through one chunk |
| `wgrad` | weight gradients until their W |
| `blocks` | layers by blocks of columns and of a sequence: `reproducible: layout` over tp and cp |
| `p2p` | messages: `Mail.receive` waits, `PipelineChannels` connects |
| `hooks` | calls of the backend |
| `timeline` | a flush as a trace |
"""
