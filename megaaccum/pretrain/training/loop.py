"""Pretraining: from a plan to a trained model."""

from __future__ import annotations

from dataclasses import replace

from megaaccum.config import Plan
from megaaccum.errors import MegaaccumError
from megaaccum.pretrain.training.training_run import Advisor, TrainingRun


def train(plan: Plan, advisor: Advisor) -> int:
    """Train `plan` on this rank; collective over the world. advisor: decides what `auto` leaves open. Returns 0 after
    the last step, or after the step in which a signal or a limit stopped the run."""
    run = TrainingRun(plan, advisor)
    engine = run.engine
    with run.open() as loader:
        run.begin(advisor)
        while engine.step < run.last_step:
            batch = engine.batch
            microbatches, upcoming, problem = run.read(batch.num_microbatches)
            try:
                with run.watchdog.step(engine.step + 1):
                    stop = run.is_to_stop()
                    result = engine.train_step(microbatches, stop=stop, problem=problem, upcoming=upcoming)
            except MegaaccumError as error:
                raise run.saver.save_before_raising(error) from error
            if result.advanced and run.is_at_exit():  # not after a skipped step that is to be retried
                result = replace(result, stop=True)
            if engine.step < run.last_step and not result.stop:
                engine.gather_ahead()
            if result.advanced:
                loader.commit(batch.global_batch_size)
            run.report(result, batch)
            run.evaluate(result)
            run.save(result)
            if result.stop and engine.step < run.last_step:
                run.outcome = run.why_stopped()
                break
    run.close()
    return 0
