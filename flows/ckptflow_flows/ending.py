"""A run that is told to end does so in time, whether or not the Prefect server takes its last words.

Prefect's client tries each request for a minute, in each thread that has one, and waits for all of them; Slurm and
Kubernetes kill after 30 seconds. What such an end loses is what ``kill -9`` loses: nothing that is done.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

from prefect.context import SettingsContext, get_settings_context
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES

#: From SIGTERM to the end of the process, at most.
GRACE_SECONDS = 15.0
_LAST_WORDS = b"ckptflow: interrupted, without waiting for the Prefect server; run it again to go on where it stopped\n"


def end_in_time(seconds: float = GRACE_SECONDS) -> None:
    """Give this process so long from a SIGTERM on; to be called in the flow.

    Prefect has a handler of its own as long as the run lasts, and takes this one away together with it.
    """
    ends_run = signal.getsignal(signal.SIGTERM)
    if not callable(ends_run) or threading.current_thread() is not threading.main_thread():
        return

    def handle(number: int, frame: FrameType | None) -> None:
        timer = threading.Timer(seconds, _end)
        timer.daemon = True
        timer.start()
        ends_run(number, frame)

    signal.signal(signal.SIGTERM, handle)


def ask_briefly() -> None:
    """Let what is still said to the server in this thread be tried twice, and not for a minute."""
    context = get_settings_context()
    settings = context.settings.copy_with_update(updates={PREFECT_CLIENT_MAX_RETRIES: 1})
    SettingsContext(profile=context.profile, settings=settings).__enter__()


def _end() -> None:
    os.write(2, _LAST_WORDS)
    os._exit(130)
