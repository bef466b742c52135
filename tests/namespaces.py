"""Hosts of a network, on one machine: namespaces of Linux that share nothing but the file system.

`Network` starts them. Each has processes, a host name and a boot id of its own, and an interface; to Iris and torch it
is another machine. Ending a host kills all of its processes at once. That takes root, the tools `unshare` and `nsenter`
(Debian: util-linux), and `ip` (iproute2): `missing` says what is not there.
"""

import functools
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import uuid
from pathlib import Path

from preloaded import LIMIT_S, python

NAMESPACES = ["--net", "--pid", "--uts", "--ipc", "--mount", "--fork", "--mount-proc", "--kill-child=SIGKILL"]
SUBNET = "10.77.0"
BOOT_ID = "/proc/sys/kernel/random/boot_id"


@functools.cache
def missing():
    """What this machine lacks for that, in words; None if nothing."""
    tools = [tool for tool in ("ip", "unshare", "nsenter") if shutil.which(tool) is None]
    if tools:
        return f"no {', no '.join(tools)}: install iproute2 and util-linux"
    trials = {
        "namespaces, which root may make (in a container: CAP_SYS_ADMIN)": "true",
        "mounts within namespaces": f"mount --bind /dev/null {BOOT_ID} && mount --bind /dev/null /etc/hosts",
        "a pair of network interfaces (veth), which root may make (CAP_NET_ADMIN)": "ip link add type veth",
    }
    for what, trial in trials.items():
        done = subprocess.run(["unshare", *NAMESPACES, "sh", "-c", trial], capture_output=True, text=True)
        if done.returncode != 0:
            return f"no {what}: {done.stderr.strip()}"
    return None


class Host:
    """Processes of one namespace. ``run`` starts a command, and ``result`` waits for it."""

    def __init__(self, number, folder):
        self.name, self.address = f"host{number}", f"{SUBNET}.{number + 1}"
        self._process = subprocess.Popen(
            ["unshare", *NAMESPACES, sys.executable, __file__, self.name, folder],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._process.stdout.readline() == "here\n"
        started = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        self.pid = int(started.read_text())
        # The network outlives the processes, so that these end as processes do, and not as machines without power.
        self._network = os.open(f"/proc/{self.pid}/ns/net", os.O_RDONLY)

    def run(self, *arguments, **environment):
        """Start ``python *arguments`` there."""
        self._ask({"arguments": list(map(str, arguments)), "environment": environment})

    def stop(self):
        """End the command that was started last."""
        self._ask({})

    def result(self):
        """Exit status of the command that was started last, when it has ended, and what it has printed."""
        assert select.select([self._process.stdout], [], [], LIMIT_S)[0], "the command does not end"
        return json.loads(self._process.stdout.readline())

    def _ask(self, request):
        self._process.stdin.write(f"{json.dumps(request)}\n")
        self._process.stdin.flush()

    def configure(self, *arguments):
        """``ip *arguments``, with the interfaces of this host."""
        subprocess.run(["nsenter", f"--net=/proc/{self.pid}/ns/net", "ip", *arguments], check=True)

    def end(self):
        """All processes at once, by SIGKILL: that of the first process of a namespace ends all."""
        os.kill(self.pid, signal.SIGKILL)
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()

    def forget(self):
        """The network of a host that has ended, too."""
        os.close(self._network)


class Network:
    """Two hosts that reach each other. A host that has ended can be replaced (`start`)."""

    def __init__(self, folder):
        self._folder = folder
        # The first one's own name is that of loopback there, as on Debian and Ubuntu.
        for number, own in enumerate(["127.0.1.1", f"{SUBNET}.2"]):
            addresses = [f"{SUBNET}.1", f"{SUBNET}.2"]
            addresses[number] = own
            names = "".join(f"{address} host{host}\n" for host, address in enumerate(addresses))
            (folder / f"names_on_host{number}").write_text(f"127.0.0.1 localhost\n{names}")
        self.hosts = [Host(number, folder) for number in range(2)]
        self._connect()

    def _connect(self):
        first, second = self.hosts
        first.configure("link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", str(second.pid))
        for host in self.hosts:
            host.configure("address", "add", f"{host.address}/24", "dev", "eth0")
            host.configure("link", "set", "eth0", "up")

    def replace(self, number):
        """Another host in the place of one that has ended."""
        self.hosts[1 - number].configure("link", "delete", "eth0")  # both ends of the pair
        self.hosts[number].forget()
        self.hosts[number] = Host(number, self._folder)
        self._connect()

    def torchrun(self, ranks_each, *program, **environment):
        """Start a program on both hosts, as docs/several-hosts.md says."""
        launcher = ["-m", "torch.distributed.run", "--nnodes", len(self.hosts), "--nproc-per-node", ranks_each]
        launcher += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{self.hosts[0].name}:29500"]
        for host in self.hosts:
            host.run(*launcher, *program, **environment)

    def close(self):
        for host in self.hosts:
            host.end()
            host.forget()


# The first process of a host ------------------------------------------------------------------------------------------


def serve(name, folder):
    """Become a host of this name, and run what is asked for."""
    socket.sethostname(name)
    boot_id = Path(folder, name)
    boot_id.write_text(f"{uuid.uuid4()}\n")
    for own, place in (
        (boot_id, BOOT_ID),
        (Path(folder, f"names_on_{name}"), "/etc/hosts"),
        ("/dev/null", "/etc/resolv.conf"),
    ):
        subprocess.run(["mount", "--bind", own, place], check=True)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    print("here", flush=True)
    process = None
    # Where nobody asks any more, this process ends, and all others of the host with it.
    for line in sys.stdin:
        request = json.loads(line)
        if not request:
            process.kill()
            continue
        process = subprocess.Popen(
            [*python(), *request["arguments"]],
            env={**os.environ, **request["environment"]},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        threading.Thread(target=answer, args=(process,), daemon=True).start()


def answer(process):
    text = process.communicate()[0]
    print(json.dumps((process.returncode, text)), flush=True)


if __name__ == "__main__":
    serve(*sys.argv[1:])
