"""What test_launch.py launches in place of the program: a few lines each, without torch.

Its argument says, for each rank, what becomes of it, e.g. `kill,wait`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

from sparsebalance.training import position
from sparsebalance.training.stopping import StopRequest


def leave(text: str, lost: bool) -> None:
    record = {"time": time.time(), "text": text, "lost": lost}
    Path(os.environ[position.FOLDER], f"failure-{os.environ['RANK']}.json").write_text(json.dumps(record))


def main() -> int:
    fate = sys.argv[1].split(",")[int(os.environ["RANK"])]
    with StopRequest() as stop:
        position.here().enter("step 5, F3 of stage 1")
        if fate == "kill":
            time.sleep(0.3)  # later than one that waits for it may notice
            os.kill(os.getpid(), signal.SIGKILL)
        if fate == "raise":
            leave("RuntimeError: step 5: ValueError: no", lost=False)
            return 1
        if fate == "input":
            leave("the input is wrong", lost=False)
            return 2
        if fate == "wait":  # for a rank that does not come
            leave("step 5: waited 0.1 s for another rank", lost=True)
            return 1
        if fate == "hang":
            time.sleep(600)
        if fate == "train":
            Path(sys.argv[2], os.environ["RANK"]).touch()
            while not stop.requested:
                time.sleep(0.02)
        if fate == "deaf":
            Path(sys.argv[2], os.environ["RANK"]).touch()
            while True:
                time.sleep(0.02)
    return 0


if __name__ == "__main__":
    sys.exit(main())
