// One row, in the order of sums of SGLang's Triton gemv; fp32 arithmetic on the CUDA cores.
//
// That kernel gives each of 128 threads 8 columns in a row, four times, 1024 columns apart; read from its PTX
// (triton 3.6.0, sm_90), an output is
//   thread: ((p0 + p1) + p2) + ...      over its 32 products, columns ascending; products rounded to fp32, then added
//   warp:   butterfly over lanes 16, 8, 4, 2, 1
//   block:  (w0 + w2) + (w1 + w3)
// Addition commutes, so only the tree matters. Virtual lane bits 4..2 are bits 2..0 of the tile's column index,
// bits 1..0 the lane's place in its quad; a warp here owns tiles that differ in bits 2 and 1, so that steps 16 and 8
// stay in one lane, and the rest meets in shared memory.
//
// The bound is the number of instructions, not bytes: decoding to bf16 pairs, unpacking, multiplying and adding
// took 7.7 us a layer on an H200 (122 instructions per tile and lane); hardware conversion to fp16 and exponents folded
// into the activations need 46.
#include "common.cuh"

#ifndef DEPTH
#define DEPTH 4096
#endif
static_assert(DEPTH == 4096, "the order of sums is that of 128 threads with 32 columns each");
constexpr int WARPS = 8, THREADS = WARPS * 32, REPEATS = 4, CHAINS = 4, COLUMN_TILES = DEPTH / 32;

struct Shared {
    float x[DEPTH];             // times the scale of the block's row of 32x32 blocks on the quick path
    float partial[16][4][2][4]; // row, virtual warp, lowest tile bit, lane of the quad
    u8 exponents[COLUMN_TILES];
};

// Column tile of this warp's chain j in repeat r: virtual warp = warp / 2, lowest tile bit = warp % 2.
DEVICE int tile_of(int warp, int repeat, int chain) { return repeat * 32 + (warp >> 1) * 8 + chain * 2 + (warp & 1); }

// The quick path multiplies codes by x * 2**(exponent - 127) with fused multiply-adds. It gives the same bits while
// nothing on the way leaves fp32's normal range: non-zero |x| and scales in [2**-40, 2**40) keep every product's last
// bit above 2**-105.
constexpr u32 QUICK_LOW = 87, QUICK_HIGH = 167;
DEVICE bool is_quick(u32 biased) { return biased - QUICK_LOW < QUICK_HIGH - QUICK_LOW; }
DEVICE bool is_quick_pair(u32 pair) {
    u32 low = pair & 0x7fffu, high = pair >> 16 & 0x7fffu;
    return (low == 0 | is_quick(low >> 7)) & (high == 0 | is_quick(high >> 7));
}

#if __CUDA_ARCH__ >= 890
// Two e4m3 bytes, of rows g and g + 8 -> their values; fp16 holds every e4m3 value.
DEVICE void unpack_codes(u16 bytes, float &upper, float &lower) {
    u32 halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(bytes));
    asm("{.reg .b16 low, high; mov.b32 {low, high}, %2; cvt.f32.f16 %0, low; cvt.f32.f16 %1, high;}"
        : "=f"(upper), "=f"(lower)
        : "r"(halves));
}
#endif

// words: this lane's 8 columns in a row of each tile, rows g and g + 8. On the slow path weights are decoded as
// everywhere and products rounded before they are added, as in the stock kernel.
template <bool QUICK> DEVICE void multiply(float (&upper)[CHAINS], float (&lower)[CHAINS],
                                           const uint4 (&words)[REPEATS][CHAINS], const Shared &shared) {
    int lane = lane_id(), warp = warp_id();
#pragma unroll
    for (int r = 0; r < REPEATS; ++r) {
#pragma unroll
        for (int j = 0; j < CHAINS; ++j) {
            int tile = tile_of(warp, r, j);
            const float4 *x = reinterpret_cast<const float4 *>(shared.x + tile * 32 + (lane & 3) * 8);
            float4 first = x[0], second = x[1];
            const float xs[8] = {first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w};
            const u32 w[4] = {words[r][j].x, words[r][j].y, words[r][j].z, words[r][j].w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
#if __CUDA_ARCH__ >= 890
                if (QUICK) {
                    float up, low;
                    unpack_codes(static_cast<u16>(w[i]), up, low);
                    upper[j] = __fmaf_rn(up, xs[2 * i], upper[j]);
                    lower[j] = __fmaf_rn(low, xs[2 * i], lower[j]);
                    unpack_codes(static_cast<u16>(w[i] >> 16), up, low);
                    upper[j] = __fmaf_rn(up, xs[2 * i + 1], upper[j]);
                    lower[j] = __fmaf_rn(low, xs[2 * i + 1], lower[j]);
                    continue;
                }
#endif
                u32 up, low;
                decode_word<true>(w[i], wide_factor(shared.exponents[tile]), up, low);
                upper[j] = __fadd_rn(upper[j], __fmul_rn(low_half(up), xs[2 * i]));
                lower[j] = __fadd_rn(lower[j], __fmul_rn(low_half(low), xs[2 * i]));
                upper[j] = __fadd_rn(upper[j], __fmul_rn(high_half(up), xs[2 * i + 1]));
                lower[j] = __fadd_rn(lower[j], __fmul_rn(high_half(low), xs[2 * i + 1]));
            }
        }
    }
}

