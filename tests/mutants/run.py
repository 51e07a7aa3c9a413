"""Try every mutation of the modules that decide, and see whether a test notices. ``make mutants``

    python tests/mutants/run.py                          # everything: hours on two cores
    python tests/mutants/run.py --sample 400 --seed 7    # a random part, the same for the same seed
    python tests/mutants/run.py --module registry --again survived --stateful
    python tests/mutants/run.py --again survived --simulated

How it works. One process imports what is slow to import (torch, pytest, hypothesis) and forks a child for every
mutation. The child imports kvpush with an import hook that compiles the mutated tree in place of the file: nothing on
disk is changed, so several can run at once beside everything else. It then runs, with ``-x``, the tests that reach the
mutated line, file by file, the quickest of a file first, and the first seeds of the simulation before the slow files;
which test reaches which line is traced once and kept. A mutation of a line that runs at import is tried on all tests of
its module. A child that does not end in time is killed by its id, and that counts as noticed: a loop
that never ends is a difference.

Results are kept in ``build/mutants`` as they come, so a run that is broken off goes on where it was. A mutation is
tried again when the function around it changes; what became of it through other functions and better tests, ``--again``
tells, or a run without that folder. ``survivors.toml`` explains the mutations that cannot be noticed. The exit code is
1 when another one survived.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import random
import select
import signal
import sys
import time
import tomllib
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any

from mutations import Mutation, mutations_of

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "kvpush"
STATE = ROOT / "build" / "mutants"
EXPLAINED = Path(__file__).with_name("survivors.toml")

MODULES = (
    "lifecycle",
    "registry",
    "prefill",
    "decode",
    "plan",
    "blocks",
    "parallel",
    "terms",
    "arrivals",
    "namesakes",
    "pushes",
    "receives",
    "needs",
    "rarely",
    "registrations",
    "endings",
    "writes",
    "lines",
    "links",
    "chunks",
    "prefill_effects",
    "tombstones",
    "timers",
)
# what decides about these modules without threads that wait and without sockets: a mutation that hangs there costs much
QUICK = ("tests/core", "tests/unit", "tests/threads", "tests/exhaustive", "tests/repo/test_statecharts.py")
NOT_QUICK = ("test_cli.py", "test_bench.py", "test_demo_model.py", "test_held_lock.py", "test_deeper.py")
STATEFUL = ("tests/stateful",)

SLOW_FILE_S = 5.0  # traced; such a file comes after the simulation
TEST_TIMEOUT_S = 8.0  # of processor time; the slowest of them takes two
STATEFUL_TIMEOUT_S = 120.0
SEEDS = 150  # of the simulation; make test runs 500 of them
SEEDS_PER_BATCH = 10
BATCH_TIMEOUT_S = 30.0  # of processor time; a batch takes half a second
CHILD_TIMEOUT_S = 600.0
WAITING_S, WAITING_CPU_S = 30.0, 1.0  # a child that used less processor time than that in such a time only waits
TRACE_TIMEOUT_S = 1800.0

PASSED = (0, 5)  # of pytest's exit codes: 5 says that no test was left to run

REWRITE = "pytest.PytestAssertRewriteWarning"  # hypothesis was imported before pytest asked for it

Covered = dict[str, tuple[float, set[tuple[str, int]]]]  # node id -> seconds, (module, line)


# --- in a child ------------------------------------------------------------------------------------------------------


class MutatedImport(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Gives ``kvpush.<module>`` the mutated code, and every tool that reads its file the file as it is."""

    def __init__(self, module: str, code: CodeType) -> None:
        self.name = f"kvpush.{module}"
        self.code = code

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.name:
            return None
        return importlib.util.spec_from_file_location(fullname, self.code.co_filename, loader=self)

    def exec_module(self, module: ModuleType) -> None:
        exec(self.code, module.__dict__)


class Selection:
    """Runs the wanted tests only, in the order wanted, and remembers the first that fails."""

    def __init__(self, wanted: Iterable[str] | None, limit_s: float) -> None:
        self._place = None if wanted is None else {node_id: place for place, node_id in enumerate(wanted)}
        self._limit_s = limit_s
        self.failed = ""

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        end_after(self._limit_s)

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        place = self._place
        if place is not None:
            items[:] = sorted((i for i in items if i.nodeid in place), key=lambda i: place[i.nodeid])

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and not self.failed:
            self.failed = report.nodeid

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed and not self.failed:
            self.failed = f"{report.nodeid} (not collected)"


