"""A steady loop while real XGrammar compiles grammars in the background, by where the compiling threads run.

* no pinning: the loop and the pool's threads run where the kernel puts them;
* overlapping: the pool's threads on the first CPUs of the share, where the loop runs too, as engines do it;
* this one: `compile_pool()`, whose cores the loop leaves.

The loop has processes of its own, one for each CPU that the pool does not have, so that what Python's own
lock costs is not measured. The layouts take turns, so that a noisy minute falls on all of them.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

LOOP = "loop"
LAYOUTS = ("idle", "no pinning", "overlapping", "this one")
ROUNDS = int(os.environ.get("BENCH_ROUNDS", "5"))
SECONDS = float(os.environ.get("BENCH_SECONDS", "4"))
VOCABULARY = 64_000
THREADS = 8  # XGrammar's own default, for each compilation
STEP = 12_000  # additions of a loop's iteration: about a millisecond


def main() -> int:
    missing = [name for name in ("xgrammar", "torch") if importlib.util.find_spec(name) is None]
    if missing:
        print(
            f"compilation beside a steady loop: left out, {' and '.join(missing)} can't be imported by "
            f"{sys.executable}\n  (Install xgrammar with a CPU build of torch there, or name another Python "
            "that has them: make bench BENCH_PYTHON=/path/to/python)"
        )
        return 0
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        print("compilation beside a steady loop: left out, this process may run on one CPU alone")
        return 0
    before = read_cpu_times()
    found: dict[str, list[float]] = {layout: [] for layout in LAYOUTS}
    grammars = dict.fromkeys(LAYOUTS, 0)
    for turn in range(ROUNDS):
        for at in range(len(LAYOUTS)):
            layout = LAYOUTS[(turn + at) % len(LAYOUTS)]
            command = [sys.executable, "-m", "bench.compile_pool", layout]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            answer = json.loads(done.stdout)
            found[layout] += answer["times"]
            grammars[layout] += answer["grammars"]
    steal = read_cpu_times()
    print(
        f"a steady loop beside XGrammar's compilations, {len(cpus)} CPUs, {THREADS} threads each, "
        f"{ROUNDS} times {SECONDS:g} s for each layout"
    )
    for layout in LAYOUTS:
        times = sorted(one * 1000 for one in found[layout])
        print(
            f"  {layout:<12} p50 {quantile(times, 50):7.2f} ms   p99 {quantile(times, 99):7.2f} ms   "
            f"worst {times[-1]:7.2f} ms   {len(times)} iterations, {grammars[layout]} grammars"
        )
    idle = sorted(one * 1000 for one in found["idle"])
    total = sum(steal.values()) - sum(before.values())
    taken = 100 * (steal["steal"] - before["steal"]) / total if total else 0.0
    spread = quantile(idle, 99) / quantile(idle, 50)
    load = os.getloadavg()[0]
    word = "quiet" if spread < 1.5 and taken < 1 else "noisy"
    print(
        f"  the machine was {word}: with nothing to compile the loop's p99 was {spread:.2f} of its p50 and its "
        f"worst {idle[-1] / quantile(idle, 50):.0f}; {taken:.1f} % of CPU time was stolen, load {load:.1f} at the end"
    )
    return 0


def run_layout(layout: str) -> None:
    """Runs one layout in this process, and prints the loops' times and how many grammars were compiled."""
    cpus = sorted(os.sched_getaffinity(0))
    count = max(1, len(cpus) // 4)
    pool, stop = make_pool(layout, cpus, count), threading.Event()
    compiled = [0]
    if pool is not None:
        start_compiling(pool, stop, compiled)
    command = [sys.executable, "-m", "bench.compile_pool", LOOP]
    # They inherit the CPUs that this thread has by now.
    loops = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        for _ in range(len(cpus) - count)
    ]
    answers = [one.communicate()[0] for one in loops]
    stop.set()
    if pool is not None:
        pool.shutdown()
    times = [one for answer in answers for one in json.loads(answer)]
    print(json.dumps({"times": times, "grammars": compiled[0]}))


def make_pool(layout: str, cpus: list[int], count: int) -> Executor | None:
    """The pool of a layout; None for no pool."""
    if layout == "idle":
        return None
    if layout == "no pinning":
        return ThreadPoolExecutor(count)
    if layout == "overlapping":
        first = cpus[:count]
        return ThreadPoolExecutor(count, initializer=lambda: os.sched_setaffinity(0, first))
    from provisioner.idset import CpuSet
    from provisioner.worker import compile_pool

    os.environ["DEEPINFER_SO_BUILDER_CPUS"] = str(count)
    return compile_pool(CpuSet(cpus))


def start_compiling(pool: Executor, stop: threading.Event, compiled: list[int]) -> None:
    """Keeps the pool busy with grammars until it is stopped; returns after the first one."""
    compiler = make_compiler()
    first = threading.Event()

    def compile_one(number: int) -> None:
        if stop.is_set():
            return
        compiler(make_schema(number))
        compiled[0] += 1
        first.set()
        pool.submit(compile_one, number + 1)

    pool.submit(compile_one, 0)
    if not first.wait(120):
        raise TimeoutError("XGrammar compiled nothing within two minutes")


def make_compiler() -> Callable[[str], Any]:
    """XGrammar's compiler of JSON schemas for a made vocabulary, without its cache."""
    import xgrammar

    draw = random.Random(1)
    letters = 'abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"{}[]:, .-_\\/'
    vocabulary = set(letters)
    while len(vocabulary) < VOCABULARY - 1:
        vocabulary.add("".join(draw.choices(letters, k=draw.randint(2, 8))))
    tokens = [*sorted(vocabulary), "</s>"]
    information = xgrammar.TokenizerInfo(
        tokens, vocab_type=xgrammar.VocabType.RAW, stop_token_ids=[len(tokens) - 1]
    )
    compiler = xgrammar.GrammarCompiler(information, max_threads=THREADS, cache_enabled=False)
    compile_schema: Callable[[str], Any] = compiler.compile_json_schema
    return compile_schema


def make_schema(number: int) -> str:
    """A JSON schema that no other number has."""
    draw = random.Random(number)
    kinds = ("string", "integer", "number", "boolean")
    fields: dict[str, Any] = {f"f{number}_{at}": {"type": draw.choice(kinds)} for at in range(16)}
    names = {f"x{at}": {"enum": [f"v{number}{at}{one}" for one in range(12)]} for at in range(8)}
    item = {"type": "object", "properties": names, "required": list(names)}
    fields["items"] = {"type": "array", "items": item}
    return json.dumps({"type": "object", "properties": fields, "required": list(fields)})


def loop(seconds: float) -> list[float]:
    """The seconds that each iteration of a steady loop takes."""
    times = []
    end = time.perf_counter() + seconds
    last = time.perf_counter()
    while last < end:
        total = 0
        for one in range(STEP):
            total += one
        now = time.perf_counter()
        times.append(now - last)
        last = now
    return times


def quantile(ordered: list[float], percent: int) -> float:
    """The percentile of values in ascending order."""
    return statistics.quantiles(ordered, n=100)[percent - 1]


def read_cpu_times() -> dict[str, int]:
    """The machine's CPU times by kind, in ticks. Source: proc_stat(5)."""
    with open("/proc/stat") as file:
        values = [int(word) for word in file.readline().split()[1:9]]
    names = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
    return dict(zip(names, values, strict=True))


if __name__ == "__main__":
    if sys.argv[1:] == [LOOP]:
        print(json.dumps(loop(SECONDS)))
    elif len(sys.argv) > 1:
        run_layout(sys.argv[1])
    else:
        sys.exit(main())
