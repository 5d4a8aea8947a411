"""Runs a schedule's table over Megatron chunks, in the calling convention of Megatron's schedules."""
