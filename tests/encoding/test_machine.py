"""The CPUs a process may use, from made-up cgroup trees, and the name of the processor."""

import ctypes
import os
import platform
import re
from pathlib import Path

import pytest

from cloze.machine import available_cpus, has_bf16, memory_limit, processor, resident_memory, trim_memory

X86 = "processor : 0\nmodel name\t: AMD EPYC 9B14\nflags\t\t: fpu sse2 avx2 avx512f avx512_vnni\n"
ARM = "processor\t: 0\nFeatures\t: fp asimd asimddp i8mm\nCPU part\t: 0xd4f\n"


@pytest.fixture(autouse=True)
def eight_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def cpus(root: Path, membership: str) -> int:
    write(root / "membership", membership)
    return available_cpus(root, root / "membership")


def test_affinity_where_there_is_no_cgroup(tmp_path: Path) -> None:
    assert available_cpus(tmp_path, tmp_path / "absent") == 8


@pytest.mark.parametrize(("limit", "count"), [("300000 100000", 3), ("max 100000", 8), ("50000 100000", 1)])
def test_v2_quota(tmp_path: Path, limit: str, count: int) -> None:
    write(tmp_path / "a/b/cpu.max", limit)
    assert cpus(tmp_path, "0::/a/b\n") == count


def test_v2_quota_of_a_parent(tmp_path: Path) -> None:
    write(tmp_path / "a/cpu.max", "200000 100000")
    write(tmp_path / "a/b/cpu.max", "max 100000")
    assert cpus(tmp_path, "0::/a/b\n") == 2


def test_v2_in_a_container_that_sees_its_own_group_as_the_root(tmp_path: Path) -> None:
    write(tmp_path / "cpu.max", "400000 100000")
    assert cpus(tmp_path, "0::/outside/path\n") == 4


@pytest.mark.parametrize(("quota", "count"), [("150000", 1), ("250000", 2), ("-1", 8)])
def test_v1_quota(tmp_path: Path, quota: str, count: int) -> None:
    write(tmp_path / "cpu,cpuacct/x/cpu.cfs_quota_us", quota)
    write(tmp_path / "cpu,cpuacct/x/cpu.cfs_period_us", "100000")
    assert cpus(tmp_path, "5:memory:/y\n4:cpu,cpuacct:/x\n") == count


def test_affinity_bounds_a_larger_quota(tmp_path: Path) -> None:
    write(tmp_path / "cpu.max", "6400000 100000")
    assert cpus(tmp_path, "0::/\n") == 8


def test_the_memory_limit_is_the_smallest_of_the_groups(tmp_path: Path) -> None:
    write(tmp_path / "membership", "0::/a/b\n")
    assert memory_limit(tmp_path, tmp_path / "membership") is None
    write(tmp_path / "a/memory.max", "2147483648\n")
    write(tmp_path / "a/b/memory.max", "max\n")
    assert memory_limit(tmp_path, tmp_path / "membership") == 2**31


def test_the_groups_of_this_process_are_read() -> None:
    assert 1 <= available_cpus() <= 8


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (X86, r"AMD EPYC 9B14 \(avx2, avx512f, avx512_vnni\)"),
        (ARM, r".* \(asimddp, i8mm\)"),
        ("", r".* \(no vector extensions known\)"),
    ],
)
def test_a_processor_and_its_extensions(text: str, expected: str, tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(text)
    assert re.fullmatch(expected, processor(tmp_path / "cpuinfo"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("model name : A\nflags : fpu avx2 avx512f avx512_bf16\n", True),
        ("model name : A\nflags : fpu amx_bf16 amx_tile\n", True),
        ("Features : fp asimd bf16 i8mm\n", True),
        ("model name : A\nflags : fpu avx2 avx512f avx512_vnni\n", False),
        ("", False),
    ],
)
def test_whether_a_processor_has_bf16(text: str, expected: bool, tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(text)
    assert has_bf16(tmp_path / "cpuinfo") is expected
    assert has_bf16(tmp_path / "nowhere") is False


def test_a_processor_where_the_system_has_no_such_file(tmp_path: Path) -> None:
    assert processor(tmp_path / "none").endswith("(no vector extensions known)")


def test_what_this_process_has(tmp_path: Path) -> None:
    (tmp_path / "status").write_text("VmHWM:\t9 kB\nVmRSS:\t    2048 kB\n")
    assert resident_memory(tmp_path / "status") == 2 * 2**20
    assert resident_memory(tmp_path / "none") is None


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's malloc_trim")
def test_small_freed_blocks_return_to_the_system() -> None:
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    *blocks, last = [libc.malloc(4000) for _ in range(20_000)]  # 80 MB; the last block keeps the others below the top
    for block in blocks:
        libc.free(block)
    kept = resident_memory()
    trim_memory()
    left = resident_memory()
    libc.free(last)
    assert kept is not None
    assert left is not None
    assert kept - left > 40_000_000
