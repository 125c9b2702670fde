"""A process as a pod would run it: user 65532, read-only root, no capabilities, no HOME of ours.

The root file system is made read-only in a mount namespace of the process's own (Linux, as
root), so nothing outside it changes.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.image.dockerfile import CACHE, VENV, environment
from tests.image.dockerfile import command as command_of

USER = "65532"
# The interpreter may lie in a folder that only its owner can enter: it is shown again there.
ENTER = """
set -eu
prefix=$1 work=$2 user=$3 path=$PATH
shift 3
PATH=/usr/sbin:/usr/bin:/sbin:/bin
as_user="setpriv --reuid $user --regid $user --clear-groups --bounding-set=-all --no-new-privs"
mount --make-rprivate /
if ! $as_user test -x "$prefix/bin"; then
  mount --bind "$prefix" "$work/python"
  top=/$(echo "$prefix" | cut -d/ -f2)
  mount -t tmpfs -o mode=755 tmpfs "$top"
  mkdir -p "$prefix"
  mount --bind "$work/python" "$prefix"
fi
for folder in cache tmp; do mount -t tmpfs -o mode=1777 tmpfs "$work/$folder"; done
for mounted in "$(findmnt -n -o TARGET --target "$work")" /; do
  mount -o remount,bind,ro "$mounted"
done
cd "$work/tmp"
exec $as_user env PATH="$path" "$@"
"""


@dataclass(frozen=True)
class Place:
    """Where an installed environment lies, and what it may write to; readable by all."""

    venv: Path
    work: Path

    def __post_init__(self) -> None:
        for folder in ("python", "cache", "tmp"):
            (self.work / folder).mkdir(parents=True, exist_ok=True)

    def here(self, text: str) -> str:
        """A path of the image as it is here."""
        return text.replace(VENV, str(self.venv)).replace(CACHE, str(self.work / "cache"))

    def environment(self, stage: str) -> dict[str, str]:
        """The image's variables; no program but the environment's own is on the path."""
        found = {name: self.here(value) for name, value in environment(stage).items()}
        path = found["PATH"].removesuffix(":$PATH")
        return found | {"PATH": path, "TMPDIR": str(self.work / "tmp"), "GRPC_VERBOSITY": "NONE"}

    def contained(self, command: list[str]) -> list[str]:
        """The command that runs this one as a pod would."""
        program = str(self.venv / "bin" / command[0])
        prefix = os.path.realpath(sys.base_prefix)
        enter = ["/bin/bash", "-c", ENTER, "enter", prefix, str(self.work), USER]
        unshare = shutil.which("unshare") or "unshare"
        return [unshare, "--mount", *enter, program, *map(self.here, command[1:])]

    def run(
        self, command: list[str], env: Mapping[str, str], seconds: float = 60
    ) -> subprocess.CompletedProcess[str]:
        """Run it contained to its end."""
        return subprocess.run(
            self.contained(command),
            env=env,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )

    @contextlib.contextmanager
    def service(
        self, stage: str, *args: str, command: Sequence[str] = (), seconds: float = 60
    ) -> Iterator[str]:
        """The image of a stage as a container on loopback; yields its address once it serves.

        command: instead of the image's own. Raises AssertionError if it doesn't serve within
        the seconds, or doesn't end well on SIGTERM.
        """
        words = [*(command or command_of(stage)), "--host=127.0.0.1", "--port=0", *args]
        with subprocess.Popen(
            self.contained(words), env=self.environment(stage), stdout=subprocess.PIPE, text=True
        ) as process:
            late = threading.Timer(seconds, process.kill)
            late.start()
            try:
                assert process.stdout is not None
                lines = (line for line in process.stdout if " serves on " in line)
                found = re.search(r" serves on (\S+)", next(lines, ""))
                late.cancel()
                assert found, f"{words} ended with {process.wait(5)} before it served"
                yield found[1]
                process.send_signal(signal.SIGTERM)
                assert process.wait(60) == 0
            finally:
                late.cancel()
                process.kill()


def why_not_contained() -> str:
    """Empty if this machine lets us make mount namespaces."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "only root on Linux can make a file system read-only for one process"
    with contextlib.suppress(OSError):
        probe = ["unshare", "--mount", "mount", "-o", "remount,bind,ro", "/"]
        done = subprocess.run(probe, capture_output=True, check=False)
        if done.returncode == 0:
            return ""
    return "mount namespaces are not allowed here"