def end_after(limit_s: float) -> None:
    """Of this process's own processor time from now on: a busy machine is not to blame."""
    signal.signal(signal.SIGPROF, lambda *_: os._exit(0))  # nothing is answered: it did not end in time
    signal.setitimer(signal.ITIMER_PROF, limit_s)


class Tracer:
    """Which lines of the mutated modules each test runs."""

    def __init__(self) -> None:
        self.covered: Covered = {}
        self._modules = {str(PACKAGE / f"{module}.py"): module for module in MODULES}
        self._lines: set[tuple[str, int]] = set()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._lines, self._start_s = set(), time.perf_counter()
        sys.settrace(self._call)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        sys.settrace(None)
        self.covered[nodeid] = (time.perf_counter() - self._start_s, self._lines)

    def _call(self, frame: FrameType, event: str, arg: object) -> Any:
        module = self._modules.get(frame.f_code.co_filename)
        if module is None:
            return None
        lines = self._lines

        def line(frame: FrameType, event: str, arg: object) -> Any:
            lines.add((module, frame.f_lineno))
            return line

        return line(frame, event, arg)


def run_pytest(paths: Iterable[str], plugins: Sequence[object]) -> int:
    import pytest

    sys.path.insert(0, str(ROOT))
    os.environ["HYPOTHESIS_PROFILE"] = "ci"  # the same inputs for every mutation
    options = [
        "-x",
        "-q",
        "--no-header",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:faulthandler",
        "-o",
        "addopts=",
        "-W",
        f"ignore::{REWRITE}",
    ]
    return int(pytest.main([*options, *paths], plugins=list(plugins)))


