"""``kvpush doctor``: can this machine run kvpush? A line for each thing that it needs, and what to do if it fails.

torch and nixl are imported inside the checks: an installation where they are broken is what this command is for.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import kvpush

ROUND_TRIP_TIMEOUT_S = 15.0
OLDEST_PYTHON, NEWEST_PYTHON = (3, 11), (3, 14)
NIXL_VERSION = "1.5.1"
EXTRAS = {"rich": "cli", "transformers": "hf", "prometheus_client": "metrics", "matplotlib": "bench"}  # module: extra


@dataclass(frozen=True, slots=True)
class Finding:
    """One line. ``remedy`` says what to do where ``is_ok`` is false."""

    is_ok: bool
    subject: str
    detail: str
    remedy: str = ""

    def __str__(self) -> str:
        line = f"{'OK  ' if self.is_ok else 'FAIL'}  {self.subject:<16} {self.detail}"
        return line if self.is_ok or not self.remedy else f"{line}\n      {'':<16} -> {self.remedy}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``kvpush doctor``."""
    parser.add_argument(
        "--net-devices",
        default="lo",
        metavar="NAMES",
        help='UCX devices to test with, say "eth0" or "mlx5_0:1"; "" lets UCX choose (default: %(default)s)',
    )


def run(args: argparse.Namespace) -> int:
    """Print every finding. 0: all is well; 1: something failed."""
    config = kvpush.Config(net_devices=args.net_devices)
    print(f"kvpush {kvpush.__version__}")
    num_failed = 0
    for check in (_python, _system, _torch, _nixl, _environment, _network):
        num_failed += _print_all(check)
    if not num_failed:
        num_failed += _print_all(lambda: _backend(config))
    if not num_failed:
        num_failed += _print_all(lambda: _round_trip(config))
    for line in _extras():
        print(f"      {line}")
    print(
        "this machine can run kvpush" if not num_failed else "this machine cannot run kvpush: see the lines with FAIL"
    )
    return 1 if num_failed else 0


def _print_all(check: Callable[[], Iterator[Finding]]) -> int:
    """How many of its findings are failures."""
    num_failed = 0
    for finding in check():
        print(finding, flush=True)
        num_failed += not finding.is_ok
    return num_failed


def _python() -> Iterator[Finding]:
    is_known = OLDEST_PYTHON <= sys.version_info[:2] <= NEWEST_PYTHON
    oldest, newest = (".".join(map(str, version)) for version in (OLDEST_PYTHON, NEWEST_PYTHON))
    yield Finding(is_known, "python", platform.python_version(), f"use Python {oldest} to {newest}")


def _system() -> Iterator[Finding]:
    detail = f"{platform.system()} {platform.release()}, {platform.machine()}, {os.cpu_count()} CPUs"
    yield Finding(sys.platform == "linux", "system", detail, "NIXL and the event descriptors used here need Linux")


def _torch() -> Iterator[Finding]:
    try:
        import torch
    except Exception as exc:  # noqa: BLE001  # whatever a broken installation raises is the finding
        yield Finding(False, "torch", f"cannot be imported: {exc!r}", "reinstall torch; its CPU build is enough")
        return
    if torch.cuda.is_available():
        names = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
        yield Finding(True, "torch", f"{torch.__version__}, CUDA: {names}")
    else:
        yield Finding(True, "torch", f"{torch.__version__}, no CUDA device: caches in CPU memory only")


def _nixl() -> Iterator[Finding]:
    remedy = f"pip install nixl=={NIXL_VERSION}: kvpush relies on this version's metadata and failure behaviour"
    try:
        importlib.import_module("kvpush.nixl_transport")
        version = importlib.metadata.version("nixl")
    except Exception as exc:  # noqa: BLE001  # whatever a broken installation raises is the finding
        yield Finding(False, "nixl", f"cannot be imported: {exc!r}", remedy)
        return
    yield Finding(version == NIXL_VERSION, "nixl", version, remedy)
    for name in ("pyzmq", "msgspec", "numpy", "transitions"):
        yield Finding(True, name, importlib.metadata.version(name))


def _environment() -> Iterator[Finding]:
    """Variables of UCX win over what kvpush asks of it, so they are worth a look when something is odd."""
    names = sorted(name for name in os.environ if name.startswith("UCX_"))
    yield Finding(True, "UCX variables", ", ".join(f"{name}={os.environ[name]}" for name in names) or "none set")
    try:
        kvpush.Config.from_env()
    except kvpush.ConfigurationError as exc:
        yield Finding(False, "KVPUSH variables", str(exc), "correct it, or unset it")


