"""A precision's needs beside its dtype: the loss scale of FP16, values that are not finite, FP8."""
