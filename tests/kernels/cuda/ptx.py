"""Executes a few PTX instructions. Holds no tests."""

import operator

import torch
from torch import Tensor


def execute(assembly: str, registers: dict[str, int]) -> dict[str, int]:
    """Execute a few PTX instructions on 32-bit registers, from their definitions (PTX ISA 8.5, section 9.7)."""

    def value(operand: str) -> int:
        return int(operand, 0) if operand[0].isdigit() else registers[operand]

    def bf16x2(word: int) -> Tensor:
        return torch.tensor([word & 0xFFFF, word >> 16]).to(torch.uint16).view(torch.bfloat16).double()

    for line in assembly.splitlines():
        if line.strip() in ("", "{", "}") or line.strip().startswith(".reg"):
            continue
        name, rest = line.strip().rstrip(";").split(" ", 1)
        out, *operands = (part.strip() for part in rest.split(","))
        if name == "fma.rn.bf16x2":
            a, b, c = (bf16x2(value(operand)) for operand in operands)
            low, high = (a * b + c).bfloat16().view(torch.uint16).tolist()
            registers[out] = low | high << 16
            continue
        a, *others = (value(operand) for operand in operands)
        if name == "prmt.b32":
            either = a | others[0] << 32
            registers[out] = sum((either >> 8 * (others[1] >> 4 * i & 15) & 0xFF) << 8 * i for i in range(4))
            continue
        if name == "lop3.b32":
            assert others[2] == 0xEA, "(a & b) | c"
            registers[out] = a & others[0] | others[1]
        elif name == "mov.b32":
            registers[out] = a
        else:
            operation = {"shl.b32": operator.lshift, "shr.u32": operator.rshift, "and.b32": operator.and_}[name]
            registers[out] = operation(a, others[0]) & 0xFFFFFFFF
    return registers


def bf16_of(words: list[int]) -> Tensor:
    halves = torch.tensor([half for word in words for half in (word & 0xFFFF, word >> 16)])
    return halves.to(torch.uint16).view(torch.bfloat16).double()