def in_child(task: Any) -> tuple[int, int]:
    """Fork, run ``task`` there, and let what it returns be read as JSON: (process id, descriptor)."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writer)
        return pid, reader
    try:
        os.close(reader)
        os.setsid()
        os.chdir(ROOT)
        log = os.open(STATE / f"child-{os.getpid()}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        with os.fdopen(writer, "w") as out:
            json.dump(task(), out)
        (STATE / f"child-{os.getpid()}.log").unlink()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(0)


def trace() -> dict[str, Any]:
    tracer = Tracer()
    code = run_pytest(quick_paths(), [tracer])
    rows = {node: (seconds, sorted(lines)) for node, (seconds, lines) in tracer.covered.items()}
    return {"code": code, "covered": rows}


def attempt(mutation: Mutation, args: argparse.Namespace, tests: Mapping[str, float]) -> dict[str, Any]:
    """What notices one mutation, if anything does."""
    import ast

    path = PACKAGE / f"{mutation.module}.py"
    code = compile(mutation.applied(ast.parse(path.read_text())), str(path), "exec")
    sys.meta_path.insert(0, MutatedImport(mutation.module, code))
    if args.stateful or args.tests:
        return tested(STATEFUL if args.stateful else args.tests, None, STATEFUL_TIMEOUT_S)
    if args.simulated:
        return simulated()
    quick, slow = by_cost(tests)
    for stage in (lambda: tested(quick, tests, TEST_TIMEOUT_S), simulated, lambda: tested(slow, tests, TEST_TIMEOUT_S)):
        answer = stage()
        if answer["code"] not in PASSED:
            break
    return answer


def by_cost(tests: Mapping[str, float]) -> tuple[list[str], list[str]]:
    """The files of these tests, quick and slow ones. The one that reaches the mutation most often first: most mutations
    end there, and no other file is even imported."""
    files = Counter(node.split("::")[0] for node in tests)
    seconds: Counter[str] = Counter()
    for node, cost_s in tests.items():
        seconds[node.split("::")[0]] += cost_s  # type: ignore[assignment]  # a sum of floats
    ordered = [file for file, _ in files.most_common()]
    slow = [file for file in ordered if seconds[file] > SLOW_FILE_S]
    return [file for file in ordered if file not in slow], slow


def tested(files: Iterable[str], wanted: Iterable[str] | None, limit_s: float) -> dict[str, Any]:
    """By the tests of these files, or the wanted ones of them."""
    for file in files:
        selection = Selection(wanted, limit_s)
        code = run_pytest([file], [selection])
        if code not in PASSED:
            return {"code": code, "failed": selection.failed}
    return {"code": PASSED[0], "failed": ""}


def simulated() -> dict[str, Any]:
    """By the simulation."""
    sys.path.insert(0, str(ROOT))
    from kvpush.testing.campaign import run_batch

    for start in range(0, SEEDS, SEEDS_PER_BATCH):
        end_after(BATCH_TIMEOUT_S)
        try:
            failures = run_batch(range(start, start + SEEDS_PER_BATCH)).failures
        except Exception as exc:  # noqa: BLE001  # whatever a mutation does to the world is a difference
            return {"code": 1, "failed": f"the simulation, seeds from {start} on: {exc!r}"}
        for seed, failure in sorted(failures.items()):
            return {"code": 1, "failed": f"the simulation, seed {seed}: {failure.checker}"}
    return {"code": PASSED[0], "failed": ""}


# --- in the parent ---------------------------------------------------------------------------------------------------


def quick_paths() -> list[str]:
    found: list[str] = []
    for name in QUICK:
        path = ROOT / name
        files = [path] if path.is_file() else sorted(path.glob("test_*.py")) if path.is_dir() else []
        found += [str(file.relative_to(ROOT)) for file in files if file.name not in NOT_QUICK]
    return found


def digest(*paths: Path) -> str:
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()[:16]


def read_child(pid: int, reader: int, deadline_s: float) -> dict[str, Any] | None:
    """What the child answered; ``None`` when it had to be killed or died."""
    chunks: list[bytes] = []
    with os.fdopen(reader, "rb", buffering=0) as pipe:
        while True:
            ready, _, _ = select.select([pipe], [], [], max(0.0, deadline_s - time.monotonic()))
            if not ready:
                os.kill(pid, signal.SIGKILL)
                break
            chunk = pipe.read(65536)
            if not chunk:
                break
            chunks.append(chunk)
    os.waitpid(pid, 0)
    text = b"".join(chunks)
    return json.loads(text) if text else None


def coverage() -> Covered:
    """Traced once for each state of the sources and tests."""
    sources = [PACKAGE / f"{module}.py" for module in MODULES]
    key = digest(*sources, *(ROOT / path for path in quick_paths()))
    kept = STATE / f"coverage-{key}.json"
    if not kept.exists():
        print("tracing which test runs which line ...", flush=True)
        answer = read_child(*in_child(trace), time.monotonic() + TRACE_TIMEOUT_S)
        if answer is None or answer["code"]:
            sys.exit(f"the tests do not pass on the code as it is: {answer and answer['code']}; see {STATE}")
        kept.write_text(json.dumps(answer["covered"]))
    return {
        node: (seconds, {(module, line) for module, line in lines})
        for node, (seconds, lines) in json.loads(kept.read_text()).items()
    }


def tests_for(mutation: Mutation, covered: Covered, import_lines: set[tuple[str, int]]) -> dict[str, float]:
    """The tests that reach the mutated line and what each costs in seconds, quickest first."""
    here = (mutation.module, mutation.line)
    if here in import_lines or not any(here in lines for _, lines in covered.values()):  # or called by what is
        chosen = {node: cost for node, (cost, lines) in covered.items() if any(m == mutation.module for m, _ in lines)}
        chosen |= {node: cost for node, (cost, _) in covered.items() if "test_statecharts" in node}
    else:
        chosen = {node: cost for node, (cost, lines) in covered.items() if here in lines}
    return dict(sorted(chosen.items(), key=lambda item: (item[1], item[0])))


def lines_at_import() -> set[tuple[str, int]]:
    """Lines outside of functions: they run when a module is imported, before any test."""
    import ast

    found: set[tuple[str, int]] = set()
    for module in MODULES:
        tree = ast.parse((PACKAGE / f"{module}.py").read_text())
        inside = {
            line
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef)
            for line in range(node.body[0].lineno, (node.end_lineno or 0) + 1)
        }
        everything = range(1, max((node.end_lineno or 0) for node in tree.body) + 1)
        found |= {(module, line) for line in everything if line not in inside}
    return found


def spread(mutations: list[Mutation], covered: Covered) -> list[Mutation]:
    """A statement that spans lines is traced at one of them: move a mutation to the nearest line above that runs."""
    run = {line for _, lines in covered.values() for line in lines}
    at_import = lines_at_import()
    moved = []
    for mutation in mutations:
        line = mutation.line
        while line > 1 and (mutation.module, line) not in run and (mutation.module, line) not in at_import:
            line -= 1
        is_far = (mutation.module, line) in at_import and (mutation.module, mutation.line) not in at_import
        moved.append(mutation if is_far else _at(mutation, line))
    return moved


def _at(mutation: Mutation, line: int) -> Mutation:
    fields = {name: getattr(mutation, name) for name in mutation.__slots__}
    return Mutation(**(fields | {"line": line}))


@dataclass
class Results:
    """What is known so far, one line of JSON a mutation."""

    path: Path
    known: dict[str, dict[str, Any]]

    @classmethod
    def load(cls, there_are: Iterable[Mutation]) -> Results:
        path = STATE / "results.jsonl"
        sources = {mutation.name: mutation.source for mutation in there_are}
        known: dict[str, dict[str, Any]] = {}
        for text in path.read_text().splitlines() if path.exists() else ():
            row = json.loads(text)
            if row["source"] == sources.get(row["name"]):
                known[row["name"]] = row
        return cls(path, known)

    def add(self, row: dict[str, Any]) -> None:
        self.known[row["name"]] = row
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")


def explained() -> dict[str, str]:
    """Mutation -> why no test can notice it."""
    entries = tomllib.loads(EXPLAINED.read_text()).get("survivor", []) if EXPLAINED.exists() else []
    return {name: entry["why"] for entry in entries for name in entry["mutations"]}


def all_mutations() -> list[Mutation]:
    return [mutation for module in MODULES for mutation in mutations_of(PACKAGE / f"{module}.py", module)]


def chosen(args: argparse.Namespace, results: Results, there_are: Sequence[Mutation]) -> list[Mutation]:
    found = [mutation for mutation in there_are if not args.module or mutation.module in args.module]
    if args.sample and args.sample < len(found):
        found = random.Random(args.seed).sample(found, args.sample)
    if args.only:
        return [m for m in found if args.only in m.name]
    if args.again:
        return [m for m in found if results.known.get(m.name, {}).get("verdict") == args.again]
    why = explained()  # those last: they run through everything and tell nothing new
    return sorted((m for m in found if m.name not in results.known), key=lambda m: m.name in why)


@dataclass(eq=False)
class Child:
    """A process that tries one mutation."""

    pid: int
    reader: int
    mutation: Mutation
    num_tests: int
    start_s: float
    cpu_s: float = 0.0  # that it had used when it was last looked at closely
    watched_s: float = 0.0  # since then; a run that is stopped meanwhile does not count

    def is_over_time(self, passed_s: float) -> bool:
        """Whether to end it. ``passed_s``: since it was asked last."""
        self.watched_s += min(passed_s, 1.0)
        if self.watched_s >= WAITING_S:
            used_s = processor_time_s(self.pid)
            if used_s - self.cpu_s < WAITING_CPU_S:
                return True
            self.cpu_s, self.watched_s = used_s, 0.0
        return time.monotonic() >= self.start_s + CHILD_TIMEOUT_S


def processor_time_s(pid: int) -> float:
    """Of a child of ours, ended or not; see proc(5)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def run(args: argparse.Namespace, results: Results, there_are: Sequence[Mutation]) -> None:
    covered = {} if args.tests or args.stateful or args.simulated else coverage()
    at_import = lines_at_import()
    waiting = spread(chosen(args, results, there_are), covered)
    print(f"{len(waiting)} mutations to try, {args.jobs} at a time", flush=True)
    running: list[Child] = []
    total, done = len(waiting), 0
    waiting.reverse()
    looked_s = time.monotonic()
    while waiting or running:
        while waiting and len(running) < args.jobs:
            mutation = waiting.pop()
            tests = tests_for(mutation, covered, at_import)
            pid, reader = in_child(lambda m=mutation, t=tests: attempt(m, args, t))
            running.append(Child(pid, reader, mutation, len(tests), time.monotonic()))
        ready, _, _ = select.select([child.reader for child in running], [], [], 0.5)
        passed_s, looked_s = time.monotonic() - looked_s, time.monotonic()
        for child in list(running):
            is_over_time = child.is_over_time(passed_s)
            if child.reader not in ready and not is_over_time:
                continue
            running.remove(child)
            answer = read_child(child.pid, child.reader, 0.0 if is_over_time else child.start_s + CHILD_TIMEOUT_S)
            (STATE / f"child-{child.pid}.log").unlink(missing_ok=True)
            verdict, by = judged(answer)
            seconds = time.monotonic() - child.start_s
            results.add(row_of(child.mutation, verdict, by, child.num_tests, seconds))
            done += 1
            mark = "" if verdict == "killed" else f"  {verdict.upper()}"
            print(f"{done}/{total} {seconds:5.1f} s {child.mutation.line:4} {child.mutation.name}{mark}", flush=True)