def _network() -> Iterator[Finding]:
    interfaces = sorted(_interfaces())
    yield Finding(
        any(is_up for _, is_up in interfaces),
        "network",
        ", ".join(name if is_up else f"{name} (down)" for name, is_up in interfaces) or "no interface",
        "bring an interface up: ip link set lo up",
    )
    rdma = sorted(path.name for path in Path("/sys/class/infiniband").glob("*"))
    yield Finding(True, "RDMA devices", ", ".join(rdma) or "none: WRITEs go over TCP, or between processes by CMA")


def _interfaces() -> Iterator[tuple[str, bool]]:
    """Names, and whether they are up. Loopback's state is "unknown" while it is up."""
    for path in Path("/sys/class/net").glob("*"):
        try:
            yield path.name, (path / "operstate").read_text().strip() in ("up", "unknown")
        except OSError:
            continue  # no interface, as bonding_masters is not one, or gone meanwhile


def _backend(config: kvpush.Config) -> Iterator[Finding]:
    """NIXL makes an agent with the UCX backend and registers memory."""
    import torch

    from kvpush.layout import MemoryKind, MemoryRange
    from kvpush.nixl_transport import NixlTransport

    cache = torch.zeros(4096, dtype=torch.uint8)
    memory = MemoryRange(cache.data_ptr(), cache.nbytes, 0)
    started_s = time.monotonic()
    try:
        transport = NixlTransport(f"doctor-{uuid.uuid4().hex}", MemoryKind.dram, [memory], config)
    except kvpush.ConfigurationError as exc:
        remedy = "try --net-devices '' or another device of those above; UCX_LOG_LEVEL=debug says more"
        yield Finding(False, "UCX backend", str(exc), remedy)
        return
    try:
        num_bytes = len(transport.metadata())
    finally:
        transport.close()
    duration_ms = (time.monotonic() - started_s) * 1000
    detail = f"agent made in {duration_ms:.0f} ms, with {_devices(config)} and {num_bytes} bytes of metadata"
    yield Finding(True, "UCX backend", detail)


def _round_trip(config: kvpush.Config) -> Iterator[Finding]:
    """One block from a prefill to a decode engine, both in this process: the whole of kvpush over real NIXL."""
    import torch

    spec = kvpush.KVCacheSpec(dims="BKHND", model="doctor")
    source = {"layer": torch.randn(2, 2, 2, 16, 64)}
    target = {"layer": torch.zeros(2, 2, 2, 16, 64)}
    started_s = time.monotonic()
    with (
        kvpush.PrefillPusher("doctor-p", source, spec, config=config) as pusher,
        kvpush.DecodeReceiver("doctor-d", target, spec, config=config) as receiver,
    ):
        receiver.expect(
            "t", [1], source=pusher.address, source_engine_id="doctor-p", deadline_s=ROUND_TRIP_TIMEOUT_S / 2
        )
        pusher.push("t", [0])
        events = receiver.wait(ROUND_TRIP_TIMEOUT_S)
    duration_ms = (time.monotonic() - started_s) * 1000
    remedy = f"{_devices(config)} may not reach this host itself: try --net-devices lo"
    if not events:
        yield Finding(False, "round trip", f"nothing arrived within {ROUND_TRIP_TIMEOUT_S:g} s", remedy)
    elif isinstance(events[0], kvpush.BlocksReleased) or events[0].outcome != kvpush.Outcome.done:
        yield Finding(False, "round trip", events[0].reason, remedy)
    elif not torch.equal(source["layer"][0], target["layer"][1]) or target["layer"][0].any():
        yield Finding(False, "round trip", "other bytes arrived than were sent", "please report this as a bug")
    else:
        yield Finding(True, "round trip", f"one block arrived intact, engines made and closed in {duration_ms:.0f} ms")


def _devices(config: kvpush.Config) -> str:
    return config.net_devices or "devices that UCX chose"


def _extras() -> Iterator[str]:
    for module, extra in EXTRAS.items():
        if importlib.util.find_spec(module) is None:
            yield f"{module} is not installed (optional): pip install 'kvpush[{extra}]'"
