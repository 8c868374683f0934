"""A clock for runs of `bench` on the CPU."""

from bench.timing import Clock, Timing


def every_call_takes(us: float) -> Clock:
    """A clock that runs what is timed once, and says that each call took so long."""

    def in_turn(calls, flush, protocol):
        for call in calls.values():
            call()
        return dict.fromkeys(calls, Timing(us, us - 1, us + 1, 1))

    return Clock(in_turn, lambda call, warmup: call, lambda: None)
