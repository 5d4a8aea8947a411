"""Runs a schedule's table over Megatron chunks, in the calling convention of Megatron's schedules.

`entry` is the door (`get_forward_backward_func`), `executor` runs a flush action by action, `passes` one micro-batch
through one chunk, `wgrad` keeps weight gradients until their W, `p2p` sends and receives, `hooks` calls the backend.
"""
