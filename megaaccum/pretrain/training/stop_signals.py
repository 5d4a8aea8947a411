"""Signals that end a run after its step."""

import signal


class StopSignals:
    """Remembers SIGINT, SIGTERM and a hang-up, unless `nohup` has that ignored, so that a run can finish its step, save
    and exit."""

    def __init__(self) -> None:
        self.received = False
        hangs_up = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
        for number in (signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hangs_up else [])):
            signal.signal(number, self._remember)

    def _remember(self, *_: object) -> None:
        self.received = True
