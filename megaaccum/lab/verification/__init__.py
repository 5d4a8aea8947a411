"""Proof on a user's model, data and layout that the accumulated step is exactly the step on the full global batch.

| module | holds |
| --- | --- |
| `case` | a model, a layout and data, small enough to be pickled to ranks |
| `reference` | one process, the full global batch, float64 |
| `observe` | the accumulated step on a rank of a layout |
| `compare` | every number of both, and the error that rounding explains |
| `verdict` | pass, fail, or the reason why nothing can be verified |
| `on_ranks` | what ranks run |
| `user_model` | a model that a user wrote |
| `axes`, `relations`, `localise` | the place at which a wrong step goes wrong |
| `first_samples` | the first samples of a configuration's data |
| `shrink` | a configuration as a case that fits on one machine |
| `borders` | what crosses the borders of stages |
| `launched` | ranks that a launcher started |
| `at_start` | two splits of a run's first step, on the run's ranks |
| `subject`, `records`, `report` | model and data of a case; its numbers; the verdict as text, JSON, picture |
| `whole_matrices` | Muon and SOAP on whole matrices |
| `param_groups` | learning rate and decay of each master in one process |
"""
