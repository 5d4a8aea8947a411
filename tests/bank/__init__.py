"""The bank of mistakes: accumulation errors that were reported, each made on purpose and caught by a wrong number.

`make bank` makes all of them (`python -m pytest tests/bank`), `tests/multiproc/test_mistakes.py` a selection, and
`python -m benchmarks verify` also looks for their places and writes the table of the documentation.

| module | holds |
| --- | --- |
| `mistake` | an entry, and the means to make one |
| `divisor`, `reduction`, `norm`, `side_losses`, `pipeline`, `optimizer`, `data` | the entries, by what they get wrong |
| `entries` | all of them; imports what they replace, and so every library |
| `cases`, `models` | the healthy cases in which they are made |
| `on_ranks` | a mistake made around a verification's steps |
| `outcomes` | whether a mistake is caught, and whether its place is found |
"""
