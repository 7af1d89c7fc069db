// bf16 weight -> codes and exponents, the integer arithmetic of reference.encode. One warp per 32x32 block.
#include "common.cuh"

constexpr int WARPS = 8;

// Smallest exponent byte whose scale brings the largest magnitude (bf16 bits) to at most 448; 127 for a block of zeros.
DEVICE int smallest_exponent(u32 peak) {
    if (peak == 0) return 127;
    // 448 is 1.75 * 2**8: the top octave is usable up to fraction 0x60, above that the next scale is needed.
    int exponent = static_cast<int>(peak >> 7) - 8 + ((peak & 0x7fu) > 0x60u);
    return exponent < 0 ? 0 : exponent > 254 ? 254 : exponent;
}

// One value -> e4m3 byte at that scale, truncated; only the proof says whether it is exact.
DEVICE u32 encode_value(u32 bits, int exponent) {
    int field = bits >> 7 & 0xffu;
    u32 significand = (bits & 0x7fu) + (field > 0 ? 0x80u : 0u);
    int shift = (field > 1 ? field : 1) - exponent + 2;
    // In units of e4m3's smallest step, 2**-9 times the scale.
    u32 steps = shift >= 0 ? significand << (shift < 17 ? shift : 17) : significand >> (-shift < 31 ? -shift : 31);
    int octave = 28 - __clz(steps);
    octave = octave < 0 ? 0 : octave;
    u32 code = (steps >> octave) + (octave << 3);
    return (code < 0x7eu ? code : 0x7eu) | (bits >> 8 & 0x80u);
}

// Two pairs of neighbouring columns, of rows g and g + 8 -> the word of the tile (blocks.py).
DEVICE u32 encode_word(u32 upper, u32 lower, int exponent) {
    return encode_value(upper & 0xffffu, exponent) | encode_value(lower & 0xffffu, exponent) << 8 |
           encode_value(upper >> 16, exponent) << 16 | encode_value(lower >> 16, exponent) << 24;
}

DEVICE u32 peak_of(uint4 v) {
    u32 peak = 0;
    const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        u32 low = words[i] & 0x7fffu, high = words[i] >> 16 & 0x7fffu;
        peak = max(peak, max(low, high));
    }
    return peak;
}

// Grid (R / 32 * D / 32 / 8 rounded up, G), 256 threads. weight: bf16 [G, R, D], contiguous.
extern "C" __global__ void __launch_bounds__(WARPS * 32)
    encode(const u16 *weight, u8 *codes, u8 *exponents, int rank, int depth) {
    int lane = lane_id(), group = blockIdx.y, column_tiles = depth / 32;
    int block = blockIdx.x * WARPS + warp_id();
    if (block >= rank / 32 * column_tiles) return;
    int row_block = block / column_tiles, column_tile = block % column_tiles;
    const u16 *src = weight + (static_cast<long long>(group) * rank + row_block * 32 + lane / 4) * depth +
                     column_tile * 32 + lane % 4 * 8;
    uint4 rows[4];
    u32 peak = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        rows[i] = load_stream(src + static_cast<long long>(i) * 8 * depth);
        peak = max(peak, peak_of(rows[i]));
    }
    peak = __reduce_max_sync(~0u, peak);
    int exponent = smallest_exponent(peak);
    if (lane == 0)
        exponents[(static_cast<long long>(group) * (rank / 32) + row_block) * column_tiles + column_tile] =
            static_cast<u8>(exponent);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        uint4 up = rows[2 * half], low = rows[2 * half + 1], tile;
        tile.x = encode_word(up.x, low.x, exponent);
        tile.y = encode_word(up.y, low.y, exponent);
        tile.z = encode_word(up.z, low.z, exponent);
        tile.w = encode_word(up.w, low.w, exponent);
        transpose_quad(tile);
        long long at =
            (static_cast<long long>(group) * (rank / 16) + row_block * 2 + half) * column_tiles + column_tile;
        *reinterpret_cast<uint4 *>(codes + at * TILE_BYTES + lane * 16) = tile;
    }
}
