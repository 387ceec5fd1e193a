"""Runs classic BPF as the kernel runs a seccomp filter, with the checks that it makes before it takes one."""

from __future__ import annotations

import struct

from goondan.toolhost.policy.seccomp import RET_ALLOW, RET_ERRNO

#: BPF_MAXINSNS
MAX_INSTRUCTIONS = 4096


def load(data: bytes) -> list[tuple[int, int, int, int]]:
    """The instructions of a program. Every jump must stay inside, and every path end in a return."""
    assert len(data) % 8 == 0
    code = [struct.unpack_from("<HBBI", data, at) for at in range(0, len(data), 8)]
    assert 0 < len(code) <= MAX_INSTRUCTIONS
    for at, (op, jt, jf, k) in enumerate(code):
        assert op in (0x20, 0x54, 0x05, 0x15, 0x35, 0x06), hex(op)
        if op in (0x15, 0x35):
            assert at + 1 + max(jt, jf) < len(code)
        elif op == 0x05:
            assert at + 1 + k < len(code)
        elif op == 0x20:
            assert k % 4 == 0 and k < 64
    assert code[-1][0] == 0x06
    return code


def run(code: list[tuple[int, int, int, int]], number: int, args: tuple[int, ...], architecture: int) -> int:
    """What the filter returns for one call. Numbers may be negative, arguments have 64 bits."""
    padded = [value & 0xFFFFFFFFFFFFFFFF for value in (*args, 0, 0, 0, 0, 0, 0)][:6]
    data = struct.pack("<iIQ6Q", number, architecture, 0, *padded)
    accumulator, at = 0, 0
    for _ in range(MAX_INSTRUCTIONS):
        op, jt, jf, k = code[at]
        at += 1
        if op == 0x20:
            accumulator = struct.unpack_from("<I", data, k)[0]
        elif op == 0x54:
            accumulator &= k
        elif op == 0x05:
            at += k
        elif op == 0x06:
            return k
        else:
            at += jt if (accumulator == k if op == 0x15 else accumulator >= k) else jf
    raise AssertionError("the filter does not end")


def verdict(returned: int) -> int:
    """0 for an allowed call, else its errno."""
    if returned == RET_ALLOW:
        return 0
    assert returned & 0xFFFF0000 == RET_ERRNO, hex(returned)
    return returned & 0xFFFF
