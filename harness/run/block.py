"""The timed processes of a block (one task, one batch size, one round), which are alive together and take turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

from harness.environments.executor import Venv
from harness.environments.processors import quietest
from harness.environments.turns import Seat
from harness.plan.e2e import Job, Options
from harness.plan.registry import Contestant
from harness.run.progress import Progress
from harness.run.session import ENDS_THE_RUN, Moment, Session, check_disk, in_turns, unforeseen
from harness.run.side_by_side import side_by_side
from harness.store.folder import MOST_ATTEMPTS
from harness.store.record import Record
from harness.worker.request import Request
from harness.worker.result import Result

Run = Session[Options, Contestant, Job, Request]


def records(run: Run, jobs: Sequence[Job], slots: int, progress: Progress) -> dict[str, Record]:
    """Measure the processes of ``jobs``, contestants of one block, and return their records by the job's name. So many
    ``slots`` of them start, end and are compared at once.

    A job without a process (its gate failed, say), or one during which the run was killed again and again, has none
    here.
    """
    started = Moment()
    with ExitStack() as stack:
        alive = [
            job
            for job in jobs
            if stack.enter_context(run.folder.attempt(job.name)) < MOST_ATTEMPTS and run.refusal(job) is None
        ]
        if not alive:
            return {}
        for job in alive:
            run.check_unchanged(job.contestant.name)
        requests = {job.name: run.request(job) for job in alive}
        first = alive[0]
        where = f"{first.cell.task} at {first.cell.batch_size}"
        progress.doing(f"{where}, round {first.round + 1}: {len(alive)} contestants take turns")
        if first.round == 0:  # else nothing is said for as long as all of them take to start
            progress.log(f"{where}: {len(alive)} contestants start, and then take turns")
        processes = {job.name: _process(run, job, requests[job.name], progress) for job in alive}
        with quietest(run.threads) as places:
            found = in_turns(
                processes, f"{run.options.seed} {where} {first.round}", where, progress.log, places[:slots]
            )

        def record_of(job: Job, progress: Progress) -> Record:
            result, load = found[job.name]
            check_disk(result, run.folder, job.cell.name)
            try:
                return run.finished(job, requests[job.name], result, started, load, progress.log)
            except ENDS_THE_RUN:
                raise
            except Exception as error:
                return run.unmeasured(job, unforeseen(error), started)

        # What is compared once they have ended has no clock.
        made = by_name(record_of, alive, slots, progress)
        # Their time is the block's, which the records of all of them together took.
        share = started.seconds / len(made)
        return {name: record.model_copy(update={"wall_seconds": share}) for name, record in made.items()}


def by_name(
    make: Callable[[Job, Progress], Record], jobs: Sequence[Job], slots: int, progress: Progress
) -> dict[str, Record]:
    """Return what is made of each of the ``jobs``, so many ``slots`` at once, by the job's name."""
    made = side_by_side([partial(make, job, progress) for job in jobs], slots, ENDS_THE_RUN)
    return {job.name: record for job, record in zip(jobs, made, strict=True)}


def _process(run: Run, job: Job, request: Request, progress: Progress) -> Callable[[Seat], Result]:
    executor = run.executors[job.contestant.name]
    assert isinstance(executor, Venv)

    def process(seat: Seat) -> Result:
        try:
            return executor.run(request, run.limits, progress.event, seat)
        except ENDS_THE_RUN:
            raise
        except Exception as error:  # what one leaves ends nobody else's turns
            return unforeseen(error)

    return process