// Columns [8i, 8i + 8) of the activations to shared memory, times their block's scale if `quick`.
DEVICE void stage(Shared &shared, int i, uint4 v, bool quick) {
    float scale = quick ? __uint_as_float(shared.exponents[i / 4] << 23) : 1.f;
    const u32 pairs[4] = {v.x, v.y, v.z, v.w};
    float f[8];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        f[2 * k] = __fmul_rn(low_half(pairs[k]), scale);
        f[2 * k + 1] = __fmul_rn(high_half(pairs[k]), scale);
    }
    float4 *to = reinterpret_cast<float4 *>(shared.x + i * 8);
    to[0] = make_float4(f[0], f[1], f[2], f[3]);
    to[1] = make_float4(f[4], f[5], f[6], f[7]);
}

// Grid (R / 16, G), 256 threads. o: bf16 [1, G, DEPTH], group stride in elements; out: bf16 [1, G, R].
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    gemv(const u16 *o, long long group_stride, const u8 *codes, const u8 *exponents, u16 *out, int rank) {
    __shared__ Shared shared;
    int lane = lane_id(), warp = warp_id(), group = blockIdx.y;
    // To registers, all at once: through shared memory (cp.async) the same loads took 2 us longer.
    const u8 *src =
        codes + (static_cast<long long>(group) * (rank / 16) + blockIdx.x) * COLUMN_TILES * TILE_BYTES + lane * 16;
    uint4 words[REPEATS][CHAINS];
#pragma unroll
    for (int r = 0; r < REPEATS; ++r)
#pragma unroll
        for (int j = 0; j < CHAINS; ++j) words[r][j] = load_stream(src + tile_of(warp, r, j) * TILE_BYTES);
    const u8 *block = exponents + (static_cast<long long>(group) * (rank / 32) + blockIdx.x / 2) * COLUMN_TILES;
    bool quick = true;
    if (threadIdx.x < COLUMN_TILES) {
        u32 exponent = block[threadIdx.x];
        shared.exponents[threadIdx.x] = exponent;
        quick = is_quick(exponent);
    }
    wait_for_previous_kernel();
    const uint4 *x = reinterpret_cast<const uint4 *>(o + group * group_stride);
    uint4 mine[DEPTH / 8 / THREADS];
#pragma unroll
    for (int i = 0; i < DEPTH / 8 / THREADS; ++i) mine[i] = x[i * THREADS + threadIdx.x];
#pragma unroll
    for (int r = 0; r < REPEATS; ++r)
#pragma unroll
        for (int j = 0; j < CHAINS; ++j) transpose_quad(words[r][j]);
#pragma unroll
    for (int i = 0; i < DEPTH / 8 / THREADS; ++i) {
        quick = quick & is_quick_pair(mine[i].x) & is_quick_pair(mine[i].y) & is_quick_pair(mine[i].z) &
                is_quick_pair(mine[i].w);
    }
#if __CUDA_ARCH__ >= 890
    quick = !__syncthreads_or(!quick);
#else
    quick = false;
    __syncthreads();
#endif
    let_next_kernel_start(); // when the activations are there: see small.cu
#pragma unroll
    for (int i = 0; i < DEPTH / 8 / THREADS; ++i) stage(shared, i * THREADS + threadIdx.x, mine[i], quick);
    __syncthreads();

    // -0.0 is the neutral element of addition: the first sum is the first product, whatever its sign.
    float upper[CHAINS], lower[CHAINS];
#pragma unroll
    for (int j = 0; j < CHAINS; ++j) upper[j] = lower[j] = -0.f;
    if (quick) multiply<true>(upper, lower, words, shared);
    else multiply<false>(upper, lower, words, shared);
    int t = lane & 3, g = lane >> 2;
    // Chain index is tile bits 2..1: step 16 adds chains 0+2 and 1+3, step 8 their sums.
    shared.partial[g][warp >> 1][warp & 1][t] = (upper[0] + upper[2]) + (upper[1] + upper[3]);
    shared.partial[g + 8][warp >> 1][warp & 1][t] = (lower[0] + lower[2]) + (lower[1] + lower[3]);
    __syncthreads();
    if (threadIdx.x >= 64) return;
    int row = threadIdx.x >> 2;
    const float (&p)[2][4] = shared.partial[row][threadIdx.x & 3];
    float sum = ((p[0][0] + p[1][0]) + (p[0][2] + p[1][2])) + ((p[0][1] + p[1][1]) + (p[0][3] + p[1][3]));
    sum += __shfl_xor_sync(~0u, sum, 2);
    sum += __shfl_xor_sync(~0u, sum, 1);
    if ((threadIdx.x & 3) == 0) out[static_cast<long long>(group) * rank + blockIdx.x * 16 + row] = round_bf16(sum);
}
