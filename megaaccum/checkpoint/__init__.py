"""Checkpoints: in pieces named after the whole model's parameters, in folders that appear whole or not at all.

`save_load` is the door, `pieces` says which stored elements a rank of another layout needs, `untrusted_reader` reads
them without running code, `folders` names, publishes and deletes, `resume` chooses, `whole` streams whole weights.
"""
