"""C++ of the wgmma instructions: their operand lists depend on the shape, so the text is made here."""

from __future__ import annotations


def wgmma_header(tokens: int) -> str:
    """C++ of ``wgmma(d, a0, a1, a2, a3, descriptor)``: 64 x ``tokens`` x 16, A from registers, accumulating."""
    count = tokens // 2
    results = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    a = ", ".join(f"%{count + i}" for i in range(4))
    return (
        f"DEVICE void wgmma(float (&d)[{count}], u32 a0, u32 a1, u32 a2, u32 a3, u64 descriptor) {{\n"
        '    asm volatile("{.reg .pred accumulate; setp.eq.u32 accumulate, 0, 0; "\n'
        f'        "wgmma.mma_async.sync.aligned.m64n{tokens}k16.f32.bf16.bf16 {{{results}}}, {{{a}}}, %{count + 4}, "\n'
        '        "accumulate, 1, 1, 0;}"\n'
        f'        : {outputs} : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(descriptor));\n'
        "}\n"
    )


def wgmma_shared_header(rows: int) -> str:
    """C++ of ``wgmma_shared(d, a, b)``: 64 x ``rows`` x 16, both operands in shared memory, accumulating."""
    count = rows // 2
    results = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    return (
        f"DEVICE void wgmma_shared(float (&d)[{count}], u64 a, u64 b) {{\n"
        '    asm volatile("{.reg .pred accumulate; setp.eq.u32 accumulate, 0, 0; "\n'
        f'        "wgmma.mma_async.sync.aligned.m64n{rows}k16.f32.bf16.bf16 {{{results}}}, %{count}, %{count + 1}, "\n'
        '        "accumulate, 1, 1, 0, 0;}"\n'
        f'        : {outputs} : "l"(a), "l"(b));\n'
        "}\n"
    )