def judged(answer: dict[str, Any] | None) -> tuple[str, str]:
    if answer is None:
        return "killed", "it did not end in time, or took the process with it"
    if answer["code"] in PASSED:
        return "survived", ""
    return "killed", answer["failed"] or "the tests could not be run"


def row_of(mutation: Mutation, verdict: str, by: str, num_tests: int, seconds: float) -> dict[str, Any]:
    return {
        "name": mutation.name,
        "module": mutation.module,
        "line": mutation.line,
        "source": mutation.source,
        "verdict": verdict,
        "by": by,
        "tests": num_tests,
        "seconds": round(seconds, 2),
    }


def report(results: Results, there_are: Sequence[Mutation]) -> int:
    """Write report.json and report.md; how many survivors nobody has explained."""
    why = explained()
    totals = Counter(mutation.module for mutation in there_are)
    lines = [
        "| module | mutations | tried | noticed | explained | not noticed | score |",
        "|---|---|---|---|---|---|---|",
    ]
    rows = list(results.known.values())
    unexplained = [row for row in rows if row["verdict"] == "survived" and row["name"] not in why]
    for module in (*MODULES, "all"):
        mine = [row for row in rows if module in ("all", row["module"])]
        verdicts = Counter(row["verdict"] for row in mine)
        left = sum(row["name"] not in why for row in mine if row["verdict"] == "survived")
        score = f"{verdicts['killed'] / (verdicts['killed'] + left):.1%}" if verdicts["killed"] + left else ""
        total = len(there_are) if module == "all" else totals[module]
        lines.append(
            f"| {module} | {total} | {len(mine)} | {verdicts['killed']} | {verdicts['survived'] - left} "
            f"| {left} | {score} |"
        )
    table = "\n".join(lines)
    survivors = "\n".join(f"* `{row['name']}` (line {row['line']}) {row['by']}" for row in unexplained)
    (STATE / "report.md").write_text(f"{table}\n\n{survivors}\n")
    (STATE / "report.json").write_text(json.dumps(sorted(rows, key=lambda r: r["name"]), indent=1))
    print(f"\n{table}\n")
    if survivors:
        print(f"not noticed and not explained in {EXPLAINED.name}:\n{survivors}")
    for row in rows:
        if row["verdict"] == "killed" and row["name"] in why:
            print(f"explained, and noticed all the same: {row['name']}, by {row['by']}")
    print(f"in full: {STATE / 'report.json'}")
    return len(unexplained)


