"""From rules to a classic BPF program, as `bwrap --seccomp FD` and `prctl(PR_SET_SECCOMP)` take it.

The program finds the rule of a call by bisecting the call numbers, so that its length does not matter much: some nine
comparisons. For calls whose rule has no condition the kernel remembers the verdict and does not run it at all.

Source: the kernel's seccomp_filter.rst (arguments are 64 bits wide, little-endian on both machines) and bpf(4).
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Final, NamedTuple

from goondan.toolhost.seccomp.numbers import NUMBERS, Machine
from goondan.toolhost.seccomp.own import host_rules, relay_rules, template_rules, worker_rules
from goondan.toolhost.seccomp.rules import ALLOW, ENOSYS, Rule, Test, Verdict, rules

#: AUDIT_ARCH_X86_64 and AUDIT_ARCH_AARCH64: a call made another way (32 bits) has other numbers.
ARCHITECTURES: Final[dict[Machine, int]] = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

RET_ALLOW: Final = 0x7FFF0000
RET_ERRNO: Final = 0x00050000
RET_KILL_PROCESS: Final = 0x80000000

# struct seccomp_data: int nr, u32 arch, u64 instruction_pointer, u64 args[6]
_NR: Final = 0
_ARCH: Final = 4
_ARGS: Final = 16

LOAD: Final = 0x20  # BPF_LD | BPF_W | BPF_ABS
AND: Final = 0x54  # BPF_ALU | BPF_AND | BPF_K
JUMP: Final = 0x05  # BPF_JMP | BPF_JA
JUMP_EQUAL: Final = 0x15  # BPF_JMP | BPF_JEQ | BPF_K
JUMP_AT_LEAST: Final = 0x35  # BPF_JMP | BPF_JGE | BPF_K
RETURN: Final = 0x06  # BPF_RET | BPF_K


class Instruction(NamedTuple):
    """One instruction: struct sock_filter."""

    #: The operation.
    code: int
    #: How many instructions a jump skips if its condition holds.
    jt: int
    #: How many it skips otherwise.
    jf: int
    #: The operand. Of JUMP: how many instructions it skips.
    k: int


@lru_cache
def program(machine: Machine, *, sockets: bool, server: bool = False, drops: bool = False, bare: bool = False) -> bytes:
    """The filter of a jail, as the array of struct sock_filter that the kernel takes. The arguments are those of
    rules.rules.
    """
    return encode(instructions(machine, rules(sockets=sockets, server=server, drops=drops, bare=bare)))


@lru_cache
def relay_program(machine: Machine) -> bytes:
    """The filter of the egress proxy."""
    return encode(instructions(machine, relay_rules()))


@lru_cache
def worker_program(machine: Machine) -> bytes:
    """The filter of an MCP worker."""
    return encode(instructions(machine, worker_rules()))


@lru_cache
def template_program(machine: Machine) -> bytes:
    """The filter of the template that MCP workers are forked from."""
    return encode(instructions(machine, template_rules()))


@lru_cache
def host_program(machine: Machine) -> bytes:
    """The filter of a tool host that root has started."""
    return encode(instructions(machine, host_rules()))


def encode(code: list[Instruction]) -> bytes:
    """Instructions as the kernel reads them; both machines are little-endian."""
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in code)


def instructions(machine: Machine, wanted: dict[str, Rule]) -> list[Instruction]:
    """The program for these rules; names that the machine does not have are left out."""
    numbers = NUMBERS[machine]
    by_number = {numbers[name]: rule for name, rule in wanted.items() if name in numbers}
    return [
        Instruction(LOAD, 0, 0, _ARCH),
        Instruction(JUMP_EQUAL, 1, 0, ARCHITECTURES[machine]),
        Instruction(RETURN, 0, 0, RET_KILL_PROCESS),
        Instruction(LOAD, 0, 0, _NR),
        *_bisect(_ranges(by_number)),
    ]


def _ranges(by_number: dict[int, Rule]) -> list[tuple[int, Rule]]:
    """The whole space of numbers as ranges of one rule each: (first number, rule), in order from 0."""
    unknown = Rule((), ENOSYS)
    ranges: list[tuple[int, Rule]] = []
    for number in range(max(by_number) + 2):
        rule = by_number.get(number, unknown)
        if not ranges or ranges[-1][1] != rule:
            ranges.append((number, rule))
    return ranges


def _bisect(ranges: list[tuple[int, Rule]]) -> list[Instruction]:
    if len(ranges) == 1:
        return _judge(ranges[0][1])
    middle = len(ranges) // 2
    below, above = _bisect(ranges[:middle]), _bisect(ranges[middle:])
    # A conditional jump reaches 255 instructions, an unconditional one everywhere.
    return [
        Instruction(JUMP_AT_LEAST, 0, 1, ranges[middle][0]),
        Instruction(JUMP, 0, 0, len(below)),
        *below,
        *above,
    ]


def _judge(rule: Rule) -> list[Instruction]:
    code: list[Instruction] = []
    for case in rule.cases:
        code += _all_hold(list(case.tests), [_return(case.verdict)])
    return [*code, _return(rule.otherwise)]


def _all_hold(tests: list[Test], then: list[Instruction]) -> list[Instruction]:
    """`then` when all tests hold, and on with what follows it when one does not."""
    if not tests:
        return then
    test, then = tests[0], _all_hold(tests[1:], then)
    code = [Instruction(LOAD, 0, 0, _ARGS + 8 * test.arg)]
    if test.mask != 0xFFFFFFFF:
        code.append(Instruction(AND, 0, 0, test.mask))
    left = len(test.values)
    for value in test.values:
        left -= 1
        # On a match: past the other comparisons, and with `unless` past `then` as well. Else: the next comparison.
        matched = left + (len(then) if test.unless else 0)
        missed = 0 if left or test.unless else len(then)
        code.append(Instruction(JUMP_EQUAL, matched, missed, value))
    return code + then


def _return(verdict: Verdict) -> Instruction:
    return Instruction(RETURN, 0, 0, RET_ALLOW if verdict == ALLOW else RET_ERRNO | verdict)
