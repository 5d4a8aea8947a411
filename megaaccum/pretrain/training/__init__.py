"""The parts that `megaaccum train` adds to a step: the loop, the optimizer, the learning rate."""
