"""Fuzzes one target: python -m fuzz.run TARGET SECONDS [libFuzzer's options].

Inputs that reach something new are kept in build/fuzz/TARGET, so that the next run goes on from them.
One that fails is written to build/fuzz, and belongs into tests/test_fuzzed.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["provisioner"], enable_loader_override=False):
    from fuzz.seeds import seeds
    from fuzz.targets import TARGETS

_OUT = Path("build/fuzz")


def main() -> None:
    """Fuzzes the target that the command line names."""
    target, seconds, *options = sys.argv[1:]
    corpus = _OUT / target
    corpus.mkdir(parents=True, exist_ok=True)
    for number, data in enumerate(seeds(target)):
        (corpus / f"seed{number}").write_bytes(data)
    atheris.Setup(
        [
            sys.argv[0],
            str(corpus),
            f"-max_total_time={seconds}",
            f"-artifact_prefix={_OUT}/{target}-",
            "-max_len=65536",
            "-timeout=30",
            "-rss_limit_mb=2048",
            *options,
        ],
        TARGETS[target],
    )
    atheris.Fuzz()


if __name__ == "__main__":
    main()
