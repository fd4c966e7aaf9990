"""How far apart two cores are: the time a cache line takes from one to the other.

A virtual machine may say that its cores share a last-level cache while its host has
them on two chips. Nothing inside the machine shows that but the time itself: about 40
to 60 ns when they share the cache, about 200 ns when they do not. A program that
splits every operation among its cores then takes 1.5 times as long; one whose cores
work alone does not notice. So a comparison of two such programs needs to know.
"""

import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path


NEAR_NS = 100.0  # between what was measured on one chip (65) and across two (180)


_SOURCE = r"""
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <time.h>

enum { TRIPS = 10000 };
static _Atomic long line __attribute__((aligned(128)));

static void run_on(int core) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(core, &set);
  pthread_setaffinity_np(pthread_self(), sizeof set, &set);
}

static void await(long value) {
  while (atomic_load_explicit(&line, memory_order_acquire) != value) {}
}

static void *answer(void *core) {
  run_on(*(int *)core);
  for (long i = 0; i < TRIPS; i++) {
    await(2 * i + 1);
    atomic_store_explicit(&line, 2 * i + 2, memory_order_release);
  }
  return 0;
}

static void *ask(void *nanoseconds) {
  struct timespec begin, end;
  for (long i = 0; i < TRIPS; i++) {
    if (i == TRIPS / 4) clock_gettime(CLOCK_MONOTONIC, &begin);  /* both awake */
    atomic_store_explicit(&line, 2 * i + 1, memory_order_release);
    await(2 * i + 2);
  }
  clock_gettime(CLOCK_MONOTONIC, &end);
  *(double *)nanoseconds = ((end.tv_sec - begin.tv_sec) * 1e9 +
                            (end.tv_nsec - begin.tv_nsec)) /
                           (2 * (TRIPS - TRIPS / 4));
  return 0;
}

static int first_core;
static void *ask_from_first(void *nanoseconds) {
  run_on(first_core);
  return ask(nanoseconds);
}

double distance(int first, int second) {
  pthread_t asking, answering;
  double nanoseconds = 0;
  line = 0;
  first_core = first;
  pthread_create(&answering, 0, answer, &second);
  pthread_create(&asking, 0, ask_from_first, &nanoseconds);
  pthread_join(asking, 0);
  pthread_join(answering, 0);
  return nanoseconds;
}
"""


def probe() -> Callable[[], float] | None:
    """What measures the largest distance in ns from the first core, in some 4 ms each.

    None where there is nothing to know: one core, cores that do not claim to share a
    cache, no Linux, or no C compiler.
    """
    compiler = shutil.which("cc")
    if not sys.platform.startswith("linux") or compiler is None:
        return None
    first, *others = sorted(os.sched_getaffinity(0))
    if not others or not _claim_one_cache({first, *others}):
        return None
    distance = _compiled(compiler)
    return lambda: max(distance(first, other) for other in others)


def _claim_one_cache(cores: set[int]) -> bool:
    caches = Path("/sys/devices/system/cpu") / f"cpu{min(cores)}" / "cache"
    shared = [path.read_text() for path in caches.glob("index*/shared_cpu_list")]
    return any(cores <= _numbers(text) for text in shared)


def _numbers(ranges: str) -> set[int]:
    """The kernel's "0-3,8" as a set."""
    ends = [part.split("-") for part in ranges.strip().split(",") if part]
    return {i for pair in ends for i in range(int(pair[0]), int(pair[-1]) + 1)}


def _compiled(compiler: str) -> Callable[[int, int], float]:
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "distance.c", Path(folder) / "distance.so"
        source.write_text(_SOURCE)
        options = ["-O2", "-shared", "-fPIC", "-pthread"]
        subprocess.run([compiler, *options, "-o", library, source], check=True)
        distance = ctypes.CDLL(str(library)).distance  # stays mapped without its file
    distance.restype = ctypes.c_double
    return distance
