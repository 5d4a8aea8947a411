"""The program around the step: data, the training loop, its reports, formats of other programs, launching."""