def preload() -> Iterator[str]:
    """Import what is slow and not ours, once, before anything is forked."""
    for name in ("numpy", "torch", "hypothesis", "hypothesis.stateful", "msgspec", "transitions", "zmq", "pytest"):
        importlib.import_module(name)
        yield name


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--module", action="append", choices=MODULES, help="only this module (may be given again)")
    parser.add_argument("--sample", type=int, default=0, help="only so many, chosen at random")
    parser.add_argument("--seed", type=int, default=1, help="decides which")
    parser.add_argument("--only", default="", help="only mutations whose name holds this text, tried again")
    parser.add_argument("--again", choices=("survived", "killed"), help="only those that ended so, tried again")
    parser.add_argument("--stateful", action="store_true", help="on tests/stateful, a minute each, for survivors")
    parser.add_argument("--simulated", action="store_true", help="before the simulation alone, for survivors")
    parser.add_argument("--tests", nargs="+", metavar="FILE", help="on these files alone, say those just written")
    parser.add_argument("--jobs", type=int, default=2, help="at a time")
    parser.add_argument("--report", action="store_true", help="only write the report of what is known")
    args = parser.parse_args(arguments)
    if missing := [path for path in args.tests or () if not (ROOT / path.partition("::")[0]).exists()]:
        parser.error(f"--tests: there is no {missing[0]} in {ROOT}")  # or every mutation would count as noticed
    STATE.mkdir(parents=True, exist_ok=True)
    there_are = all_mutations()
    results = Results.load(there_are)
    if not args.report:
        list(preload())
        run(args, results, there_are)
    return 1 if report(results, there_are) else 0


if __name__ == "__main__":
    sys.exit(main())
