"""The model of a run: Megatron's GPT, the names of its parameters, their number, and its floating-point operations."""
