// MXFP8 output: e4m3 values with one e8m0 scale per 32 columns, scales in FlashInfer's 128x4 swizzled order.
#pragma once
#include "common.cuh"

// Smallest power of two that brings `peak` to at most 448, as an e8m0 byte; subnormal results round like FlashInfer's
// positive-rounding conversion, in which 2**-127 holds all of the lower half of the subnormals.
DEVICE u32 scale_byte(float peak) {
    float normalized = __fmul_rn(peak, 1.0f / 448.0f);
    u32 bits = __float_as_uint(normalized), exponent = bits >> 23 & 255u, mantissa = bits & 0x7fffffu;
    bool round_up = mantissa != 0 && !(exponent == 0 && mantissa <= 0x400000u);
    u32 byte = exponent + round_up;
    return normalized <= 0.f ? 0u : byte < 254u ? byte : 254u;
}

DEVICE u32 e4m3_bits(float x) {
#if __CUDA_ARCH__ >= 890
    u16 pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.f), "f"(x));
    return pair & 0xffu;
#else
    // Round to nearest even at e4m3's precision by integers: 3 fraction bits for normals, steps of 2**-9 below 2**-6.
    u32 bits = __float_as_uint(x), sign = bits >> 24 & 0x80u, magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return sign | 0x7fu;
    if (magnitude >= 0x43e00000u) return sign | 0x7eu;
    if (magnitude < 0x3c800000u) return sign | static_cast<u32>(__float2int_rn(__uint_as_float(magnitude) * 512.f));
    u32 rounded = magnitude + 0x7ffffu + (magnitude >> 20 & 1u);
    return sign | ((rounded >> 20) - (120u << 3));
#endif
}

// Called by a whole warp, lane = column inside the block of 32. q: u8 [rows, columns]; scales: u8, 128 padded rows.
DEVICE void store_mxfp8(u8 *q, u8 *scales, int row, int rows, int column_block, int columns, float value) {
    int lane = lane_id();
    float peak = fabsf(value);
    // Not an integer maximum of the bits: a NaN is skipped here, as in the stock kernel.
    for (int step = 16; step > 0; step /= 2) peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, step));
    u32 byte = scale_byte(peak);
    float inverse = __uint_as_float(byte == 0 ? 0u : (254u - byte) << 23);
    float scaled = fminf(fmaxf(__fmul_rn(value, inverse), -448.f), 448.f);
    u8 *tile = scales + (column_block / 4) * 512;
    if (row < rows)
        q[static_cast<long long>(row) * columns + column_block * 32 + lane] = static_cast<u8>(e4m3_bits(scaled));
    // Row r of the first 32 stands at byte r * 16 of its 512-byte tile, rows 32 apart 4 bytes further. Each of the 8
    // warps writes its own row and zeroes 15 of the 120 padding rows, so that no two blocks touch one byte.
    if (lane == 0) tile[row * 16 + column_block % 4] = row < rows ? static_cast<u8>(byte) : u8(0);
    if (lane < 15) {
        int padding = 8 + row * 15 + lane;
        tile[padding % 32 * 16 + padding / 32 * 4 + column_block % 4] = 0;
    }
}
