"""Two hosts on one machine: network namespaces joined by a virtual cable, torchrun across them, 50 steps, compared.

    python bench/two_hosts.py            # needs root and `ip` (Debian: iproute2)

Each host sees its own network alone; the ranks meet by torchrun's c10d rendezvous over TCP and add up over gloo. For DDP
and for FSDP2 every figure of the run is compared with that of a single process. Exit code 1 where one differs by more
than the tolerance of tests/system/test_ranks.py, 3 where the machine allows no network namespaces.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from common import ROOT, write_record

from andrea.training.records.run_folder import read_lines

NO_NAMESPACES = 3
TOLERANCE = 1e-5
TIMINGS = ("seconds", "tokens_per_second", "memory", "checkpoint")
TRAINING = [
    "model.d_model=32", "model.n_layer=2", "model.n_head=2", "model.d_mlp=64", "model.sequence_length=32", "tokenizer=byte",
    "logger=none", "compile=off", "threads=1", "precision=fp32", "train.steps=50", "train.tokens_per_step=320",
    "train.micro_batch=2", "train.log_every=1", "train.eval_every=10", "train.save_every=25", "train.sample_tokens=8",
]  # fmt: skip


class NoNamespaces(Exception):
    """This machine, or this user, may make no network namespaces."""


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[tuple[str, str], tuple[str, str]]]:
    """((namespace, address), (namespace, address)), gone at the end."""
    names = [f"andrea-{os.getpid()}-{host}" for host in "ab"]
    addresses = ["10.77.0.1", "10.77.0.2"]
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", "cable", "netns", names[0], "type", "veth", "peer", "name", "cable", "netns", names[1])
        for name, address in zip(names, addresses, strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", "cable")
            ip("-n", name, "link", "set", "cable", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield tuple(zip(names, addresses, strict=True))
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], stderr=subprocess.DEVNULL)


def ip(*words: str) -> None:
    try:
        subprocess.run(["ip", *words], check=True, capture_output=True, text=True)
    except FileNotFoundError:
        raise NoNamespaces("no `ip` on this machine (Debian: apt-get install iproute2)") from None
    except subprocess.CalledProcessError as error:
        raise NoNamespaces(f"ip {' '.join(words)}: {error.stderr.strip()}") from None


def train_on_two_hosts(words: list[str], ranks_each: int = 1) -> list[subprocess.CompletedProcess]:
    """train.py on both hosts at once, `ranks_each` ranks on each; what each host's torchrun printed."""
    with two_hosts() as hosts:
        processes = []
        for number, (name, address) in enumerate(hosts):
            torchrun = [
                "ip", "netns", "exec", name, sys.executable, "-m", "torch.distributed.run", "--nnodes=2",
                f"--nproc-per-node={ranks_each}", "--rdzv-backend=c10d", f"--rdzv-endpoint={hosts[0][1]}:29400",
                "--rdzv-id=two-hosts", f"--local-addr={address}", f"--rdzv-conf=is_host={number == 0},join_timeout=60",
            ]  # fmt: skip
            environment = os.environ | {"GLOO_SOCKET_IFNAME": "cable"}
            command = [*torchrun, str(ROOT / "train.py"), *words]
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            processes.append(subprocess.Popen(command, env=environment, **pipes))
        return [
            subprocess.CompletedProcess(process.args, process.wait(), out)
            for process in processes
            for out in [process.communicate(timeout=300)[0]]
        ]


def largest_difference(run: Path, other: Path) -> float:
    """Over all figures of all records but timings: |a - b| / max(1, |b|); infinite where they are not of one shape."""
    ours, theirs = read_lines(run / "metrics.jsonl"), read_lines(other / "metrics.jsonl")
    if [record.keys() for record in ours] != [record.keys() for record in theirs]:
        return float("inf")
    pairs = [
        (mine[key], its[key])
        for mine, its in zip(ours, theirs, strict=True)
        for key in mine
        if isinstance(mine[key], (int, float)) and not any(word in key for word in TIMINGS)
    ]
    return max(abs(mine - its) / max(1, abs(its)) for mine, its in pairs)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=ROOT / "bench" / "results" / "two-hosts.json")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        words = [*TRAINING, "data=text", f"data.path={ROOT / 'andrea' / 'text'}", f"runs_dir={place}/runs"]
        words.append(f"data_dir={place}/data")
        single = [sys.executable, str(ROOT / "train.py"), *words, "name=one"]
        subprocess.run(single, check=True, stdout=subprocess.DEVNULL)
        rows = []
        for kind, ranks_each in (("ddp", 1), ("fsdp", 1), ("fsdp", 2)):
            name = f"{kind}-{2 * ranks_each}"
            try:
                ended = train_on_two_hosts([*words, f"parallel={kind}", f"name={name}"], ranks_each)
            except NoNamespaces as error:
                print(f"skipped: {error}")
                return NO_NAMESPACES
            if any(host.returncode for host in ended):
                print("\n".join(host.stdout for host in ended))
                return 1
            difference = largest_difference(Path(place) / "runs" / name, Path(place) / "runs" / "one")
            rows.append({"parallel": kind, "hosts": 2, "ranks": 2 * ranks_each, "largest_difference": difference})
            print(f"{kind:>5} on 2 hosts, {2 * ranks_each} ranks: largest difference {difference:.1e}", flush=True)
    write_record(chosen.output, "two-hosts", "cpu", {"steps": 50, "tolerance": TOLERANCE, "rows": rows})
    return int(any(row["largest_difference"] > TOLERANCE for row in rows))


if __name__ == "__main__":
    sys.exit(main())
